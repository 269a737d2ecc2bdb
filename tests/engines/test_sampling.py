"""Every setting of sampling on every engine, alone and in pairs: its log-probs are the trainer's, or it is refused.

Belongs here: real engines. Does not belong here: the distribution's own maths (`tests/integration/test_distribution`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.planner.support.manifests import Kind, check_sampling
from orbit_runtime.policy import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.preceding_tokens import build_preceding
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import Engine, Request, Sampling
from tests.integration.engine_inputs import by_id, requests_for

FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "topK": {"top_k": 4},
    "topP": {"top_p": 0.7},
    "minP": {"min_p": 0.2},
    "repetitionPenalty": {"repetition_penalty": 1.4},
    "logitBias": {"logit_bias": ((5, 2.0), (9, -1.5))},
}
KINDS: dict[str, Kind] = {"Torch": "Torch", "Torch-OFT": "Torch", "vLLM": "vLLM"}
"""Case → kind; the others are SGLang with the plug-in."""


def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(
    engine: Engine, case: str, adder: tuple[Policy, ChatTokenizer], close: float
) -> None:
    """All combinations at once, so that rows of one batch differ in their settings."""
    policy, tokenizer = adder
    requests: list[Request] = []
    for names in [*((each,) for each in FIELDS), *combinations(FIELDS, 2), ("topK", "topP", "minP")]:
        sampling = Sampling(max_new_tokens=5, **{key: v for each in names for key, v in FIELDS[each].items()})
        try:
            check_sampling(sampling, KINDS.get(case, "SGLang"), case)
        except UnsupportedError:
            continue
        made = requests_for(tokenizer, ["12+34="], 2, sampling=sampling)
        first = len(requests)
        requests += [replace(each, request_id=first + at, key=first + at) for at, each in enumerate(made)]
    assert len(requests) >= 2 * 15
    found = by_id(list(sample(engine, requests)))
    for request in requests:
        completion = found[request.request_id]
        branches = [Branch(0, request.prompt_ids_T, completion.token_ids_T)]
        with torch.no_grad(), policy.injected.selection.use(None):
            expected, _ = policy.logprobs(
                policy.pack(branches), sampling=request.sampling, seen=build_preceding(branches, policy.device)
            )
        told = torch.tensor(completion.logprobs_T)
        assert float((told - expected).abs().max()) <= close, request.sampling


def test_a_token_outside_top_k_is_never_drawn(engine: Engine, adder: tuple[Policy, ChatTokenizer]) -> None:
    _, tokenizer = adder
    sampling = Sampling(max_new_tokens=1, temperature=50.0, top_k=2)
    found = list(sample(engine, requests_for(tokenizer, ["12+34="], 64, sampling=sampling)))
    assert len({tuple(completion.token_ids_T) for completion in found}) == 2


def test_a_stop_token_ends_a_completion_and_is_no_part_of_its_text(
    engine: Engine, adder: tuple[Policy, ChatTokenizer]
) -> None:
    _, tokenizer = adder
    # One token that is drawn for certain.
    sampling = Sampling(max_new_tokens=6, logit_bias=((9, 100.0),), stop_token_ids=(9,))
    for completion in sample(engine, requests_for(tokenizer, ["12+34=", "1+1="], 2, sampling=sampling)):
        assert completion.token_ids_T.tolist() == [9]
        assert (completion.finish_reason, completion.text) == ("stop", "")


def test_an_end_token_that_is_ignored_ends_nothing(engine: Engine, adder: tuple[Policy, ChatTokenizer]) -> None:
    _, tokenizer = adder
    eos = tokenizer.eos_ids[0]
    sampling = Sampling(max_new_tokens=6, logit_bias=((eos, 100.0),))
    for completion in sample(engine, requests_for(tokenizer, ["12+34="], 2, sampling=sampling)):
        assert (completion.token_ids_T.tolist(), completion.finish_reason) == ([eos], "stop")
    ignoring = replace(sampling, ignore_eos=True)
    for completion in sample(engine, requests_for(tokenizer, ["12+34="], 2, sampling=ignoring)):
        assert (completion.token_ids_T.tolist(), completion.finish_reason) == ([eos] * 6, "length")
