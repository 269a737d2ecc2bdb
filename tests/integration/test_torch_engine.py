"""The torch engine: distributions, batch independence, slots, stopping, scoring."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.algorithms.distribution import truncate
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import DataError, GateError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy, native
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.sampling import Truncation, draw, uniforms
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Request, Sampling
from tests.integration.engine_inputs import by_id, random_adapter, requests_for
from tests.integration.tiny_models import ARCHITECTURES, TARGETS, load_reference, make_checkpoint, reference_logprobs

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def adder() -> tuple[Policy, ChatTokenizer]:
    folder = builtin_folder("tiny-adder", "INT4")
    return load_policy(folder, LORA), ChatTokenizer(folder)


def test_a_rows_tokens_do_not_depend_on_the_batch(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    requests = requests_for(tokenizer, [f"{a}+{a}=" for a in range(10, 22)], 4, sampling=Sampling(max_new_tokens=5))
    whole = by_id(list(sample(TorchEngine(policy, tokenizer, max_running_requests=64), requests)))
    assert len(whole) == len(requests)
    few_rows = by_id(list(sample(TorchEngine(policy, tokenizer, max_running_requests=5), requests[::-1])))
    alone = by_id(list(sample(TorchEngine(policy, tokenizer, max_running_requests=64), requests[7:8])))
    for request_id, completion in {**few_rows, **alone}.items():
        assert completion.token_ids_T == whole[request_id].token_ids_T
        assert completion.logprobs_T == pytest.approx(whole[request_id].logprobs_T, abs=1e-5)
    assert len({tuple(completion.token_ids_T) for completion in whole.values()}) > 12


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_reported_logprobs_equal_transformers(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    policy, tokenizer = load_policy(folder, LORA), ChatTokenizer(folder)
    engine = TorchEngine(policy, tokenizer, max_running_requests=3)
    requests = requests_for(tokenizer, ["1+1=", "long question 123"], 3, sampling=Sampling(max_new_tokens=12))
    model = load_reference(folder)
    for completion in sample(engine, requests):
        prompt = list(requests[completion.request_id].prompt_ids_T)
        theirs = reference_logprobs(model, prompt + list(completion.token_ids_T))[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(completion.logprobs_T), theirs, rtol=0, atol=2e-5)


def test_sampled_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    rows = 40_000
    keys = np.array([stream_key(3, "test", row) for row in range(rows)], np.uint64)
    values = torch.from_numpy(uniforms(keys, np.zeros(rows, np.int64)))
    tokens, logprobs = draw(logits.expand(rows, -1), values, torch.full((rows, 1), 0.5))
    expected = torch.softmax(logits[0] / 0.5, -1)
    observed = torch.bincount(tokens, minlength=4) / rows
    # Five standard deviations of a binomial share.
    assert (observed - expected).abs().max() < 5 * math.sqrt(0.25 / rows)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_p_keeps_the_smallest_sufficient_set_and_its_own_logprobs() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    rows = 4000
    keys = np.array([stream_key(4, "test", row) for row in range(rows)], np.uint64)
    values = torch.from_numpy(uniforms(keys, np.zeros(rows, np.int64)))
    tokens, logprobs = draw(
        logits.expand(rows, -1), values, torch.ones(rows, 1), Truncation(top_p=torch.full((rows, 1), 0.6))
    )
    assert Counter(tokens.tolist()).keys() == {0, 1}
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.625, 0.375])[tokens])


def test_uniforms_depend_on_key_and_position_only_and_are_uniform() -> None:
    keys = np.array([stream_key(0, "u", index) for index in range(20_000)], np.uint64)
    first, second = uniforms(keys, np.zeros(len(keys), np.int64)), uniforms(keys, np.ones(len(keys), np.int64))
    assert np.array_equal(first[:5], uniforms(keys[:5], np.zeros(5, np.int64)))
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert first.min() >= 0
    assert first.max() < 1
    # SplitMix64 of seed 1234567: the published first outputs (Vigna, prng.di.unimi.it/splitmix64.c).
    raw = uniforms(np.array([1234567] * 3, np.uint64), np.arange(3))
    assert (raw * 2**53).astype(np.uint64).tolist() == [
        value >> 11 for value in (6457827717110365317, 3203168211198807973, 9817491932198370423)
    ]


def test_greedy_rows_take_the_most_likely_token() -> None:
    tokens, logprobs = draw(
        torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.99], dtype=torch.float64), torch.zeros(1, 1)
    )
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([3.0 - math.log(1 + math.exp(3.0) + math.e)])


@pytest.mark.parametrize("is_cut", [False, True])
def test_draws_are_those_of_double_precision(is_cut: bool) -> None:
    """Over as many tokens as a real model has."""
    rows, vocabulary = 14, 49_152
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    values = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([[1.0], [0.0], [0.7]]).repeat(5, 1)[:rows] if is_cut else None
    cuts = [torch.tensor([[each], [0.0]]).repeat(rows // 2, 1) for each in (50, 0.9, 0.01)] if is_cut else [None] * 3
    if is_cut:
        cuts[0], cuts[1] = cuts[0].long(), torch.where(cuts[1] == 0, 1.0, cuts[1])
    found = draw(logits, values, temperature, Truncation(*cuts))

    scaled = logits if temperature is None else logits / torch.where(temperature == 0, 1.0, temperature)
    # Without a compiler by these very operations, in fp32.
    exact = native.steps() is not None
    logprobs = torch.log_softmax(truncate(scaled, *cuts).to(torch.float64 if exact else torch.float32), -1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, values[:, None] * cdf[:, -1:], right=True)
    if temperature is not None:
        tokens = torch.where(temperature == 0, logits.argmax(-1, keepdim=True), tokens)
    assert torch.equal(found[0], tokens[:, 0])
    bound = 2e-6 if exact else 0.0
    torch.testing.assert_close(found[1].to(logprobs.dtype), logprobs.gather(-1, tokens)[:, 0], rtol=0.0, atol=bound)


def test_the_prompt_of_a_group_is_computed_once(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    requests = requests_for(tokenizer, ["12+34=", "5+6="], 8, sampling=Sampling(max_new_tokens=1))
    computed: list[int] = []
    hook = policy.model.get_input_embeddings().register_forward_hook(
        lambda _module, _given, embedded: computed.append(embedded.shape[-2])
    )
    try:
        completions = list(sample(TorchEngine(policy, tokenizer, max_running_requests=64), requests))
    finally:
        hook.remove()
    assert len(completions) == 16
    assert computed == [sum(len(prompt) for prompt in {tuple(each.prompt_ids_T) for each in requests})]


def test_generation_stops_at_a_stop_string_and_cuts_the_text(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=16)
    free = list(sample(engine, requests_for(tokenizer, ["40+41="], 16, sampling=Sampling(max_new_tokens=4))))
    stop = next(completion.text[0] for completion in free if completion.text)
    requests = requests_for(tokenizer, ["40+41="], 16, sampling=Sampling(max_new_tokens=4, stop=(stop,)))
    for completion in sample(engine, requests):
        assert stop not in completion.text
        unstopped = by_id(free)[completion.request_id].token_ids_T
        assert completion.token_ids_T == unstopped[: len(completion.token_ids_T)]
        if stop in by_id(free)[completion.request_id].text:
            assert completion.finish_reason == "stop"


def test_length_limits_and_end_tokens_are_told_apart(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=64)
    for completion in sample(engine, requests_for(tokenizer, ["12+34="], 32, sampling=Sampling(max_new_tokens=3))):
        ended = completion.token_ids_T[-1] in tokenizer.eos_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids_T) == 3


def test_mixed_adapters_in_one_batch_equal_separate_batches(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=8)
    for version in (1, 2):
        engine.load_adapter(f"policy-v{version}", random_adapter(policy, version))
    sampling = Sampling(max_new_tokens=4)
    prompts = ["10+10=", "33+44=", "71+18="]
    mixed, expected = [], {}
    for index, name in enumerate((None, "policy-v1", "policy-v2")):
        requests = requests_for(tokenizer, prompts, 4, sampling=sampling, adapter=name)
        renamed = [Request(100 * index + r.request_id, r.key, r.prompt_ids_T, r.sampling, r.adapter) for r in requests]
        expected.update(by_id(list(sample(engine, renamed))))
        mixed += renamed
    mixed = mixed[::3] + mixed[1::3] + mixed[2::3]
    for request_id, completion in by_id(list(sample(engine, mixed))).items():
        assert completion.token_ids_T == expected[request_id].token_ids_T
        assert set(completion.versions_T) == {-1 if request_id < 100 else request_id // 100}
        assert completion.logprobs_T == pytest.approx(expected[request_id].logprobs_T, abs=1e-5)
    engine.close()


def test_score_equals_the_packed_pass_and_traces_what_was_applied(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=8)
    engine.load_adapter("policy-v5", random_adapter(policy, 5))
    tokens = [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 5, 6, 7]
    adapted, base = engine.score(tokens, ["policy-v5", None])
    with torch.no_grad():
        batch = policy.pack([Branch(0, tokens[:1], tokens[1:])])
        bare, _ = policy.logprobs(batch)
        with policy.injected.selection.use("policy-v5"):
            with_adapter, _ = policy.logprobs(batch)
    assert base.logprobs_T[1:] == pytest.approx(bare.tolist(), abs=1e-4)
    assert adapted.logprobs_T[1:] == pytest.approx(with_adapter.tolist(), abs=1e-4)
    assert adapted.applied_digest is not None
    assert base.applied_digest is None
    assert max(abs(a - b) for a, b in zip(adapted.logprobs_T, base.logprobs_T, strict=True)) > 0.01
    engine.close()


def test_slots_are_named_once_and_read_back(adder: tuple[Policy, ChatTokenizer]) -> None:
    policy, tokenizer = adder
    engine = TorchEngine(policy, tokenizer, max_running_requests=8)
    adapter = random_adapter(policy, 1)
    engine.load_adapter("policy-v1", adapter)
    assert engine.adapters() == ("policy-v1",)
    assert engine.adapter_digest("policy-v1") == adapter.digest
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter("policy-v1", adapter)
    engine.unload_adapter("policy-v1")
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter("policy-v1", adapter)
    with pytest.raises(GateError, match="no adapter"):
        list(sample(engine, [Request(0, 0, (5,), Sampling(), "policy-v1")]))
    with pytest.raises(DataError, match="empty prompt"):
        list(sample(engine, [Request(0, 0, (), Sampling(), None)]))
    assert list(sample(engine, [])) == []


def test_what_a_socket_brings_during_a_step_joins_the_next_one(adder: tuple[Policy, ChatTokenizer]) -> None:
    """Rows that wait a step longer than they must are what a server loses against its engine."""
    policy, tokenizer = adder
    sampling = Sampling(max_new_tokens=6, ignore_eos=True)
    first, second = requests_for(tokenizer, ["1+1=", "2+2="], 1, sampling=sampling)

    async def serve() -> list[int]:
        mine, theirs = socket.socketpair()
        engine, steps = TorchEngine(policy, tokenizer, max_running_requests=2), 0
        heard_after: list[int] = []

        class Front(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                heard_after.append(steps)
                engine.submit([second])

        def tell() -> None:
            nonlocal steps
            steps += 1
            if steps == 2:
                mine.send(b"x")

        transport, _ = await asyncio.get_running_loop().create_connection(Front, sock=theirs)
        engine.listen(tell)
        engine.submit([first])
        done = [completion.request_id async for completion in engine.completions()]
        transport.close()
        mine.close()
        return [*heard_after, *done]

    assert asyncio.run(serve()) == [2, first.request_id, second.request_id]
