"""The rewards that ship with Orbit, on right, wrong and odd completions."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.environments.rewards import REWARDS
from orbit_runtime.environments.rewards.code_tests import code_tests
from orbit_runtime.environments.rewards.judge import SHORTEST_WAIT, judge
from orbit_runtime.environments.rewards.text import length, multiple_choice, pattern
from orbit_runtime.environments.targets import READS, keyword_arguments
from orbit_runtime.workers.user_code.entrypoints import load_object
from orbit_runtime.workers.user_code.reward_pool import RewardPool, RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget, WrongAnswer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_takes_what_its_source_says(name: str) -> None:
    taken = inspect.signature(load_object(REWARDS[name])).parameters.values()
    assert keyword_arguments(REWARDS[name]) == {
        each.name: each.default is each.empty for each in taken if each.kind is each.KEYWORD_ONLY
    }


def test_only_a_worker_imports_the_library_of_mathematics() -> None:
    asked = "environment.rewards=[{name: a, type: Math, arguments: {field: answer}}]"
    code = (
        "import sys; from orbit_runtime.environments.targets import check_arguments; "
        "from orbit_runtime.spec import load_manifest; "
        "check_arguments(load_manifest(__import__('pathlib').Path(sys.argv[1]), [sys.argv[2]]).spec, {}); "
        "sys.exit(bool({'sympy', 'math_verify'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(EXAMPLE), asked]).returncode == 0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("The answer is (B).", 1.0),
        ("answer: C, no, Answer: B", 1.0),
        ("\\boxed{B}", 1.0),
        ("\\boxed{\\text{B}}", 1.0),
        ("**Answer:** **B**", 1.0),
        ("A is wrong because of C.\nB", 1.0),
        ("B)", 1.0),
        ("The answer is A", 0.0),
        ("the answer is B, so\nanswer: D", 0.0),
    ],
)
def test_multiple_choice_takes_the_last_letter_that_is_said_to_be_the_answer(completion: str, reward: float) -> None:
    assert multiple_choice(completion, [], {"answer": "B"}) == reward


@pytest.mark.parametrize("completion", ["", "Between A and B I cannot choose", "The Answer is unknown", "Because"])
def test_multiple_choice_tells_no_choice_from_a_wrong_one(completion: str) -> None:
    with pytest.raises(WrongAnswer):
        multiple_choice(completion, [], {"answer": "B"})


def test_multiple_choice_refuses_a_column_without_a_letter() -> None:
    with pytest.raises(ValueError, match="'answer' is no letter"):
        multiple_choice("B", [], {"answer": "Paris"})


def test_a_pattern_is_the_whole_completion_or_stands_somewhere_in_it() -> None:
    form = r"<think>.*</think>\s*<answer>.*</answer>"
    good = "<think>a\nb</think>\n<answer>4</answer>\n"
    assert pattern(good, [], {}, pattern=form) == 1.0
    assert pattern(f"well, {good}", [], {}, pattern=form) == 0.0
    assert pattern(f"well, {good}", [], {}, pattern=form, whole=False) == 1.0
    assert pattern("x x", [], {}, pattern="x", whole=False, most=1) == 0.0
    assert pattern("y", [], {}, pattern="x", whole=False) == 0.0


def test_length_costs_nothing_first_and_then_ever_more() -> None:
    values = [length("a" * size, [], {}, free=100, limit=200) for size in (0, 100, 150, 200, 500)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length("one two three", [], {}, free=1, limit=5, unit="words") == -0.5
    with pytest.raises(ValueError, match="below limit"):
        length("", [], {}, free=5, limit=5)
    with pytest.raises(ValueError, match="'tokens'"):
        length("", [], {}, free=1, limit=5, unit="tokens")


DOUBLE = "Here it is:\n```python\nprint(2 * int(input()))\n```\nDone."
PAIRS = [{"input": "4\n", "output": "8"}, {"input": "0", "output": "0\n"}]


def test_code_is_worth_the_tests_that_it_passes() -> None:
    assert code_tests(DOUBLE, [], {"tests": PAIRS}) == 1.0
    half = [*PAIRS, {"input": "1", "output": "3"}, {"input": "x", "output": "0"}]
    assert code_tests(DOUBLE, [], {"tests": half}) == 0.0
    assert code_tests(DOUBLE, [], {"tests": half}, all_or_nothing=False) == 0.5


def test_code_may_be_tested_by_code_and_cannot_leave_before_its_tests() -> None:
    tests = ["assert double(2) == 4", "assert double(-1) == -2"]
    assert code_tests("def double(x):\n    return 2 * x", [], {"tests": tests}) == 1.0
    assert code_tests("def double(x):\n    return 4", [], {"tests": tests}, all_or_nothing=False) == 0.5
    assert code_tests("import os\nos._exit(0)", [], {"tests": tests}) == 0.0
    assert code_tests("raise SystemExit(0)", [], {"tests": tests}) == 0.0


def test_code_that_is_none_or_tests_that_are_none() -> None:
    with pytest.raises(WrongAnswer):
        code_tests("```python\n\n```", [], {"tests": PAIRS})
    for tests in ([], None, [{"input": "a"}], [3]):
        with pytest.raises(ValueError, match="tests"):
            code_tests(DOUBLE, [], {"tests": tests})


class Judge(BaseHTTPRequestHandler):
    """A chat endpoint of given answers: a text, or a status with a header."""

    answers: list[str | tuple[int, str]]
    otherwise: str | tuple[int, str] = (500, "no answer is left")
    """What is said when `answers` are used up."""
    held: threading.Event
    """Nothing is said before it is set."""
    asked: list[tuple[str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append((self.headers.get("Authorization"), body))
        type(self).held.wait(30)
        answer = type(self).answers.pop(0) if type(self).answers else type(self).otherwise
        text, status = (answer, 200) if isinstance(answer, str) else (answer[1], answer[0])
        data = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        data = text.encode() if text.startswith("<html>") else data
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


@pytest.fixture
def judging(tmp_path: Path) -> Iterator[tuple[type[Judge], dict[str, Any]]]:
    """The server's answers, to be filled in, and the reward's arguments."""

    class Here(Judge): ...

    Here.answers, Here.asked, Here.held = [], [], threading.Event()
    Here.held.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield Here, {"url": url, "model": "m", "rubric": "Is it kind?", "cache": str(tmp_path / "verdicts")}
    Here.held.set()
    server.shutdown()
    thread.join()
    server.server_close()


PROMPT = [{"role": "user", "content": "Say something."}]


def test_a_judge_is_asked_once_with_rubric_prompt_and_reference(
    judging: tuple[type[Judge], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, arguments = judging
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers.append("It is quite kind.\nScore: 7")
    for _ in range(2):
        value = judge("Be well.", PROMPT, {"ideal": "Hello."}, **arguments, field="ideal", api_key_env="JUDGE_KEY")
        assert value == 0.7
    ((key, asked),) = server.asked
    assert key == "Bearer secret"
    assert (asked["model"], asked["temperature"]) == ("m", 0.0)
    for part in ("Is it kind?", "user: Say something.", "Be well.", "Hello."):
        assert part in asked["messages"][0]["content"]


def test_another_question_is_another_verdict(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    server, arguments = judging
    server.answers += ["Score: 1", "Score: 2", "Score: 3"]
    assert judge("a", PROMPT, {}, **arguments) == 0.1
    assert judge("b", PROMPT, {}, **arguments) == 0.2
    assert judge("b", PROMPT, {}, **{**arguments, "rubric": "Is it short?"}) == 0.3


def test_a_busy_judge_is_asked_again(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    server, arguments = judging
    server.answers += [(429, "slow down"), (503, "starting"), "Score: 10"]
    assert judge("a", PROMPT, {}, **arguments) == 1.0
    assert len(server.asked) == 3


def test_a_verdict_without_a_score_is_asked_for_again_and_never_scored(
    judging: tuple[type[Judge], dict[str, Any]],
) -> None:
    server, arguments = judging
    server.answers += ["I like it", "Score: 11", "**Score: 8**"]
    assert judge("a", PROMPT, {}, **arguments) == 0.8
    server.answers += ["Score: eight", "", "Score: -1"]
    with pytest.raises(ValueError, match="no `Score: N` from 0 to 10: 'Score: -1'"):
        judge("b", PROMPT, {}, **arguments)


def test_a_judge_that_refuses_or_is_none_is_not_asked_again(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    server, arguments = judging
    server.answers += [(401, "no key"), "<html>"]
    with pytest.raises(RuntimeError, match="the judge answers 401"):
        judge("a", PROMPT, {}, **arguments)
    with pytest.raises(RuntimeError, match="no chat completion"):
        judge("a", PROMPT, {}, **arguments)
    assert len(server.asked) == 2


def test_a_verdict_file_that_is_broken_is_asked_for_again(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    server, arguments = judging
    server.answers += ["Score: 1", "Score: 4"]
    judge("a", PROMPT, {}, **arguments)
    (kept,) = Path(arguments["cache"]).rglob("*.json")
    kept.write_text('{"sco')
    assert judge("a", PROMPT, {}, **arguments) == 0.4


def test_a_judge_that_never_answers_is_a_timeout_and_no_score(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    _, arguments = judging
    gone = {**arguments, "url": "http://127.0.0.1:9/v1"}
    with RewardPool([RewardTarget("judge", REWARDS["Judge"], gone, timeout_seconds=1.0)], num_workers=1) as pool:
        (result,) = pool.score([RewardCall("judge", "a", PROMPT, {})])
    assert (result.outcome, result.value) == ("timeout", None)


def test_a_judge_that_takes_the_question_and_says_nothing_costs_its_seconds_and_no_more(
    judging: tuple[type[Judge], dict[str, Any]],
) -> None:
    server, arguments = judging
    server.held.clear()
    target = RewardTarget("judge", REWARDS["Judge"], arguments, timeout_seconds=2.0)
    with RewardPool([target], num_workers=1) as pool:
        (result,) = pool.score([RewardCall("judge", "a", PROMPT, {})])
        assert (result.outcome, result.value) == ("timeout", None)
        server.otherwise = "Score: 3"
        server.held.set()
        (result,) = pool.score([RewardCall("judge", "b", PROMPT, {})])
    assert (result.outcome, result.value) == ("value", 0.3), "the worker after it asks again"


def test_a_judge_that_stays_busy_is_a_timeout_and_is_not_asked_without_pause(
    judging: tuple[type[Judge], dict[str, Any]],
) -> None:
    """Also where it says `Retry-After: 0`, as here."""
    server, arguments = judging
    server.otherwise = (429, "too many requests")
    with RewardPool([RewardTarget("judge", REWARDS["Judge"], arguments, timeout_seconds=2.0)], num_workers=1) as pool:
        (result,) = pool.score([RewardCall("judge", "a", PROMPT, {})])
    assert (result.outcome, result.value) == ("timeout", None)
    assert 2 <= len(server.asked) <= 2.0 / SHORTEST_WAIT + 1


def test_a_judge_that_talks_nonsense_is_a_crash_and_no_score(judging: tuple[type[Judge], dict[str, Any]]) -> None:
    server, arguments = judging
    server.otherwise = "As a language model I would rather not."
    with RewardPool([RewardTarget("judge", REWARDS["Judge"], arguments, timeout_seconds=30.0)], num_workers=1) as pool:
        (result,) = pool.score([RewardCall("judge", "a", PROMPT, {})])
    assert (result.outcome, result.value) == ("crash", None)
    assert "rather not" in result.reason
    assert len(server.asked) == 3


def test_code_is_tested_in_a_reward_worker_as_well() -> None:
    with RewardPool([RewardTarget("code", REWARDS["Code"], {}, timeout_seconds=60.0)], num_workers=1) as pool:
        results = pool.score([RewardCall("code", text, PROMPT, {"tests": PAIRS}) for text in (DOUBLE, "print(1)")])
    assert [(result.outcome, result.value) for result in results] == [("value", 1.0), ("value", 0.0)]


def test_a_reward_that_changes_what_it_is_given_changes_it_for_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "def take(completion, prompt, fields):\n"
        "    prompt.clear()\n"
        "    return float(fields.pop('answer') == completion)\n"
    )
    fields, prompt = {"answer": "46"}, copy.deepcopy(PROMPT)
    targets = [RewardTarget(name, "greedy:take") for name in ("one", "two")]
    with RewardPool(targets, num_workers=1, search_path=[str(tmp_path)]) as pool:
        results = pool.score([RewardCall(name, "46", prompt, fields) for name in ("one", "two", "one")])
    assert [result.value for result in results] == [1.0, 1.0, 1.0]
    assert (fields, prompt) == ({"answer": "46"}, PROMPT)


def test_the_same_of_rewards_that_are_given_from_python() -> None:
    def take(completion: str, prompt: list[Any], fields: dict[str, Any]) -> float:
        prompt.clear()
        return float(fields.pop("answer") == completion)

    fields, prompt = {"answer": "46"}, copy.deepcopy(PROMPT)
    with RewardThreads([RewardTarget(name, take) for name in ("one", "two")]) as threads:
        results = threads.score([RewardCall(name, "46", prompt, fields) for name in ("one", "two")])
    assert [result.value for result in results] == [1.0, 1.0]
    assert (fields, prompt) == ({"answer": "46"}, PROMPT)


def test_every_shipped_reward_that_needs_a_column_is_known() -> None:
    assert set(READS) <= set(REWARDS)
