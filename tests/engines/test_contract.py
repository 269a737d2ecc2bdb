"""What every engine keeps: the log-probs are the policy's, slots hold what was published, requests come back once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.state import expected_applied_digest, load_slot, remove_slot
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import GateError
from orbit_runtime.policy import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Engine, Sampling
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

Adder = tuple[Policy, ChatTokenizer]
NewName = Callable[[], str]
SUMS = ["12+34=", "56+78=", "90+11="]


def policy_logprobs(policy: Policy, adapter: AdapterFiles | None, prompt: Sequence[int], answer: Sequence[int],
                    temperature: float = 1.0) -> torch.Tensor:  # fmt: skip
    """The trainer's own reading, in one packed pass."""
    if adapter is None:
        slot = None
    else:
        slot = f"reading-{adapter.digest}"
        load_slot(policy.injected.layers, slot, adapter.files)
    assert slot != TRAINER_SLOT
    try:
        with torch.no_grad(), policy.injected.selection.use(slot):
            batch = policy.pack([Branch(0, tuple(prompt), tuple(answer))])
            return policy.logprobs(batch, sampling=Sampling(temperature=temperature))[0]
    finally:
        if slot:
            remove_slot(policy.injected.layers, slot)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_policys_with_two_adapters_and_none_in_one_batch(
    engine: Engine, adder: Adder, new_name: NewName, temperature: float, close: float
) -> None:
    policy, tokenizer = adder
    adapters = {new_name(): random_adapter(policy, version) for version in (1, 2)}
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    sampling = Sampling(temperature=temperature, max_new_tokens=5)
    requests = []
    for name in (None, *adapters):
        for made in requests_for(tokenizer, SUMS, 4, sampling=sampling, adapter=name):
            requests.append(type(made)(len(requests), made.key + len(requests), made.prompt_ids_T, sampling, name))
    found = by_id(list(engine.generate(requests)))
    assert sorted(found) == [request.request_id for request in requests]
    for request in requests:
        completion, adapter = found[request.request_id], adapters.get(request.adapter or "")
        assert set(completion.versions_T) == {adapter.version if adapter else -1}
        expected = policy_logprobs(policy, adapter, request.prompt_ids_T, completion.token_ids_T, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs_T), expected, rtol=0, atol=close)


def test_scores_are_the_policys_and_the_passes_applied_the_published_bytes(
    engine: Engine, adder: Adder, new_name: NewName, close: float
) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 3)
    engine.load_adapter(name, adapter)
    tokens = [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 9, 12, 7]
    (copy,) = engine.copies()
    adapted, base = copy.score(tokens, [name, None])
    # vLLM has no plug-in of ours that could tell.
    assert copy.adapter_digest(name) == (adapter.digest if copy.reads_back else None)
    assert adapted.applied_digest == (expected_applied_digest(adapter.files) if copy.reads_back else None)
    assert base.applied_digest is None
    for scored, files in ((adapted, adapter), (base, None)):
        assert scored.logprobs_T[0] == 0.0
        expected = policy_logprobs(policy, files, tokens[:1], tokens[1:])
        torch.testing.assert_close(torch.tensor(scored.logprobs_T[1:]), expected, rtol=0, atol=close)
    assert max(abs(a - b) for a, b in zip(adapted.logprobs_T, base.logprobs_T, strict=True)) > 0.01


def test_a_completion_ends_at_the_end_token_a_stop_string_or_its_length(engine: Engine, adder: Adder) -> None:
    _, tokenizer = adder
    long = list(engine.generate(requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=2))))
    assert {completion.finish_reason for completion in long} <= {"length", "stop"}
    assert any(completion.finish_reason == "length" for completion in long)
    assert all(len(completion.token_ids_T) <= 2 for completion in long)
    ended = list(engine.generate(requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=12))))
    eos = set(tokenizer.eos_ids)
    natural = [each for each in ended if each.token_ids_T[-1] in eos]
    assert natural
    for completion in natural:
        assert completion.finish_reason == "stop"
        assert not eos & set(completion.token_ids_T[:-1])
        assert completion.text == tokenizer.decode(completion.token_ids_T[:-1])
    digit = ended[0].text[0]
    stopped = list(
        engine.generate(requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=12, stop=(digit,))))
    )
    assert all(digit not in completion.text for completion in stopped)
    assert any(completion.finish_reason == "stop" for completion in stopped)


def test_samples_of_a_prompt_differ(engine: Engine, adder: Adder) -> None:
    _, tokenizer = adder
    made = list(engine.generate(requests_for(tokenizer, SUMS[:1], 64, sampling=Sampling(max_new_tokens=4))))
    assert len({completion.token_ids_T for completion in made}) > 4
    assert all(math.isfinite(value) and value <= 0 for each in made for value in each.logprobs_T)


def test_a_name_is_used_once_and_an_unknown_one_is_refused(engine: Engine, adder: Adder, new_name: NewName) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 4)
    request = requests_for(tokenizer, SUMS[:1], 1, sampling=Sampling(max_new_tokens=2), adapter=name)
    with pytest.raises(GateError, match=name):
        list(engine.generate(request))
    engine.load_adapter(name, adapter)
    assert engine.adapters() == (name,)
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter(name, adapter)
    assert len(list(engine.generate(request))) == 1
    engine.unload_adapter(name)
    assert engine.adapters() == ()
    with pytest.raises(GateError, match=name):
        list(engine.generate(request))
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter(name, adapter)


def test_versions_share_no_cache(engine: Engine, adder: Adder, new_name: NewName, close: float) -> None:
    """The same prompt under one version after the other: each gives its own log-probs, not its predecessor's."""
    policy, tokenizer = adder
    tokens = [*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 9, 12, 7]
    seen = []
    for version in (5, 6):
        name, adapter = new_name(), random_adapter(policy, version)
        engine.load_adapter(name, adapter)
        for _ in range(2):
            (scored,) = engine.copies()[0].score(tokens, [name])
            expected = policy_logprobs(policy, adapter, tokens[:1], tokens[1:])
            torch.testing.assert_close(torch.tensor(scored.logprobs_T[1:]), expected, rtol=0, atol=close)
        seen.append(scored.logprobs_T)
        engine.unload_adapter(name)
    assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 0.01


def test_lora_two_rotations_and_none_in_one_batch_give_the_torch_engines_logprobs(
    oft_server: ServedEngine, oft_adder: Adder, lora_adder: Adder, new_name: NewName
) -> None:
    """Four kinds of rows in the same passes, sampled and scored; the LoRA is of another policy on the same base."""
    tokenizer = oft_adder[1]
    owners = {new_name(): (oft_adder, 1), new_name(): (oft_adder, 2), new_name(): (lora_adder, 3)}
    adapters = {name: random_adapter(policy, seed) for name, ((policy, _), seed) in owners.items()}
    for name, adapter in adapters.items():
        oft_server.load_adapter(name, adapter)
    sampling = Sampling(max_new_tokens=5)
    requests = []
    for prompt in SUMS:
        for name in (None, *adapters):
            (made,) = requests_for(tokenizer, [prompt], 1, sampling=sampling, adapter=name)
            requests.append(replace(made, request_id=len(requests), key=made.key + len(requests)))
    found = by_id(list(oft_server.generate(requests)))
    for request in requests:
        name = request.adapter
        adder = owners[name][0] if name else oft_adder
        torch_engine = TorchEngine(*adder, max_running_requests=4)
        if name:
            torch_engine.load_adapter(name, adapters[name])
        answer = found[request.request_id]
        (scored,) = torch_engine.copies()[0].score([*request.prompt_ids_T, *answer.token_ids_T], [name])
        expected = torch.tensor(scored.logprobs_T[len(request.prompt_ids_T) :])
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=5e-5)
        torch_engine.close()
    tokens = [*requests[0].prompt_ids_T, *found[0].token_ids_T]
    *scores, base = oft_server.copies()[0].score(tokens, [*adapters, None])
    for name, scored in zip(adapters, scores, strict=True):
        assert oft_server.copies()[0].adapter_digest(name) == adapters[name].digest
        assert scored.applied_digest == expected_applied_digest(adapters[name].files)
        assert max(abs(a - b) for a, b in zip(scored.logprobs_T, base.logprobs_T, strict=True)) > 0.01
        oft_server.unload_adapter(name)
