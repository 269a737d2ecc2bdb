"""Pages in a real browser, at a desktop's width and a phone's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.browser import DESKTOP, PHONE, Browser, needs_browser
from fakes.run_folder import SyntheticRun, write_run_folder

from orbit_runtime.evaluation.page import render_evaluation
from orbit_runtime.evaluation.records import EvalSample, Failure
from orbit_runtime.evaluation.summary import build_summary
from orbit_runtime.observability.compare import compare
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_comparison, render_html
from orbit_runtime.storage import open_store

pytestmark = [needs_browser]
EVIL = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>'\"&lt;\u2028"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the report of a run with two rewards and groups of four."""
    folder = tmp_path_factory.mktemp("run")
    pretend = SyntheticRun(parts={"correct": 0.8, "brevity": 0.2}, prompts=10, group_size=4)
    report = build_report(open_store(str(write_run_folder(folder, pretend)), writable=False), now=5000.0)
    (folder / "page.html").write_text(render_html(report))
    return f"file://{folder}/page.html"


def test_every_value_of_a_step_is_told_under_the_pointer(browser: Browser, page: str) -> None:
    browser.open(page)
    assert browser.run("document.querySelector('.tip').hidden")
    browser.hover("svg[data-points]", 0.999)
    told = browser.wait("document.querySelector('.tip:not([hidden])')?.innerText")
    assert told.startswith("step 60\nmean ± standard deviation 0.7")
    assert " to " in told, "the deviation's two ends"
    browser.run("document.querySelector('svg[data-points]').focus()")
    browser.run(
        "document.querySelector('svg[data-points]').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    )
    assert browser.text(".tip:not([hidden])").startswith("step 59"), "the arrow keys go from step to step"


def test_a_click_on_a_step_opens_its_rollouts(browser: Browser, page: str) -> None:
    browser.open(page)
    assert browser.run("document.querySelector('#rollouts select').value") == "60"
    browser.click("svg[data-points]", 0.14)
    browser.wait("document.querySelector('#rollouts select').value === '1'")


def test_one_answer_is_shown_token_by_token(browser: Browser, page: str) -> None:
    browser.open(page, PHONE)
    browser.run("document.querySelectorAll('#rollouts summary')[0].click()")
    browser.wait("document.querySelectorAll('#rollouts .heat').length === 1")
    browser.run("document.querySelector('.heat summary').click()")
    cells = "[...document.querySelectorAll('.heat .said span')]"
    shares = f"{cells}.map(e => +(+e.style.getPropertyValue('--share')).toFixed(2))"
    assert browser.run(f"{cells}.map(e => e.textContent)") == ["2", "1"]
    assert browser.run(shares) == [0.01, 0.9], "1 - p"
    assert browser.run(f"{cells}.map(e => e.className)") == ["", "newer"]
    browser.run(f"{cells}[1].click()")
    assert browser.text(".heat > p") == '"1" · log-prob -2.3 (10.03 %) · advantage 0.5 · version 60 · entropy 0.6'
    choose = (
        "(() => {{ const s = document.querySelector('.heat select'); s.value = '{}'; "
        "s.dispatchEvent(new Event('change')); }})()"
    )
    browser.run(choose.format("entropy"))
    assert browser.run(shares) == [0.2, 1]
    browser.run(choose.format("advantage"))
    assert browser.run(shares) == [1, 1]
    assert browser.run(f"{cells}.map(e => e.className)") == ["up", "up newer"]
    assert browser.size()[0] == PHONE[0]


def test_the_table_of_rollouts_pages_searches_and_shows_whole_groups(browser: Browser, page: str) -> None:
    browser.open(page)
    assert "groups 1 to 8 of 10" in browser.text("#rollouts")
    browser.click("#rollouts button[aria-label='page after']")
    browser.wait("document.querySelector('#rollouts').innerText.includes('groups 9 to 10 of 10')")
    browser.run(
        "(() => { const s = document.querySelector('#rollouts input'); s.value = '15+11'; "
        "s.dispatchEvent(new Event('input')); })()"
    )
    said = browser.text("#rollouts")
    assert "groups 1 to 2 of 2 (20 in all)" in said, (
        "both steps of the page are searched, not only the one that is shown"
    )
    assert "Searched: 2 of 2 steps, but not the middle of long texts." in said
    assert browser.run("[...document.querySelectorAll('#rollouts summary .label')].map(e => e.textContent)") == [
        "step 60 ", "step 1 ",
    ]  # fmt: skip
    browser.wait("document.querySelector('#rollouts details[open] tr') !== null")
    rows = browser.run(
        "[...document.querySelectorAll('#rollouts details[open] tr')]"
        ".map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    assert rows[0] == ["answer", "reward", "correct", "brevity", "advantage", "tokens"]
    assert len(rows) == 5
    assert rows[1][1:] == ["1", "1", "0.5", "+0.5", "3"]
    assert browser.count("#rollouts mark") >= 1
    browser.run(
        "(() => { const s = document.querySelectorAll('#rollouts select')[1]; s.value = 'equal'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "groups 1 to 1 of 1 (20 in all)" in browser.text("#rollouts")
    browser.run(
        "(() => { const s = document.querySelectorAll('#rollouts select')[1]; s.value = 'failed'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "no group is like that" in browser.text("#rollouts")
    browser.click("#rollouts button[aria-label='step before']")
    assert browser.run("document.querySelector('#rollouts input[type=search]').value") == "", "a step is shown whole"


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_search_says_which_steps_are_not_on_the_page(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    folder = write_run_folder(tmp_path / "run", SyntheticRun(prompts=3))
    for step in range(2, 31):
        (folder / f"rollouts/step-{step:06d}.jsonl.zst").write_bytes(
            (folder / "rollouts/step-000001.jsonl.zst").read_bytes()
        )
    report = build_report(open_store(str(folder), writable=False), now=5000.0)
    (tmp_path / "page.html").write_text(render_html(report))
    browser.open(f"file://{tmp_path}/page.html", size)
    browser.run(
        "(() => { const s = document.querySelector('#rollouts input'); s.value = '11'; "
        "s.dispatchEvent(new Event('input')); })()"
    )
    said = browser.text("#rollouts")
    assert "Searched: 12 of 31 steps. Not searched: what this page does not hold" in said
    assert "groups 1 to 8 of 36" in said
    assert browser.size()[0] <= size[0]


def test_smoothing_draws_the_average_over_the_values_that_stay_visible(browser: Browser, page: str) -> None:
    browser.open(page)
    line = "document.querySelector('path[data-line]').getAttribute('d')"
    smoothed = browser.run(line)
    assert browser.count("svg[data-points] .ghost") > 0
    browser.run(
        "(() => { const s = document.querySelector('.smoothing input'); s.value = 0; "
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(line) != smoothed
    assert browser.count(".ghost") == 0
    assert browser.text(".smoothing output") == "off"


def test_smoothing_is_the_average_that_trackers_draw(browser: Browser, page: str) -> None:
    """The formula of TensorBoard: an exponential moving average, divided by what it lacks at its beginning."""
    browser.open(page)
    data = json.loads(browser.run("document.querySelector('svg[data-points]').dataset.points"))
    low, high = (float(browser.run(f"document.querySelector('svg').dataset.{end}")) for end in ("low", "high"))
    weight, mean, expected = 0.6, 0.0, []
    for count, value in enumerate(data["s"][0][1], 1):
        mean = weight * mean + (1 - weight) * value
        share = (mean / (1 - weight**count) - low) / (high - low)
        expected.append(10 + (200 - 10 - 24) * (1 - share))
    path = browser.run("document.querySelector('path[data-line]').getAttribute('d')")
    drawn = [float(point.split()[1]) for point in path.replace("M", "L").split("L")[1:]]
    assert drawn == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_page_is_as_wide_as_its_screen_and_no_endless_scroll(
    browser: Browser, page: str, size: tuple[int, int]
) -> None:
    browser.open(page, size)
    width, height = browser.size()
    assert width == size[0]
    assert height < 9 * size[1]
    assert not browser.complaints


def test_a_comparison_says_its_verdict_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    reports = []
    for name, gain in (("slow", 0.3), ("fast", 0.6)):
        for seed in (1, 2, 3):
            spec = {"data": {"seed": seed}, "training": {"steps": 60, "learningRate": gain}}
            made = SyntheticRun(name=f"{name}-s{seed}", seed=seed, gain=gain, spec=spec)
            folder = write_run_folder(tmp_path / made.name, made)
            reports.append(build_report(open_store(str(folder), writable=False), now=5000.0))
    (tmp_path / "page.html").write_text(render_comparison(compare(reports)))
    browser.open(f"file://{tmp_path}/page.html", PHONE)
    place = browser.run("document.querySelector('.better').getBoundingClientRect().toJSON()")
    assert place["right"] <= PHONE[0]
    assert place["bottom"] <= PHONE[1], "without scrolling"
    width, height = browser.size()
    assert width == PHONE[0]
    assert height < 9 * PHONE[1]
    browser.hover("svg[data-points]", 0.999)
    told = browser.wait("document.querySelector('.tip:not([hidden])')?.innerText")
    assert "slow 0." in told
    assert "fast 0." in told
    assert not browser.complaints


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_a_comparison_is_no_wider_than_a_phone_whatever_the_names(
    browser: Browser, tmp_path: Path, seeds: tuple[int, ...]
) -> None:
    """One word of a name cannot be broken, another task is told, and a run is longer than the other."""
    reports = []
    for name, steps, rank in (("a_name_without_any_place_to_break_it_" * 2, 20, 8), ("b" * 63, 60, 16)):
        for seed in seeds:
            spec = {"data": {"seed": seed, "prompts": [{"uri": f"s3://{name}/" + "p" * 80}]}, "adapter": {"rank": rank}}
            spec["environment"] = {"rewards": [{"name": name}]}
            made = SyntheticRun(name=f"{name}-s{seed}", seed=seed, steps=steps, spec=spec)
            reports.append(build_report(open_store(str(write_run_folder(tmp_path / made.name, made)), writable=False)))
    (tmp_path / "page.html").write_text(render_comparison(compare(reports)))
    for width in (PHONE[0], 320):
        browser.open(f"file://{tmp_path}/page.html", (width, 844))
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        wide = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg') && "
        wide += "e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 80))"
        assert browser.run(wide) == []
        assert browser.size()[0] == width


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_an_evaluation_says_its_scores_and_verdicts_on_any_screen(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    """Two environments, three models, answers that are long or no text of a page, and one that never came."""
    turns = (("user", EVIL), ("assistant", EVIL + "long answer " * 400))
    samples = [
        EvalSample(subject, environment, f"p{prompt}", 0, turns, float(prompt % 4 < better), "value", expected=EVIL)
        for environment in ("sums", "two-digit-multiplication-held-out")
        for better, subject in enumerate(("base", "step-10", "step-20"), 1)
        for prompt in range(60)
    ]
    lost = Failure("RateLimited", EVIL)
    samples.append(EvalSample("step-20", "sums", "p60", 0, turns[:1], None, "unanswered", failure=lost))
    (tmp_path / "page.html").write_text(render_evaluation(EVIL, build_summary(samples), samples))
    browser.open(f"file://{tmp_path}/page.html", size)
    width, height = browser.size()
    assert width == size[0]
    assert height < 9 * size[1]
    said = browser.text("body")
    assert "0.750" in said
    assert "step-20 on sums: 1 of 61 samples have no score" in said
    verdicts = "[...document.querySelectorAll('.better')].filter(e => e.checkVisibility())"
    assert browser.run(f"{verdicts}.length") == 4, "the pairs that nobody asked for are folded"
    assert browser.run(f"Math.max(...{verdicts}.map(e => e.getBoundingClientRect().right))") <= size[0]
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.size()[0] == size[0], "with everything open"
    assert browser.run("document.querySelector('details .said').textContent") == EVIL
    assert browser.run("window.harmed") is None
    assert browser.count("img") == 0
    assert not browser.complaints


def test_without_javascript_the_numbers_and_answers_stand_there(browser: Browser, page: str) -> None:
    browser.open(page, script=False)
    said = browser.text("body")
    assert "reward, last 12 steps" in said
    assert "10+11=" not in said.split("Before and after")[1].split("Rollouts")[0], "its last step has no such prompt"
    assert "This table needs JavaScript" in said
    assert browser.count("svg") >= 3


def test_what_the_model_wrote_is_text_wherever_it_stands(browser: Browser, tmp_path: Path) -> None:
    pretend = SyntheticRun(name=EVIL, completion=EVIL, reference=EVIL, warnings=(EVIL,))
    report = build_report(open_store(str(write_run_folder(tmp_path, pretend)), writable=False), now=5000.0)
    (tmp_path / "page.html").write_text(render_html(report))
    browser.open(f"file://{tmp_path}/page.html")
    browser.run("document.querySelectorAll('#rollouts details').forEach(d => { d.open = true; })")
    browser.wait("document.querySelectorAll('#rollouts .answers').length === 8")
    assert browser.run("window.harmed") is None
    assert browser.count("img") == 0
    assert browser.count("script") == 2
    assert browser.run("document.querySelector('#rollouts .answers .said').textContent") == EVIL
    assert not browser.complaints
