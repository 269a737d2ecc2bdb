"""`orbit eval` against an API, and every way that one fails."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes.chat_api import CUT, ChatApi
from yarl import URL

from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import UsageError
from orbit_runtime.evaluation import api_model
from orbit_runtime.evaluation.api_model import ApiConnection, ApiEpisode, ApiModel, Conversations, _proxy_of
from orbit_runtime.evaluation.evaluate import ApiSubject, ask_all
from orbit_runtime.evaluation.journal import Journal, read_samples
from orbit_runtime.evaluation.player import RequestLimiter, UnansweredSample
from orbit_runtime.evaluation.records import EvalSample, Failure
from orbit_runtime.evaluation.tasks import EvaluationSettings, open_task
from orbit_runtime.seeds import stream_key
from orbit_runtime.spec import MachineFacts, load_manifest, resolve
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.types import Sampling

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, PROMPTS = 2, 6
SIZE = ["--set", f"spec.evaluation.samples={SAMPLES}", "--set", f"spec.evaluation.limit={PROMPTS}"]


def adds(body: Mapping[str, Any]) -> str:
    """The right answer, to even sums alone."""
    first, second = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
    total = first + second
    return str(total if total % 2 == 0 else total + 1)


def evaluate(api: ChatApi | str, out: Path, *more: str, file: str = "quickstart.yaml") -> int:
    """Args: api: or its address."""
    url = api if isinstance(api, str) else api.url
    asked = ["--base-url", url, "--model", "tiny", "--out", str(out), "--json", *SIZE, *more]
    return run_command(["eval", str(ROOT / "examples" / file), *asked])


def scores(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_every_sample_is_asked_once_scored_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChatApi(adds) as api:
        assert evaluate(api, tmp_path, "--set", "spec.evaluation.promptPrice=1000000") == 0
        (score,) = scores(capsys)["scores"]
        right = [int(adds(body)) == sum(map(int, re.findall(r"\d+", body["messages"][-1]["content"])))
                 for body in api.asked]  # fmt: skip
        assert score["average"]["mean"] == pytest.approx(sum(right) / len(right))
        assert score["pass_at"]["2"]["mean"] == score["average"]["mean"]
        assert (score["samples"], score["failed"], score["prompt_tokens"]) == (12, 0, 84)
        assert score["cost"] == 84.0
        # Samples of a prompt draw by seeds of their own.
        assert len({body["seed"] for body in api.asked}) == SAMPLES * PROMPTS
        kept = read_samples(open_store(str(tmp_path)))
        assert [*Counter(sample.prompt_id for sample in kept).values()] == [SAMPLES] * PROMPTS
        assert {role for role, _ in kept[0].turns} == {"user", "assistant"}
        assert evaluate(api, tmp_path) == 0
        assert len(api.asked) == SAMPLES * PROMPTS, "nothing is asked twice"
        page = (tmp_path / "report.html").read_text()
        assert "pass@2" in page
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_other_settings_in_the_same_folder_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatApi(adds) as api:
        assert evaluate(api, tmp_path) == 0
        capsys.readouterr()
        assert evaluate(api, tmp_path, "--set", "spec.evaluation.temperature=0") == 73
        assert "held-out.sampling.temperature: 1.0 then, 0.0 now" in capsys.readouterr().out


def test_any_model_may_be_the_one_that_others_are_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatApi(adds) as api:
        for name in ("first", "second", "third"):
            assert evaluate(api, tmp_path, "--model", name) == 0
        capsys.readouterr()
        before = len(api.asked)
        assert evaluate(api, tmp_path, "--model", "third", "--against", "second") == 0
        told = scores(capsys)
        assert [(each["first"], each["second"]) for each in told["comparisons"]] == [
            ("second", "first"), ("second", "third")
        ]  # fmt: skip
        assert [(each["first"], each["second"]) for each in told["pairs"]] == [("first", "third")]
        assert evaluate(api, tmp_path, "--model", "third", "--against", "step-9") == 64
        assert "there are: first, second, third" in capsys.readouterr().out
        assert len(api.asked) == before


def test_what_is_asked_is_told_beside_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChatApi(adds) as api:
        for told in (["m: asking for 12 samples", "m: 12 of 12 samples"], ["m: all 12 samples were there"]):
            assert evaluate(api, tmp_path, "--model", "m") == 0
            output = capsys.readouterr()
            first, *later = [line.partition(" ")[2] for line in output.err.splitlines()]
            assert first == "start: reading prompts, starting rewards"
            assert later == told
            assert json.loads(output.out)["scores"], "standard output holds the result alone"


def test_no_setting_is_left_to_the_server_unless_it_refuses_its_own_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatApi(adds) as api:
        assert evaluate(api, tmp_path / "all") == 0
    assert {(body["temperature"], body["top_p"]) for body in api.asked} == {(1.0, 1.0)}
    with ChatApi(adds, refuses=("temperature", "top_p")) as api:
        assert evaluate(api, tmp_path / "none") == 0
        answered = sum("temperature" not in body and "top_p" not in body for body in api.asked)
        assert answered == SAMPLES * PROMPTS < len(api.asked), "each is refused once, at the beginning"
        assert evaluate(api, tmp_path / "greedy", "--set", "spec.evaluation.temperature=0") == 86
    output = capsys.readouterr()
    assert "400: " in output.out + output.err, "greedy decoding is not given up in silence"


def test_another_version_of_the_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = (ROOT / "examples/quickstart.yaml").read_text()
    (tmp_path / "run.yaml").write_text(manifest.replace("type: ExactMatch", "entrypoint: my_score:score"))
    code = "def score(completion, prompt, fields, field):\n    return float(completion == fields[field])\n"
    (tmp_path / "my_score.py").write_text(code)
    with ChatApi(adds) as api:
        again = ["eval", str(tmp_path / "run.yaml"), "--base-url", api.url, "--model", "m", "--out",
                 str(tmp_path / "out"), "--json", *SIZE]  # fmt: skip
        assert run_command(again) == 0
        (tmp_path / "my_score.py").write_text(code + "# another\n")
        capsys.readouterr()
        assert run_command(again) == 73
    assert "held-out.versions.my_score: sha256:" in capsys.readouterr().out


def test_a_busy_server_is_waited_for_as_long_as_it_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = ChatApi(adds, statuses=lambda number: 429 if number % 2 == 0 else 200, headers="Retry-After: 0\r\n")
    with busy as api:
        assert evaluate(api, tmp_path, "--set", "spec.evaluation.concurrency=1") == 0
    (score,) = scores(capsys)["scores"]
    assert (score["failed"], score["retries"]) == (0, SAMPLES * PROMPTS)


def test_a_server_that_stays_busy_leaves_samples_without_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Six tries each: the first three samples get none.
    late = ChatApi(adds, statuses=lambda number: 429 if number < 18 else 200, headers="Retry-After: 0\r\n")
    with late as api:
        assert evaluate(api, tmp_path, "--set", "spec.evaluation.concurrency=1") == 86
        said = capsys.readouterr().out
        summary = json.loads((tmp_path / "summary.json").read_text())
        (score,) = summary["scores"]
        assert (score["failed"], score["failures"]) == (3, {"RateLimited": 3})
        assert score["average"]["prompts"] == 5, "a prompt without any score counts in no mean"
        assert "25% of the samples have no score, the limit is 10%" in said
        before = len(api.asked)
        assert evaluate(api, tmp_path) == 0, "what was not answered is asked again"
        assert len(api.asked) == before + 3


def test_an_answer_that_is_cut_off_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChatApi(adds, statuses=lambda number: CUT if number == 3 else 200) as api:
        assert evaluate(api, tmp_path, "--set", "spec.evaluation.concurrency=1") == 0
    (score,) = scores(capsys)["scores"]
    assert (score["failed"], score["retries"]) == (0, 1)


def test_a_wrong_key_and_an_unknown_model_end_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "wrong")
    with ChatApi(adds, key="right") as api:
        assert evaluate(api, tmp_path / "a", "--api-key-env", "API_KEY", "--set", "spec.evaluation.concurrency=1") == 77
        assert len(api.asked) == 1
        assert "refuses the key (401)" in capsys.readouterr().out
        monkeypatch.setenv("API_KEY", "right")
        assert evaluate(api, tmp_path / "b", "--api-key-env", "API_KEY") == 0
    assert "right" not in "".join(path.read_text(errors="ignore") for path in (tmp_path / "b").rglob("*.json"))
    with ChatApi(adds, statuses=lambda _: 404) as api:
        assert evaluate(api, tmp_path / "c") == 64


@pytest.mark.parametrize("address", ["api.example/v1", "http://", "http://:80/v1", "http://host:99999/v1", "http://["])
def test_what_is_no_address_is_refused(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(address, tmp_path) == 64
    assert "is not an address" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [20, 1])
def test_a_model_that_is_down_ends_it_after_every_try(
    limit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_model, "FIRST_WAIT", 0.0)
    with ChatApi(adds) as api:
        gone = ChatApi(adds, port=api.port)
    assert evaluate(gone, tmp_path, "--set", f"spec.evaluation.limit={limit}") == 82
    assert "Unreachable" in capsys.readouterr().out


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
PAGE = b"<html>login</html>"


async def ask_with(
    model: ApiModel, keys: Sequence[int], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """A sample for each key, one after the other."""
    connection, conversations = ApiConnection(model), Conversations()
    ((prompt_ids,),) = [conversations.encode_many([[{"role": "user", "content": "1+1="}]])]
    try:
        for key in keys:
            await ApiEpisode(connection, model, conversations, sleep).sample(prompt_ids, Sampling(), key=key)
    finally:
        await connection.close()


def ask_once(api: ChatApi, **settings: Any) -> Failure:
    """Why a single sample got no answer, with one try."""
    with pytest.raises(UnansweredSample) as caught:
        asyncio.run(ask_with(ApiModel(api.url, "tiny", **{"retries": 0, **settings}), [1]))
    return caught.value.failure


@pytest.mark.parametrize(
    ("raw", "kind", "said"),
    [
        (HEAD % len(PAGE) + PAGE, "BadAnswer", "no chat completion: '<html>login</html>'"),
        (HEAD % 2 + b"{}", "BadAnswer", "no chat completion"),
        (HEAD % 2 + b"\xff\xfe", "BadAnswer", "no chat completion"),
        (HEAD % 100 + b'{"choices"', "CutStream", "cut off"),
        (HEAD[:30], "CutStream", "cut off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "CutStream", "cut off"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "Refused", "302"),
    ],
)
def test_an_answer_that_is_none_says_what_it_was(raw: bytes, kind: str, said: str) -> None:
    with ChatApi(adds, raw=raw) as api:
        failure = ask_once(api)
    assert failure.kind == kind
    assert said in failure.reason


def test_an_answer_without_an_end_is_not_read_to_its_end() -> None:
    size = api_model.MAX_ANSWER + 1
    with ChatApi(adds, raw=HEAD % size + bytes(size)) as api:
        failure = ask_once(api)
    assert (failure.kind, failure.reason) == ("BadAnswer", f"an answer of more than {api_model.MAX_ANSWER} bytes")


def test_no_message_repeats_the_key_or_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = b'{"error": "Bearer sk-secret has no money"}'
    with ChatApi(adds, raw=b"HTTP/1.1 402 .\r\nContent-Length: %d\r\n\r\n" % len(said) + said) as api:
        assert ask_once(api, key="sk-secret").reason == '402: {"error": "Bearer *** has no money"}'
    with ChatApi(adds) as api:
        assert evaluate(api.url.replace("//", "//me:sk-secret@"), tmp_path) == 0
        written = "".join(path.read_text(errors="ignore") for path in tmp_path.glob("*.*"))
        assert "sk-secret" not in written + capsys.readouterr().out
        assert api.url in written
    with ChatApi(adds, statuses=lambda _: 404) as api:
        assert evaluate(api.url.replace("//", "//me:sk-secret@"), tmp_path / "b") == 64
        assert "sk-secret" not in capsys.readouterr().out


def test_what_was_refused_together_does_not_come_back_together() -> None:
    """Twice as long each time, or as long as the server says, and up to half as much longer by request."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    keys = [stream_key(0, "sample", number) for number in range(8)]
    with ChatApi(adds, statuses=lambda number: 200 if number % 3 == 2 else 503) as api:
        asyncio.run(ask_with(ApiModel(api.url, "tiny"), keys, sleep))
    assert len(set(waits)) == len(waits) == 16
    assert all(0.5 <= wait < 0.75 for wait in waits[::2])
    assert all(1.0 <= wait < 1.5 for wait in waits[1::2])
    waits.clear()
    asked = ChatApi(adds, statuses=lambda number: 200 if number % 2 else 429, headers="Retry-After: 4\r\n")
    with asked as api:
        asyncio.run(ask_with(ApiModel(api.url, "tiny"), keys, sleep))
    assert len(set(waits)) == 8
    assert all(4 <= wait < 6 for wait in waits)


def test_an_episode_under_way_comes_before_one_that_begins() -> None:
    order: list[str] = []

    async def wait(places: RequestLimiter, name: str, *, begins: bool) -> None:
        await places.take(begins=begins)
        order.append(name)
        places.give_back()

    async def all_wait() -> None:
        places = RequestLimiter(1)
        await places.take(begins=True)
        tasks = []
        for name in ("begins", "stopped", "under way"):
            tasks.append(asyncio.create_task(wait(places, name, begins=name == "begins")))
            await asyncio.sleep(0)
        tasks[1].cancel()
        places.give_back()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Nobody waits, and the place is free again: who is cancelled with a turn passes it on.
        await places.take()
        late = asyncio.create_task(wait(places, "late", begins=False))
        await asyncio.sleep(0)
        places.give_back()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await asyncio.wait_for(places.take(), 1)

    asyncio.run(all_wait())
    assert order == ["under way", "begins"]


def test_an_answer_that_does_not_come_in_time_is_given_up() -> None:
    with ChatApi(adds, delay_seconds=5) as api:
        assert ask_once(api, timeout_seconds=0.1).kind == "Timeout"


def test_a_proxy_is_asked_where_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatApi(adds, raw=HEAD % 2 + b"{}") as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        elsewhere = ChatApi(adds, port=1)
        assert ask_once(elsewhere).kind == "BadAnswer"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert ask_once(elsewhere).kind == "Unreachable"
        assert len(proxy.asked) == 1
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(UsageError, match="'socks5' is not supported"):
        _proxy_of(URL(elsewhere.url))


def test_an_episode_that_is_scored_keeps_no_place_from_the_model(tmp_path: Path) -> None:
    """Two places: while the rewards of two episodes wait, the next two are asked."""
    asked_meanwhile = threading.Event()

    def slow(completion: str, prompt: Any, fields: Mapping[str, Any], field: str) -> float:
        return float(asked_meanwhile.wait(8))

    def say(body: Mapping[str, Any]) -> str:
        if len(api.asked) == 4:
            asked_meanwhile.set()
        return adds(body)

    run = resolve(load_manifest(ROOT / "examples/quickstart.yaml"), MachineFacts(has_cuda=False, num_gpus=0)).run
    with ExitStack() as closing, ChatApi(say, delay_seconds=0.05) as api:
        rewards = {each.name: slow for each in run.spec.environment.rewards}
        task = open_task("sums", run.spec, EvaluationSettings(samples=1, limit=8), [], closing, rewards=rewards)
        store = open_store(str(tmp_path))
        execution = claim_execution(store, run_name="test")
        closing.callback(lambda: execution.release("done"))
        with Journal(store, execution) as journal:
            subject = ApiSubject(ApiModel(api.url, "tiny"), Conversations())
            ask_all([subject], [task], journal, concurrency=2, show=lambda *_: None)
            assert [sample.reward for sample in journal.samples] == [1.0] * 8
        assert api.most_at_once == 2


def test_a_sample_that_cannot_be_written_is_told_with_the_next_one(tmp_path: Path) -> None:
    """The writer is a thread: were it gone unseen, every later sample would be lost."""
    store = open_store(str(tmp_path))
    execution = claim_execution(store, run_name="test")
    sample = EvalSample("m", "e", "p/0", 0, (("user", "\ud800"),), 1.0, "value")
    with Journal(store, execution) as journal:
        journal.add(sample)
        journal.close()
        with pytest.raises(TypeError, match="surrogates"):
            journal.add(sample)
        with pytest.raises(TypeError, match="surrogates"):
            journal.gather()
    execution.release("failed")


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 75), (signal.SIGTERM, 75)]
)
def test_an_evaluation_that_is_ended_goes_on_and_asks_nothing_twice(
    tmp_path: Path, how: signal.Signals, code: int
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def say(body: Mapping[str, Any]) -> str:
        if len(api.asked) == 8:
            reached.set()
            killed.wait(30)
        return adds(body)

    with ChatApi(say) as api:
        command = [sys.executable, "-m", "orbit_runtime.cli.main", "eval", str(ROOT / "examples/quickstart.yaml"),
                   "--base-url", api.url, "--model", "tiny", "--out", str(tmp_path), *SIZE,
                   "--set", "spec.evaluation.concurrency=1"]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT)
        assert reached.wait(60)
        store = open_store(str(tmp_path))
        for _ in range(200):
            if len(read_samples(store)) == 7:
                break
            threading.Event().wait(0.05)
        process.send_signal(how)
        assert process.wait(60) == code
        killed.set()
        if how != signal.SIGKILL:
            assert json.loads(store.get("executions/000001.heartbeat.json"))["reason"] == "stopped"
        assert evaluate(api, tmp_path) == 0
    asked = Counter((body["messages"][-1]["content"], body["seed"]) for body in api.asked)
    assert len(asked) == SAMPLES * PROMPTS
    assert sum(asked.values()) == SAMPLES * PROMPTS + 1, "the one under way, and no other"


def test_calls_of_tools_go_to_the_api_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def multiplies(body: Mapping[str, Any]) -> str | Mapping[str, Any]:
        last = body["messages"][-1]
        if last["role"] == "tool":
            assert last["tool_call_id"] == body["messages"][-2]["tool_calls"][0]["id"]
            return str(last["content"])
        (schema,) = body["tools"]
        name = schema["function"]["name"]
        (argument,) = schema["function"]["parameters"]["properties"]
        arguments = json.dumps({argument: last["content"].rstrip("=")})
        call = {"id": f"c{len(api.asked)}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    with ChatApi(multiplies) as api:
        assert evaluate(api, tmp_path, file="calculator.yaml") == 0
    (score,) = scores(capsys)["scores"]
    assert (score["average"]["mean"], score["failed"]) == (1.0, 0)
    assert len(api.asked) == 2 * SAMPLES * PROMPTS


def test_a_date_and_a_number_say_how_long_to_wait() -> None:
    wait = api_model.retry_after
    assert wait("3") == 3.0
    assert wait("Wed, 21 Oct 2026 07:28:10 GMT", now=lambda: 1792567680.0) == pytest.approx(10.0)
    assert wait("soon") is None
    assert wait(None) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-url", "http://a/v1"], ["--model", "m"], ["--api-key-env", "K"], ["--steps", "1,x"],
        ["--base-url", "a", "--model", "m"], ["--base-url", "http://a", "--model", "m", "--steps", "1"],
        ["--steps", "1"], ["--no-eval-base"], ["--adapter", "a", "--weights-dir", "r"],
    ],
)  # fmt: skip
def test_what_the_command_line_cannot_mean_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    file = str(ROOT / "examples/quickstart.yaml")
    assert run_command(["eval", file, "--out", str(tmp_path / "out"), *arguments]) == 64
    assert not (tmp_path / "out").exists()
