"""Every setting of sampling against transformers' own processors, and trainer against engine, alone and in pairs.

Belongs here: that tokens are drawn from the distribution that log-probs are told of. Does not belong here: what servers
can give (`planner.support.sampling`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.algorithms.distribution import truncate
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.logprobs import token_logprobs
from orbit_runtime.policy.packed import Branch, build_packed
from orbit_runtime.policy.preceding_tokens import build_preceding
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.sampling import RowLogits, Truncation, draw, uniforms
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Request, Sampling
from tests.integration.engine_inputs import requests_for
from tests.integration.tiny_models import TARGETS

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": ((3, 1.5), (7, -2.0))},
}
COMBINED = [
    *[(name,) for name in FIELDS],
    *combinations(FIELDS, 2),
    tuple(FIELDS),
]


@pytest.fixture(scope="module")
def adder() -> tuple[Policy, ChatTokenizer]:
    folder = builtin_folder("tiny-adder", "INT4")
    return load_policy(folder, LORA), ChatTokenizer(folder)


def sampling_of(names: tuple[str, ...]) -> Sampling:
    return Sampling(**{key: value for name in names for key, value in FIELDS[name].items()})


def processed(logits_V: torch.Tensor, before_T: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    """transformers' log-probs, in the order of its `_get_logits_processor`."""
    chain = LogitsProcessorList()
    if sampling.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return torch.log_softmax(chain(torch.tensor([before_T]), logits_V[None]), -1)[0]


@pytest.mark.parametrize("names", COMBINED, ids="+".join)
def test_log_probs_of_every_token_are_those_of_transformers(names: tuple[str, ...]) -> None:
    """The whole vocabulary as targets, over packed branches with a shared prefix, several chunks and both penalties."""
    torch.manual_seed(5)
    vocabulary, sampling = 23, sampling_of(names)
    weight = torch.randn(vocabulary, 8)
    prefixes = {0: (1, 3, 3, 9), 1: (7,)}
    answers = [(0, (3, 4, 11, 4)), (0, (20,)), (1, (7, 8, 22)), (0, (5, 5, 6, 1, 2))]
    branches = [Branch(prefix, prefixes[prefix], answer) for prefix, answer in answers]
    befores = [
        (*prefixes[prefix], *answer[:at]) for prefix, answer in answers for at in range(len(answer))
    ]  # fmt: skip
    hidden, seen = torch.randn(len(befores), 8), build_preceding(branches, torch.device("cpu"))
    assert build_packed(branches, torch.device("cpu")).target_ids_R.tolist() == [t for _, a in answers for t in a]
    expected = torch.stack([processed(h @ weight.T, b, sampling) for h, b in zip(hidden, befores, strict=True)])
    for token in range(vocabulary):
        targets = torch.full((len(befores),), token)
        logprobs, _ = token_logprobs(
            hidden, targets, lambda h: h @ weight.T, vocabulary=vocabulary, sampling=sampling, seen=seen,
            chunk_elements=vocabulary * 3,
        )  # fmt: skip
        drawn = expected[:, token].isfinite()
        torch.testing.assert_close(logprobs[drawn], expected[drawn, token], atol=2e-6, rtol=1e-5)
        # A token that is cut off keeps a finite log-prob where the sampler's rounding let it through.
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("names", COMBINED, ids="+".join)
def test_gradients_equal_those_of_autograd_through_the_dense_form(names: tuple[str, ...]) -> None:
    torch.manual_seed(6)
    vocabulary, sampling = 19, sampling_of(names)
    weight, hidden = torch.randn(vocabulary, 6), torch.randn(7, 6, requires_grad=True)
    branches = [Branch(0, (1, 2, 3), (3, 4, 5)), Branch(0, (1, 2, 3), (9, 1, 9, 2))]
    befores = [(1, 2, 3), (1, 2, 3, 3), (1, 2, 3, 3, 4), (1, 2, 3), (1, 2, 3, 9), (1, 2, 3, 9, 1), (1, 2, 3, 9, 1, 9)]
    # Of a token that is seen twice, autograd counts the gradient twice: transformers' penalty scatters by each.
    once = [tuple(dict.fromkeys(before)) for before in befores]
    dense = torch.stack([processed(h @ weight.T, b, sampling) for h, b in zip(hidden, once, strict=True)])
    targets, scale = dense.argmax(-1), torch.randn(7)
    (dense.gather(-1, targets[:, None])[:, 0] * scale).sum().backward()
    expected, hidden.grad = hidden.grad, None
    logprobs, _ = token_logprobs(
        hidden, targets, lambda h: h @ weight.T, vocabulary=vocabulary, sampling=sampling,
        seen=build_preceding(branches, torch.device("cpu")), chunk_elements=vocabulary * 2,
    )  # fmt: skip
    (logprobs * scale).sum().backward()
    torch.testing.assert_close(hidden.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("names", COMBINED, ids="+".join)
def test_draws_follow_the_log_probs_that_are_told(names: tuple[str, ...]) -> None:
    """By enumeration: each of 8 tokens is drawn as often as its log-prob says, and its log-prob is transformers'."""
    sampling, rows, prompt = sampling_of(names), 20_000, (2, 3, 3)
    logits_V = torch.tensor([1.2, -0.4, 0.9, 2.0, -1.5, 0.3, 1.1, 0.2])
    adjusting = RowLogits(rows)
    adjusting.admit([Request(row, row, prompt, sampling, None) for row in range(rows)])
    logits = adjusting.apply(logits_V.expand(rows, -1), slice(0, rows))
    keys = np.array([stream_key(8, "test", row) for row in range(rows)], np.uint64)

    def column(value: float | int, dtype: torch.dtype, used: object) -> torch.Tensor | None:
        return torch.full((rows, 1), value, dtype=dtype) if used else None

    tokens, logprobs = draw(
        logits,
        torch.from_numpy(uniforms(keys, np.zeros(rows, np.int64))),
        torch.full((rows, 1), sampling.temperature),
        Truncation(
            column(sampling.top_k, torch.long, sampling.top_k),
            column(sampling.top_p, torch.float32, sampling.top_p < 1),
            column(sampling.min_p, torch.float32, sampling.min_p),
        ),
    )
    expected = processed(logits_V, prompt, sampling)
    torch.testing.assert_close(logprobs, expected[tokens], atol=2e-6, rtol=1e-5)
    counts = Counter(tokens.tolist())
    for token, logprob in enumerate(expected.tolist()):
        mean = rows * math.exp(logprob)
        assert abs(counts[token] - mean) <= 5 * math.sqrt(mean), token


def test_rows_of_one_batch_are_cut_each_by_its_own_settings() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 30)
    top_k, top_p, min_p = [0, 3, 7, 50], [1.0, 0.5, 0.9, 0.3], [0.0, 0.2, 0.0, 0.1]
    columns = (torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    together = truncate(logits, *(column[:, None] for column in columns))
    for row in range(4):
        alone = truncate(logits[row : row + 1], top_k[row] or None, top_p[row], min_p[row])
        assert torch.equal(together[row : row + 1], alone)


def test_tokens_as_likely_as_the_last_of_top_k_stay() -> None:
    cut = truncate(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), 2, None, None)
    assert cut.isfinite().tolist() == [[True, True, True, False]]


def test_moved_rows_keep_their_bias_penalty_and_seen_tokens() -> None:
    plain, biased = Sampling(), Sampling(logit_bias=((0, 2.0),), repetition_penalty=2.0)
    adjusting = RowLogits(3)
    adjusting.admit([Request(row, 0, (1,), each, None) for row, each in enumerate((plain, plain, biased))])
    logits = torch.full((3, 4), 1.0)
    adjusting.apply(logits, slice(0, 3))
    adjusting.record(slice(0, 3), torch.tensor([3, 3, 2]))
    adjusting.remove(1, [2], [0])
    assert adjusting.apply(logits[:1], slice(0, 1)).tolist() == [[3.0, 0.5, 0.5, 1.0]]
    adjusting.admit([Request(3, 0, (0,), replace(biased, logit_bias=()), None)])
    assert adjusting.apply(logits[:2], slice(0, 2)).tolist() == [[3.0, 0.5, 0.5, 1.0], [0.5, 1.0, 1.0, 1.0]]


def test_rows_without_such_settings_keep_the_very_tensor() -> None:
    adjusting = RowLogits(2)
    adjusting.admit([Request(row, 0, (1,), Sampling(), None) for row in range(2)])
    logits = torch.randn(2, 5)
    assert adjusting.apply(logits, slice(0, 2)) is logits


@pytest.mark.parametrize("names", COMBINED, ids="+".join)
def test_trainer_and_engine_tell_the_same_log_probs(
    adder: tuple[Policy, ChatTokenizer], names: tuple[str, ...]
) -> None:
    """Samples of several prompts, packed with shared prefixes; some rows end early and others take their places."""
    policy, tokenizer = adder
    sampling = replace(sampling_of(names), max_new_tokens=6)
    requests = requests_for(tokenizer, [f"{a}+{a}=" for a in range(10, 14)], 4, sampling=sampling)
    engine = TorchEngine(policy, tokenizer, max_running_requests=6)
    completions = sorted(sample(engine, requests), key=lambda completion: completion.request_id)
    branches = [
        Branch(request.request_id // 4, request.prompt_ids_T, completion.token_ids_T)
        for request, completion in zip(requests, completions, strict=True)
    ]
    sampled = torch.tensor([value for completion in completions for value in completion.logprobs_T])
    with torch.no_grad(), policy.injected.selection.use(None):
        logprobs, _ = policy.logprobs(
            policy.pack(branches), sampling=sampling, seen=build_preceding(branches, policy.device)
        )
    torch.testing.assert_close(logprobs, sampled, atol=1e-4, rtol=1e-4)


def test_a_stop_token_ends_a_completion_as_end_of_sequence_does(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=16)
    base = Sampling(max_new_tokens=6)
    free = list(sample(engine, requests_for(tokenizer, ["40+41="], 16, sampling=base)))
    stop = Counter(token for each in free for token in each.token_ids_T[:3]).most_common(1)[0][0]
    sampling = replace(base, stop_token_ids=(stop,))
    stopped = list(sample(engine, requests_for(tokenizer, ["40+41="], 16, sampling=sampling)))
    ended = [each for each in stopped if each.token_ids_T[-1] == stop]
    assert ended
    for each in ended:
        assert (each.finish_reason, each.token_ids_T.count(stop)) == ("stop", 1)
        assert each.text == tokenizer.decode(each.token_ids_T[:-1])


def test_an_end_token_that_is_ignored_is_a_token_like_any_other(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=16)
    eos = tokenizer.eos_ids[0]
    sampling = Sampling(max_new_tokens=8, ignore_eos=True, logit_bias=((eos, 4.0),))
    completions = list(sample(engine, requests_for(tokenizer, ["40+41="], 16, sampling=sampling)))
    assert {len(each.token_ids_T) for each in completions} == {8}
    assert {each.finish_reason for each in completions} == {"length"}
    assert any(eos in each.token_ids_T[:-1] for each in completions)
