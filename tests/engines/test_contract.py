"""What every engine keeps: the log-probs are the policy's, slots hold what was published, requests come back once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from uuid import uuid4

import pytest
import torch

from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.state import load_slot, remove_slot
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import GateError
from orbit_runtime.policy import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import answer_text, end_all, sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Completion, Engine, Sampling
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
    found = by_id(list(sample(engine, requests)))
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
    long = list(sample(engine, requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=2))))
    assert {completion.finish_reason for completion in long} <= {"length", "stop"}
    assert any(completion.finish_reason == "length" for completion in long)
    assert all(len(completion.token_ids_T) <= 2 for completion in long)
    ended = list(sample(engine, requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=12))))
    eos = set(tokenizer.eos_ids)
    natural = [each for each in ended if each.token_ids_T[-1] in eos]
    assert natural
    for completion in natural:
        assert completion.finish_reason == "stop"
        assert not eos & set(completion.token_ids_T[:-1])
        assert completion.text == tokenizer.decode(completion.token_ids_T[:-1])
    digit = ended[0].text[0]
    stopped = list(
        sample(engine, requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=12, stop=(digit,))))
    )
    assert all(digit not in completion.text for completion in stopped)
    assert any(completion.finish_reason == "stop" for completion in stopped)


def test_samples_of_a_prompt_differ(engine: Engine, adder: Adder) -> None:
    _, tokenizer = adder
    made = list(sample(engine, requests_for(tokenizer, SUMS[:1], 64, sampling=Sampling(max_new_tokens=4))))
    assert len({tuple(completion.token_ids_T) for completion in made}) > 4
    assert all(math.isfinite(value) and value <= 0 for each in made for value in each.logprobs_T)


def test_a_name_is_used_once_and_an_unknown_one_is_refused(engine: Engine, adder: Adder, new_name: NewName) -> None:
    policy, tokenizer = adder
    name, adapter = new_name(), random_adapter(policy, 4)
    request = requests_for(tokenizer, SUMS[:1], 1, sampling=Sampling(max_new_tokens=2), adapter=name)
    with pytest.raises(GateError, match=name):
        list(sample(engine, request))
    engine.load_adapter(name, adapter)
    assert engine.adapters() == (name,)
    with pytest.raises(GateError, match="used before"):
        engine.load_adapter(name, adapter)
    assert len(list(sample(engine, request))) == 1
    engine.unload_adapter(name)
    assert engine.adapters() == ()
    with pytest.raises(GateError, match=name):
        list(sample(engine, request))
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
    found = by_id(list(sample(oft_server, requests)))
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


# --- the queue ---


async def until(engine: Engine, count: int) -> list[Completion]:
    """The next so many completions."""
    found: list[Completion] = []
    async with aclosing(engine.completions()) as stream:
        async for completion in stream:
            found.append(completion)
            if len(found) == count:
                break
    return found


def test_what_is_submitted_while_others_are_sampled_comes_through_the_same_stream(engine: Engine, adder: Adder) -> None:
    _, tokenizer = adder
    asked = requests_for(tokenizer, SUMS, 4, sampling=Sampling(max_new_tokens=5))
    later = [replace(each, request_id=100 + each.request_id) for each in asked]

    async def all_of_them() -> list[Completion]:
        engine.submit(asked)
        found = []
        async for completion in engine.completions():
            found.append(completion)
            if len(found) == 2:
                engine.submit(later)
        return found

    found = asyncio.run(all_of_them())
    assert sorted(each.request_id for each in found) == sorted(each.request_id for each in asked + later)


def test_an_abort_ends_what_it_names_alone(engine: Engine, adder: Adder, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang ends every request whose id begins with what it is told: 1, and 10 to 19."""
    monkeypatch.setattr("orbit_runtime.rollout.answer_queue._PREFIX", uuid4().hex)
    monkeypatch.setattr("orbit_runtime.rollout.answer_queue._NUMBERS", count(1))
    _, tokenizer = adder
    asked = requests_for(tokenizer, SUMS, 8, sampling=Sampling(max_new_tokens=60, ignore_eos=True))[:16]

    async def all_but_one() -> list[Completion]:
        engine.submit(asked)
        asyncio.get_running_loop().call_later(0.05, engine.abort, [asked[0].request_id])
        return [each async for each in engine.completions()]

    found = by_id(asyncio.run(all_but_one()))
    ended = {number: each.finish_reason for number, each in found.items() if number != asked[0].request_id}
    assert ended == {each.request_id: "length" for each in asked[1:]}


def test_an_aborted_completion_goes_on_under_the_next_version_with_its_tokens_and_log_probs(
    engine: Engine, adder: Adder, new_name: NewName, close: float
) -> None:
    policy, tokenizer = adder
    names = [new_name(), new_name()]
    adapters = {name: random_adapter(policy, version) for version, name in enumerate(names, 7)}
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    # One ends at once; nothing ends the others but the abort.
    long = Sampling(max_new_tokens=100, ignore_eos=True)
    asked = requests_for(tokenizer, SUMS, 8, sampling=long, adapter=names[0])
    asked[0] = replace(asked[0], sampling=Sampling(max_new_tokens=2))

    async def aborted() -> list[Completion]:
        engine.submit(asked)
        first = await until(engine, 1)
        engine.abort()
        return [*first, *[each async for each in engine.completions()]]

    found = by_id(asyncio.run(aborted()))
    assert len(found) == len(asked)
    cut = [each for each in found.values() if each.finish_reason == "abort"]
    assert cut
    assert all(len(each.token_ids_T) == len(each.logprobs_T) == len(each.versions_T) < 100 for each in cut)
    engine.unload_adapter(names[0])
    rest = [replace(asked[each.request_id], adapter=names[1], so_far=each) for each in cut]
    whole = by_id(list(sample(engine, rest)))
    for before in cut:
        request, after, count = asked[before.request_id], whole[before.request_id], len(before.token_ids_T)
        assert after.token_ids_T[:count] == before.token_ids_T
        assert after.logprobs_T[:count] == before.logprobs_T
        assert after.versions_T.tolist() == [7] * count + [8] * (len(after.token_ids_T) - count)
        assert after.finish_reason == "length"
        expected = policy_logprobs(policy, adapters[names[1]], request.prompt_ids_T, after.token_ids_T)
        torch.testing.assert_close(torch.tensor(after.logprobs_T[count:]), expected[count:], rtol=0, atol=close)
        assert after.text == answer_text(tokenizer, after.token_ids_T, long)


def test_a_deadline_ends_a_completion_where_it_is(engine: Engine, adder: Adder) -> None:
    _, tokenizer = adder
    asked = requests_for(tokenizer, SUMS, 4, sampling=Sampling(max_new_tokens=12))
    # Long enough that a server is still at it when it is told.
    endless = Sampling(max_new_tokens=200, ignore_eos=True)
    late = [replace(each, deadline_seconds=1e-6, sampling=endless) for each in asked[:6]]
    found = by_id(list(sample(engine, [*late, *asked[6:]])))
    assert {found[each.request_id].finish_reason for each in late} == {"deadline"}
    assert {found[each.request_id].finish_reason for each in asked[6:]} <= {"stop", "length"}
    # Its time counts from the submission that it was given with, and no earlier one's.
    again = by_id(list(sample(engine, asked)))
    assert {each.finish_reason for each in again.values()} <= {"stop", "length"}


def test_an_adapter_that_requests_under_way_sample_from_stays(engine: Engine, adder: Adder, new_name: NewName) -> None:
    policy, tokenizer = adder
    name = new_name()
    engine.load_adapter(name, random_adapter(policy, 9))
    asked = requests_for(tokenizer, SUMS[:1], 4, sampling=Sampling(max_new_tokens=12), adapter=name)
    engine.submit(asked)
    with pytest.raises(GateError, match="still sample from"):
        engine.unload_adapter(name)
    with pytest.raises(GateError, match="under way already"):
        engine.submit(asked[:1])
    asyncio.run(end_all(engine))
    engine.unload_adapter(name)


def test_the_servers_plug_in_tells_which_adapter_sampled(
    lora_server: ServedEngine, lora_adder: Adder, new_name: NewName, run_inside: Callable[..., None]
) -> None:
    """Where a version stands in no slot, its tokens are refused: the word of the request alone is not believed."""
    policy, tokenizer = lora_adder
    name = new_name()
    lora_server.load_adapter(name, random_adapter(policy, 11))
    asked = requests_for(tokenizer, SUMS[:1], 2, sampling=Sampling(max_new_tokens=4), adapter=name)
    assert {each.versions_T[0] for each in sample(lora_server, asked)} == {11}
    run_inside(
        lora_server,
        "from orbit_runtime.sglang_plugin import hooks\nhooks.kept = hooks.note_applied\n"
        "hooks.note_applied = lambda manager, adapters: hooks._applied.update({each: '' for each in adapters})\n",
    )
    with pytest.raises(GateError, match=f"asked for {name}, and the engine applied the base"):
        list(sample(lora_server, asked))
    run_inside(lora_server, "from orbit_runtime.sglang_plugin import hooks\nhooks.note_applied = hooks.kept\n")
    lora_server.unload_adapter(name)
