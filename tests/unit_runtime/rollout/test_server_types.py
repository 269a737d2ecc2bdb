"""A served teacher's likeliest tokens: what is asked, what comes back, and every answer that is none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from orbit_runtime.errors import GateError, OrbitError, UnsupportedError
from orbit_runtime.rollout.teacher_servers import ANSWER_BYTES, ENTRY_BYTES, SEQUENCES, ServedTeacher
from orbit_runtime.sides.teacher import ENDPOINTS
from tests.fakes.fake_servers import FakeServer, dies_at, once
from tests.unit_runtime.rollout.test_teacher_servers import TOKENS, servers, teacher

__all__ = ["servers"]

K, VOCABULARY, PLACES = 4, 64, (2, 3, 5)
Pairs = list[tuple[Any, Any]]
Spoil = Callable[[Pairs], Any]


class Spoiled(FakeServer):
    """In the place of token 3 it answers otherwise."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(vocabulary=VOCABULARY, **fields)
        self.spoil: Spoil = lambda pairs: pairs

    def top(self, adapter: str | None, prompt: list[int], place: int, count: int) -> list[tuple[float, int]]:
        found = super().top(adapter, prompt, place, count)
        return self.spoil(found) if place == 3 else found  # type: ignore[no-any-return]


def of_sglang() -> Spoiled:
    return Spoiled()


def of_older_sglang() -> Spoiled:
    return Spoiled(sends_arrays=False)


def of_vllm() -> Spoiled:
    return Spoiled(kind="vLLM", version="0.32.0")


def asking(servers: list[FakeServer], *found: FakeServer, longest: int = 1024) -> ServedTeacher:
    engine = teacher(servers, *found).engine
    return ServedTeacher(engine, ENDPOINTS, top_k=K, vocabulary=VOCABULARY, longest=longest)


def asked(made: ServedTeacher, tokens: tuple[int, ...] = TOKENS) -> tuple[list[int], list[float]]:
    ids, logprobs = asyncio.run(made.top_tokens(tokens, PLACES))
    return ids.tolist(), logprobs.tolist()


@pytest.mark.parametrize("make", [of_sglang, of_older_sglang, of_vllm], ids=["SGLang", "older SGLang", "vLLM"])
def test_the_likeliest_tokens_of_the_trained_places_come_in_order(
    servers: list[FakeServer], make: Callable[[], FakeServer]
) -> None:
    server = make()
    made = asking(servers, server)
    made.check(TOKENS)
    ids, logprobs = asked(made)
    expected = [pair for place in PLACES for pair in server.top(None, list(TOKENS), place, K)]
    assert ids == [token for _, token in expected]
    assert logprobs == pytest.approx([each for each, _ in expected], abs=1e-6)
    made.engine.close()


def test_the_tokens_before_the_first_that_trains_are_read_from_the_servers_cache(servers: list[FakeServer]) -> None:
    server = of_sglang()
    made = asking(servers, server)
    seen: list[dict[str, Any]] = []
    server.faults.append(lambda _, path, body: seen.append(body) if path == "/generate" else None)
    asked(made)
    assert seen == [
        {
            "input_ids": list(TOKENS), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": PLACES[0] - 1, "top_logprobs_num": K,
            "return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True,
        }
    ]  # fmt: skip
    made.engine.close()


SPOILED: dict[str, tuple[Spoil, str]] = {
    "fewer": (
        lambda pairs: pairs[:-1],
        rf"number 4 of the teacher's {K} likeliest tokens in the place of token 3 .*the server named fewer",
    ),
    "none": (lambda pairs: [], "number 1 of .*the server named fewer"),
    "unsorted": (lambda pairs: [pairs[1], pairs[0], *pairs[2:]], "number 2 .*likelier than the one before it"),
    "twice": (lambda pairs: [*pairs[:3], (pairs[3][0], pairs[0][1])], "number 4 .*it was named before"),
    "outside": (lambda pairs: [(pairs[0][0], 64), *pairs[1:]], "is 64 with the log-prob .*has the ids 0 to 63"),
    "above 0": (lambda pairs: [(0.5, pairs[0][1]), *pairs[1:]], "number 1 .*with the log-prob 0.5.*no log-prob"),
    "impossible": (lambda pairs: [*pairs[:3], (-1e30, pairs[3][1])], "number 4 .*-1e\\+30.*no log-prob"),
    "NaN": (lambda pairs: [(math.nan, pairs[0][1]), *pairs[1:]], "with the log-prob nan"),
    "infinite": (lambda pairs: [*pairs[:3], (-math.inf, pairs[3][1])], "with the log-prob -inf"),
    "no number": (lambda pairs: [(None, pairs[0][1]), *pairs[1:]], "with the log-prob nan"),
    "too much": (lambda pairs: [(-0.1, pairs[0][1]), (-0.2, pairs[1][1]), *pairs[2:]], "add up to more than 1"),
}
OF_SGLANG: dict[str, tuple[Spoil, str]] = {
    "negative": (lambda pairs: [(pairs[0][0], -1), *pairs[1:]], "-1 with the log-prob .*has the ids 0 to 63"),
    "half an id": (lambda pairs: [(pairs[0][0], 5.5), *pairs[1:]], "5.5 with the log-prob .*has the ids 0 to 63"),
    "a word": (lambda pairs: [(pairs[0][0], "hello"), *pairs[1:]], "are not log-probs and ids"),
}
OF_VLLM = {name: each for name, each in SPOILED.items() if name != "twice"}
"""Its ids are the keys of an object."""


@pytest.mark.parametrize(
    ("make", "cases"),
    [(of_sglang, SPOILED | OF_SGLANG), (of_older_sglang, SPOILED | OF_SGLANG), (of_vllm, OF_VLLM)],
    ids=["SGLang", "older SGLang", "vLLM"],
)
def test_an_answer_that_is_no_distributions_beginning_ends_the_run(
    servers: list[FakeServer], make: Callable[[], Spoiled], cases: dict[str, tuple[Spoil, str]]
) -> None:
    server = make()
    made = asking(servers, server)
    for name, (spoil, says) in cases.items():
        server.spoil = spoil
        with pytest.raises(GateError, match=says) as caught:
            asked(made)
        assert (caught.value.exit_code, caught.value.where) == (84, ENDPOINTS), name
        with pytest.raises(OrbitError, match=says):
            made.check(TOKENS)
    made.engine.close()


def test_an_answer_about_other_tokens_is_refused(servers: list[FakeServer]) -> None:
    shifted = {"meta_info": {"input_token_logprobs": [[None, 1, None]] * 5, "input_top_logprobs": [None] * 5}}
    told = {"input_token_logprobs": [[-1.0, each, None] for each in TOKENS[1:]]}
    arrays = {
        "input_top_logprobs_shape": [4, K], "input_top_logprobs_null_prefix": 1,
        "input_top_logprobs_val_flat_b64": "AAAA", "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64": "AAAA", "input_top_logprobs_idx_flat_b64_dtype": "int32",
    }  # fmt: skip
    for body, says in (
        (shifted, "scored other tokens"),
        ({"meta_info": told}, "no likeliest tokens"),
        ({"meta_info": told | arrays}, "no likeliest tokens"),
        ({"meta_info": told | arrays | {"input_top_logprobs_val_flat_b64_dtype": "float64"}}, "no likeliest tokens"),
    ):
        server = of_sglang()
        made = asking(servers, server)
        server.faults.append(once("/generate", 200, body))
        with pytest.raises(GateError, match=says) as caught:
            asked(made)
        assert caught.value.exit_code == 84
        made.engine.close()


def test_a_server_that_tells_too_few_is_refused_before_the_first_step(servers: list[FakeServer]) -> None:
    """vLLM's own answer where `--max-logprobs`, 20 if not given, is less."""
    limited = of_vllm()
    made = asking(servers, of_vllm(), limited)
    message = "Requested prompt logprobs of 4, which is greater than max allowed: 2"
    limited.faults.append(once("/v1/completions", 400, {"error": {"message": message}}))
    with pytest.raises(
        UnsupportedError, match=rf"teacher 1 .* does not tell its 4 likeliest tokens: .*{message}"
    ) as caught:
        made.check(TOKENS)
    assert (caught.value.exit_code, caught.value.where) == (78, ENDPOINTS)
    assert "--max-logprobs 4 or more" in str(caught.value.fix)
    made.engine.close()


def test_another_server_answers_where_one_dies(servers: list[FakeServer]) -> None:
    two = (of_sglang(), of_sglang())
    made = asking(servers, *two)
    expected = asked(made)
    two[0].faults.append(dies_at("/generate"))
    assert [asked(made) for _ in range(3)] == [expected] * 3
    made.engine.close()


@pytest.mark.parametrize(("longest", "at_a_time"), [(1024, SEQUENCES), (10**6, 3), (10**9, 1)])
def test_long_answers_are_fewer_at_a_time(servers: list[FakeServer], longest: int, at_a_time: int) -> None:
    made = asking(servers, of_sglang(), longest=longest)
    assert at_a_time == max(1, min(SEQUENCES, ANSWER_BYTES // (ENTRY_BYTES * longest * K)))
    under_way, most = 0, 0

    async def counted(*_: Any) -> None:
        nonlocal under_way, most
        under_way, most = under_way + 1, max(most, under_way + 1)
        await asyncio.sleep(0.1)
        under_way -= 1

    made._likeliest = counted  # type: ignore[method-assign,assignment]

    async def many() -> None:
        await asyncio.gather(*(made.top_tokens(TOKENS, PLACES) for _ in range(at_a_time + 8)))

    asyncio.run(many())
    assert most == at_a_time
    made.engine.close()


def test_a_teacher_of_sampled_tokens_is_asked_nothing_before_the_first_step(servers: list[FakeServer]) -> None:
    server = FakeServer()
    made = teacher(servers, server)
    server.faults.append(once("/generate", 500))
    made.check(TOKENS)
    assert len(server.faults) == 1
    made.engine.close()
