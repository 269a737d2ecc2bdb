"""What else was probable in each place: by transformers' own model and log-softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import Completion, Request, Sampling

FOLDER = builtin_folder("tiny-adder", "BF16")
PROMPTS = ("12+34=", "40+41=")


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(FOLDER)


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    policy = load_policy(FOLDER, AdapterConfig(type="LoRA", targets=()))
    return TorchEngine(policy, ChatTokenizer(FOLDER), max_running_requests=8)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(FOLDER), dtype=torch.float32).eval()


def prompt(tokenizer: ChatTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))


def logits(model: torch.nn.Module, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Before each token of the completion."""
    ids = torch.tensor([[*prompt, *completion.token_ids_T]])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].float()


def told(completion: Completion, count: int) -> list[dict[int, float]]:
    assert completion.alternatives is not None
    ids, logprobs = completion.alternatives
    assert len(ids) == len(logprobs) == count * len(completion.token_ids_T)
    rows = range(0, len(ids), count)
    return [
        {t: p for t, p in zip(ids[at : at + count], logprobs[at : at + count], strict=True) if t >= 0} for at in rows
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_alternatives_are_the_most_probable_tokens_by_transformers(
    engine: TorchEngine, tokenizer: ChatTokenizer, model: torch.nn.Module, temperature: float
) -> None:
    """Beside requests that ask for none, or for fewer, in one batch."""
    sampling = Sampling(max_new_tokens=6, temperature=temperature, ignore_eos=True)
    counts = (5, 2, 0)
    requests = [
        Request(index, index, prompt(tokenizer, PROMPTS[index % 2]), sampling, None, alternatives=count)
        for index, count in enumerate(counts)
    ]
    found = {each.request_id: each for each in sample(engine, requests)}
    assert found[2].alternatives is None
    for request in requests[:2]:
        completion = found[request.request_id]
        expected = torch.log_softmax(logits(model, request.prompt_ids_T, completion) / (temperature or 1.0), -1)
        for place, row in enumerate(told(completion, request.alternatives)):
            values, ids = expected[place].topk(request.alternatives)
            assert [*row] == ids.tolist()
            assert [*row.values()] == pytest.approx(values.tolist(), abs=2e-4)
            own = float(expected[place, completion.token_ids_T[place]])
            assert completion.logprobs_T[place] == pytest.approx(own, abs=2e-4)


def test_what_is_cut_off_is_no_alternative(engine: TorchEngine, tokenizer: ChatTokenizer) -> None:
    sampling = Sampling(max_new_tokens=4, top_k=2, ignore_eos=True)
    (completion,) = sample(engine, [Request(0, 1, prompt(tokenizer, "1+1="), sampling, None, alternatives=4)])
    for place, row in enumerate(told(completion, 4)):
        assert len(row) == 2
        assert sum(map(math.exp, row.values())) == pytest.approx(1.0, abs=1e-5)
        assert completion.logprobs_T[place] == pytest.approx(row[completion.token_ids_T[place]])


def test_a_greedy_row_is_cut_by_nothing(engine: TorchEngine, tokenizer: ChatTokenizer) -> None:
    ids = prompt(tokenizer, "1+1=")
    plain = Sampling(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    cut = Sampling(max_new_tokens=4, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, ignore_eos=True)
    found = [*sample(engine, [Request(0, 1, ids, plain, None, alternatives=3), Request(1, 2, ids, cut, None)])]
    by_id = {each.request_id: each for each in found}
    assert by_id[0].token_ids_T == by_id[1].token_ids_T
    assert by_id[0].logprobs_T.tolist() == pytest.approx(by_id[1].logprobs_T.tolist())
    assert min(by_id[0].logprobs_T) < 0.0


def test_an_answer_that_goes_on_keeps_what_was_told(engine: TorchEngine, tokenizer: ChatTokenizer) -> None:
    ids = prompt(tokenizer, "1+1=")
    sampling = Sampling(max_new_tokens=6, ignore_eos=True)
    (whole,) = sample(engine, [Request(0, 9, ids, sampling, None, alternatives=2)])
    engine.submit([Request(0, 9, ids, sampling, None, alternatives=2)])
    for _ in range(3):
        engine.advance()
    engine.abort()
    (part,) = engine.advance()
    (rest,) = sample(engine, [Request(0, 9, ids, sampling, None, part, alternatives=2)])
    assert 0 < len(part.token_ids_T) < 6
    assert rest.token_ids_T == whole.token_ids_T
    assert rest.alternatives is not None
    assert whole.alternatives is not None
    assert rest.alternatives[0] == whole.alternatives[0]
