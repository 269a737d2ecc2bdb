"""The report of a run folder, in every state that a run can leave it in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fakes.run_folder import BASE, SyntheticRun, write_run_folder

from orbit_runtime.cli.main import run_command
from orbit_runtime.cli.report import format_report
from orbit_runtime.observability.charts import build_charts
from orbit_runtime.observability.metrics import build_row
from orbit_runtime.observability.report import Report, build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.observability.run_folder import read_rows
from orbit_runtime.storage import open_store

PROMISED = {"steps", "reward_first", "reward_last", "publishes", "publishes_proven", "base_digest_before",
            "base_digest_after", "adapter_digest", "trainable_parameters", "resumed"}  # fmt: skip


def report_of(folder: Path, pretend: SyntheticRun, *, now: float = 5000.0) -> Report:
    return build_report(open_store(str(write_run_folder(folder, pretend)), writable=False), now=now)


def test_a_finished_run_is_counted_from_its_folder_alone(tmp_path: Path) -> None:
    facts = report_of(tmp_path, SyntheticRun()).to_json()
    assert set(facts) >= PROMISED
    assert (facts["status"], facts["exit_code"], facts["steps"], facts["steps_total"]) == ("done", 0, 60, 60)
    assert facts["reward_last"] - facts["reward_first"] > 0.25
    assert facts["publishes"] == facts["publishes_proven"] == 61
    assert facts["base_digest_before"] == facts["base_digest_after"] == BASE
    assert facts["adapter_digest"] == f"tree:{60:064x}"
    assert facts["outcomes"] == {"value": 30000, "wrong": 600, "timeout": 120, "crash": 0}
    assert facts["tokens"] == 60 * 1843
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(
    ("ended", "now", "status", "code"),
    [
        ("done", 5000, "done", 0),
        ("exhausted", 5000, "done", 0),
        ("stopped", 5000, "stopped", 75),
        ("GateError", 5000, "failed", 84),
        ("OutOfMemoryError", 5000, "failed", 79),
        ("failed", 5000, "failed", 70),
        (None, 1010, "running", None),
        (None, 5000, "interrupted", None),
    ],
)
def test_how_a_run_stands(tmp_path: Path, ended: str | None, now: float, status: str, code: int | None) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=3, ended=ended), now=now)
    assert (report.status, report.exit_code) == (status, code)
    assert f">{status}" in render_html(report)


def test_a_report_says_whether_sampling_was_deterministic(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3))
    assert build_report(open_store(str(folder), writable=False)).to_json()["deterministic"] is False
    run = json.loads((folder / "run.json").read_text())
    run["resolved"]["spec"]["rollout"] = {"deterministic": True}
    (folder / "run.json").write_text(json.dumps(run))
    report = build_report(open_store(str(folder), writable=False))
    assert report.to_json()["deterministic"] is True
    assert "deterministic" in render_html(report)


def test_a_report_says_how_adapters_reached_the_engine(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3))
    run = json.loads((folder / "run.json").read_text())
    for engine, told in (("SGLang", "SharedMemory"), ("Torch", None)):
        run["resolved"]["spec"]["rollout"] = {"engine": engine, "adapterTransport": "SharedMemory"}
        (folder / "run.json").write_text(json.dumps(run))
        report = build_report(open_store(str(folder), writable=False))
        assert report.to_json()["adapter_transport"] == told
        assert "SharedMemory" in render_html(report)


def test_a_report_says_where_the_newest_starts_time_went(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3))
    store = open_store(str(folder))
    assert build_report(store).to_json()["start_seconds"] == {}
    for number, engine in ((1, 99.0), (2, 30.0)):
        seconds = {"importing torch": 8.04, "reading prompts": 0.01, "starting the engine": engine}
        (folder / f"executions/{number:06d}.start.json").write_text(json.dumps({"seconds": seconds}))
    report = build_report(store)
    assert report.to_json()["start_seconds"] == seconds
    assert "38.0 s: importing torch 8.0, starting the engine 30.0<" in render_html(report)
    (folder / "executions/000002.start.json").write_text('{"seconds": [1, ')
    assert build_report(store).to_json()["start_seconds"] == {}


def test_the_loop_that_still_holds_the_folder_says_how_it_ended(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3, ended=None))
    assert build_report(open_store(str(folder)), ended="stopped", now=1001).status == "stopped"


def test_rows_that_are_not_compacted_yet_are_read(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=7, ended=None, compacted=False))
    assert [row["step"] for row in report.rows] == [1, 2, 3, 4, 5, 6, 7]


def test_steps_after_the_last_compaction_are_read_too(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=7))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    assert [row["step"] for row in read_rows(open_store(str(folder)))] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=0, ended=None), now=1001)
    assert report.to_json()["reward_first"] is None
    assert "No step is finished yet." in render_html(report)
    assert "<svg" not in render_html(report)


def test_a_page_before_the_first_publish_does_not_say_that_there_is_no_engine(tmp_path: Path) -> None:
    # What a run's port shows in its first minute: the folder has a first adapter, and no summary yet.
    pretend = SyntheticRun(steps=0, ended=None)
    page = render_html(report_of(tmp_path / "rewards", pretend, now=1001), is_live=True)
    assert "No publish was proven yet." in page
    assert "No engine ran here" not in page
    learned = SyntheticRun(steps=0, ended=None, spec={"algorithm": {"type": "SFT"}})
    assert "No engine ran here" in render_html(report_of(tmp_path / "demonstrations", learned, now=1001))


def test_a_folder_with_nothing_in_it_is_empty(tmp_path: Path) -> None:
    report = build_report(open_store(str(tmp_path)))
    assert report.status == "empty"
    render_html(report)


def test_broken_files_count_as_absent(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=5))
    (folder / "run.json").write_text("{ half")
    (folder / "metrics.jsonl").write_text("{ half\n[]\n")
    (folder / "checkpoints/step-000005/manifest.json").write_text("")
    (folder / "rollouts/step-000001.jsonl.zst").write_bytes(b"\0 not zstandard")
    report = build_report(open_store(str(folder)), now=5000)
    assert report.to_json()["steps"] == 5
    render_html(report)


def test_warnings_follow_from_the_numbers_and_from_the_run(tmp_path: Path) -> None:
    pretend = SyntheticRun(steps=3, warnings=("a group of one has no gradient",))
    report = report_of(tmp_path, pretend)
    assert report.warnings[0] == "a group of one has no gradient"
    assert "6 rewards ran out of time: masked out, not scored 0" in report.warnings
    assert "a group of one has no gradient" in render_html(report)


def test_steps_of_a_solved_run_are_not_told_as_a_lack_of_gradient(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=4, compacted=False))
    for step, mean in ((2, 0.5), (3, 1.0), (4, 1.0)):
        file = folder / f"metrics/step-{step:06d}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"reward_mean": mean, "reward_std": 0.0}))
    warnings = build_report(open_store(str(folder))).warnings
    assert "in 2 of 4 steps all rewards were 1: nothing was left to learn" in warnings
    assert "1 of 4 steps had the same reward for every sample: no gradient" in warnings


@pytest.mark.parametrize(
    ("gain", "rate", "adapter", "is_said"),
    [
        (0.0, 1e-4, {"type": "LoRA"}, True),
        (0.5, 1e-4, {"type": "LoRA"}, False),
        (0.0, 1e-3, {"type": "LoRA"}, False),
        (0.0, 1e-4, {"type": "Full"}, False),
        (0.0, 1e-4, {"type": "LoRA", "initFrom": "runs/first"}, False),
    ],
)
def test_a_reward_that_stands_still_at_a_low_rate_is_told_with_a_usual_one(
    gain: float, rate: float, adapter: dict[str, str], is_said: bool, tmp_path: Path
) -> None:
    spec = {"training": {"steps": 60, "learningRate": rate}, "adapter": adapter}
    told = [each for each in report_of(tmp_path, SyntheticRun(gain=gain, spec=spec)).warnings if "did not rise" in each]
    assert [each.endswith("try training.learningRate 0.001") for each in told] == [True] * is_said


@pytest.mark.parametrize(
    ("gain", "last", "told"),
    [
        (0.5, {}, []),
        (0.5, {"response_tokens_mean": 9.0}, ["answers went from 3 to 9 tokens"]),
        (0.5, {"response_tokens_mean": 1.25}, ["answers went from 3 to 1.25 tokens"]),
        (0.5, {"kl_base": 2.5}, ["the policy moved 2.5 nats per token from the base"]),
        (0.5, {"response_tokens_mean": 5.0, "kl_base": 1.5}, []),
        (0.0, {"response_tokens_mean": 9.0, "kl_base": 2.5}, []),
    ],
)
def test_a_reward_that_rises_while_something_runs_away_is_told(
    gain: float, last: Mapping[str, float], told: list[str], tmp_path: Path
) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(gain=gain, compacted=False))
    for step in range(1, 61):
        file = folder / f"metrics/step-{step:06d}.json"
        changed = {"response_tokens_mean": 3.0} | (last if step > 40 else {})
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    report = build_report(open_store(str(folder)))
    assert [each for each in report.warnings if "while" in each] == [
        f"the reward rose while {each}: read some answers, they may please the reward alone" for each in told
    ]
    assert ("may please the reward alone" in render_html(report)) == bool(told)


def test_the_page_says_what_ran_and_in_which_folder(tmp_path: Path) -> None:
    report = report_of(tmp_path / "int4", SyntheticRun(steps=3, spec={
        "adapter": {"type": "LoRA", "lora": {"rank": 16}},
        "environment": {"rewards": [{"name": "correct"}, {"name": "short"}]},
    }))  # fmt: skip
    assert report.title == "synthetic in int4"
    assert report.described == "tiny-adder (INT4), LoRA of rank 16, GRPO, reward correct, short"
    page = render_html(report)
    assert "<h1>synthetic in int4</h1>" in page
    assert "tiny-adder (INT4), LoRA of rank 16, GRPO, reward correct, short<br>" in page
    file = tmp_path / "int4" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rounding": [{"processor": "A"}, {"processor": "B"}]}))
    assert build_report(open_store(str(file.parent))).described.endswith("correct, short, on B")
    assert report_of(tmp_path / "synthetic", SyntheticRun(steps=3)).title == "synthetic"


def test_the_shade_of_rewards_between_0_and_1_stays_between_them() -> None:
    rows = [build_row(step=step, reward_mean=mean, reward_std=(mean * (1 - mean)) ** 0.5) for step, mean in
            ((1, 0.06), (2, 0.5), (3, 0.97))]  # fmt: skip
    (reward,) = [chart for chart in build_charts(rows) if chart.title == "Reward"]
    band = reward.legend[0].band
    assert band is not None
    assert (band[0][0], band[1][2]) == (0.0, 1.0)
    wide = [build_row(step=step, reward_mean=0.5, reward_std=2.0) for step in (1, 2)]
    (reward,) = [chart for chart in build_charts(wide) if chart.title == "Reward"]
    assert reward.legend[0].band == ([-1.5, -1.5], [2.5, 2.5])


def test_a_failure_is_told_with_its_message(tmp_path: Path) -> None:
    failure = {"error": "DivergedError", "message": "the loss is NaN", "where": "step 4"}
    report = report_of(tmp_path, SyntheticRun(steps=3, ended="DivergedError", failure=failure))
    assert (report.status, report.reason, report.exit_code) == ("failed", "the loss is NaN", 85)
    assert "the loss is NaN" in render_html(report)


class Page(HTMLParser):
    """What a browser would make of the page: its elements, and every address in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[tuple[str | None, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), dict(attrs).get("id")))
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_a_completion_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
    report = report_of(tmp_path, SyntheticRun(name='<b onclick="x">', completion=evil, reference=evil))
    text = render_html(report)
    page = Page()
    page.feed(text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert page.scripts == [("application/json", "rollout-data"), (None, None)]
    shown = json.loads(text.split('id="rollout-data">')[1].split("</script>")[0])
    assert shown["pages"]["1"][0]["rows"][0][1] == evil
    assert "img" not in page.tags
    assert not page.handlers


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = render_html(report_of(tmp_path, SyntheticRun(steps=5)))
    page = Page()
    page.feed(text)
    assert set(page.addresses) == {"#rollouts"}
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in unescape(text)


def test_a_legend_names_no_line_without_a_value() -> None:
    rows = [build_row(step=step, kl_base=0.1 * step) for step in (1, 2)]
    (chart,) = [each for each in build_charts(rows) if each.title.startswith("KL")]
    assert [line.name for line in chart.legend] == ["of a few samples"]
    assert "KL term" not in chart.svg


def test_every_chart_says_in_words_what_it_shows(tmp_path: Path) -> None:
    text = render_html(report_of(tmp_path, SyntheticRun()))
    labels = re.findall(r'<svg[^>]*aria-label="([^"]*)"', text)
    assert len(labels) == 11
    assert all("Steps 1 to 60" in label for label in labels)


def test_before_and_after_are_the_same_prompts_and_say_how_all_of_them_did(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun())
    both = report.sampled and report.sampled.before_after
    assert both is not None
    # The first step has prompts 0 to 7, the last one 3 to 10.
    assert (both.compared, both.better, both.worse, both.equal) == (5, 5, 0, 0)
    assert [pair.before.shown.prompt_id for pair in both.pairs] == [f"addition/{prompt}" for prompt in range(3, 8)]
    assert all(pair.before.shown.prompt_id == pair.after.shown.prompt_id for pair in both.pairs)
    assert all((pair.before.mean, pair.after.mean) == (0.0, 1.0) for pair in both.pairs)
    page = render_html(report) + render_html(report_of(tmp_path / "groups", SyntheticRun(group_size=4)))
    said = ("of 5, <b>5</b> got better", "mean reward of 4 answers: 0<", "no answer in it (scored 0)")
    assert [words for words in said if words not in page] == []


def test_the_gain_is_between_windows_of_steps_with_its_margin(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun())
    gain = report.to_json()["gain"]
    means = [row.number("reward_mean") or 0.0 for row in report.rows]
    assert gain["steps"] == 12
    assert gain["difference"] == pytest.approx(sum(means[-12:]) / 12 - sum(means[:12]) / 12)
    assert 0 < gain["margin"] < gain["difference"]
    assert gain["verdict"] == "better"
    page = render_html(report)
    assert "reward, last 12 steps" in page
    assert f"{gain['difference']:+.4f}" in page
    assert f"{gain['difference']:+.4f}" in format_report(report)


def test_a_proof_is_a_table_and_no_dump(tmp_path: Path) -> None:
    text = render_html(report_of(tmp_path, SyntheticRun()))
    rows = re.findall(r"<tr><td>version (\d+)</td>(.*?)</tr>", text, re.DOTALL)
    assert [version for version, _ in rows] == ["60", "59", "58"]
    assert [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>.*?</td>", rows[0][1])][:6] == [
        "proven", "equal", "equal", "1.0e-05", "1.0e-03", "3.9",
    ]  # fmt: skip
    assert "expected_applied_digest" not in text


def test_a_long_run_keeps_its_page_small(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=1500, compacted=True))
    text = render_html(report)
    assert len(text) < 900_000
    assert "The first 1000 steps are in metrics.jsonl" in text


def test_a_page_of_long_answers_stays_below_its_bound_and_says_what_is_left_out(tmp_path: Path) -> None:
    """3,200 answers of 20,000 characters: 64 MB of text."""
    pretend = SyntheticRun(prompts=100, group_size=16, completion="word " * 4000, parts={"a": 1.0, "b": 0.0})
    text = render_html(report_of(tmp_path, pretend))
    assert len(text.encode()) < 3_000_000
    content = json.loads(text.split('id="rollout-data">')[1].split("</script>")[0])
    assert content["steps"] == [1, 60]
    assert 0 < len(content["pages"]["60"]) < 100
    assert all(len(group["rows"]) == 16 for group in content["pages"]["60"]), "whole groups"
    assert content["next"]["60"] == len(content["pages"]["60"])
    assert "(18800 more characters)" in content["pages"]["60"][0]["rows"][0][1]


def test_the_guides_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs/guides/report.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "a", "b"):
        write_run_folder(tmp_path / "runs" / name, SyntheticRun(name=name))
    for line in ["orbit report runs/quickstart", *block.splitlines()]:
        assert run_command(shlex.split(line)[1:]) == 0
    assert (tmp_path / "runs/quickstart/report.html").exists()
    assert (tmp_path / "comparison.html").exists()


def test_a_sample_shows_what_its_prompt_expects_shortened(tmp_path: Path) -> None:
    text = render_html(report_of(tmp_path / "a", SyntheticRun()))
    shown = re.findall(r'<code class="expected">([^<]*)</code>', text)
    asked = re.findall(r'<div class="said">(\d+)\+(\d+)=</div>', text)
    assert shown == [str(int(a) + int(b)) for a, b in asked]
    assert len(shown) == 5
    long = render_html(report_of(tmp_path / "b", SyntheticRun(reference="7" * 5000)))
    assert "7" * 701 not in long
    assert "(4400 more characters)" in long


def test_a_folder_without_expected_answers_still_makes_a_page(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun())
    (folder / "rollouts" / "step-000001.references.json").unlink()
    (folder / "rollouts" / "step-000060.references.json").write_text("[1]")
    text = render_html(build_report(open_store(str(folder), writable=False), now=5000.0))
    assert 'class="said"' in text
    assert 'class="expected"' not in text


def test_several_rewards_have_a_chart_a_column_and_a_first_and_last_value_each(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun(parts={"correct": 0.8, "brevity": 0.2}))
    facts = report.to_json()
    assert list(facts["reward_parts"]) == ["correct", "brevity"]
    assert facts["reward_parts"]["correct"]["last"] == pytest.approx(0.8 * facts["reward_last"])
    page = render_html(report)
    for name in ("correct", "brevity"):
        assert f"Reward {name}, before its weight" in page
        assert f"reward_part_{name}_mean" in page
    assert "reward brevity" in format_report(report)


def test_answers_of_demonstrations_are_on_the_page_and_a_broken_one_is_absent(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3, compacted=False, spec={"algorithm": {"type": "SFT"}}))
    for file in (folder / "metrics").iterdir():
        row = json.loads(file.read_text())
        file.write_text(json.dumps({name: None if name.startswith(("reward", "group")) else row[name] for name in row}))
    answer = {"prompt": "12+34=", "expected": "46", "base": "<b>43", "after": "46"}
    for content, count in (([answer, {"prompt": "x"}, {**answer, "after": 7}, None], 1), (None, 0), ("no list", 0)):
        (folder / "answers.json").write_text(json.dumps({"answers": content}))
        page = render_html(build_report(open_store(str(folder))))
        assert page.count("<b>after training</b>") == page.count('<div class="said">&lt;b&gt;43</div>') == count


def test_one_reward_has_no_parts(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun())
    assert report.to_json()["reward_parts"] == {}
    assert "before its weight" not in render_html(report)


def test_a_run_with_more_steps_than_its_manifest_asks_for_is_not_63_of_60(tmp_path: Path) -> None:
    report = report_of(tmp_path, SyntheticRun(steps=63))
    assert "63 (the manifest asks for 60 now)" in format_report(report)
    assert "63 / 60" not in render_html(report)
