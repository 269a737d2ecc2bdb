"""What SGLang computes on the way to its log-probs, and what it holds, for the one pass that Orbit asks about.

Belongs here: forward hooks on SGLang's modules, and their names as a checkpoint has them.
Does not belong here: comparing (`parity.locate`), the trainer's side (`policy.snapshot`).

Orbit puts a request in a folder that both see, sends the sequence, and reads the answer from there. Nothing is hooked
and nothing is copied while no request lies there. The facts of the slots go the same way when a publish is proven: no
request of their own stands in the way of those that sample, and digests are computed beside the passes that follow.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import dump, tensor_digest
from orbit_runtime.sglang_plugin import readback
from orbit_runtime.sglang_plugin.rotation import FUSED

VARIABLE = "ORBIT_SGLANG_TAPS"
"""The folder; set by Orbit for the servers it starts."""
REQUEST, ANSWER = "request.json", "answer.safetensors"
FACTS_REQUEST, FACTS = "facts-request.json", "facts.json"
TAPPED = (
    "embed_tokens", "input_layernorm", "qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "post_attention_layernorm",
    "gate", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "norm",
)  # fmt: skip
ROTARY = "rotary angles"


def around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **named: Any) -> Any:
    """A pass of `ModelRunner`; answers the request that lies there, if this pass is the one it speaks of."""
    file = _find_request(REQUEST)
    if file is None:
        return original(runner, forward_batch, *args, **named)
    request = json.loads(file.read_text())
    if forward_batch.input_ids.tolist() != request["token_ids"]:
        return original(runner, forward_batch, *args, **named)
    file.unlink()
    points: dict[str, Tensor] = {}
    with ExitStack() as taps:
        for handle in _tap(runner.model, points):
            taps.callback(handle.remove)
        result = original(runner, forward_batch, *args, **named)
    _answer(file.parent / ANSWER, runner, request, points)
    return result


def tell(runner: Any, forward_batch: Any, take: Callable[[Collection[str]], Callable[[], dict[str, Any]]]) -> None:
    """After a pass: answers the request for facts, if this pass is one with the adapters it speaks of.

    The answer is there in two steps. That one comes is said before the pass's own results leave, so that whoever has
    those knows to wait for it; what it says is worked out in a thread, beside the passes that follow.

    Args:
        take: copies, at once, what facts about these adapters are made of; what it gives back makes them of it.
    """
    file = _find_request(FACTS_REQUEST)
    if file is None:
        return
    request = json.loads(file.read_text())
    known = runner.lora_manager.lora_refs
    if {known[key].lora_name for key in forward_batch.lora_ids if key in known}.issuperset(request["adapters"]):
        answer, name = file.parent / FACTS, request["name"]
        number = _answers.begin(answer, {"request": name})
        finish = take(request["adapters"])
        _worker.submit(lambda: _answers.end(answer, number, {"request": name, "facts": finish()}))


class _Answers:
    """What stands in the file of answers is of the newest pass that was begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = 0

    def begin(self, file: Path, content: Mapping[str, Any]) -> int:
        with self._lock:
            self._newest += 1
            _write(file, json.dumps(content).encode())
            return self._newest

    def end(self, file: Path, number: int, content: Mapping[str, Any]) -> None:
        told = json.dumps(content).encode()
        with self._lock:
            if number == self._newest:
                _write(file, told)


_answers = _Answers()
# One thread of torch's: decoding needs the cores, and a second one would wait for a core that is taken.
_worker = ThreadPoolExecutor(1, "orbit-facts", initializer=torch.set_num_threads, initargs=(1,))


def _find_request(name: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    file = Path(folder) / name if folder else None
    return file if file is not None and file.exists() else None


def _tap(model: Any, points: dict[str, Tensor]) -> Iterator[Any]:
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "attn":
            yield module.register_forward_pre_hook(_queries(name, points))
            yield module.register_forward_hook(_attended(name, points))
        elif last in TAPPED and (last != "norm" or name.count(".") == 1):
            yield module.register_forward_hook(_results(name, module, points))


def _results(name: str, module: Any, points: dict[str, Tensor]) -> Callable[..., None]:
    parent, _, last = name.rpartition(".")
    parts = FUSED.get(last, (last,))

    def record(_: Any, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        pieces = tensor.split(_heights(module, tensor.shape[-1], parts), -1)
        for part, piece in zip(parts, pieces, strict=True):
            points[f"{parent}.{part}"] = piece.detach().float().cpu().clone()

    return record


def _queries(name: str, points: dict[str, Tensor]) -> Callable[..., None]:
    parent = name.rpartition(".")[0]

    def record(_: Any, args: Any) -> None:
        for part, tensor in (("query", args[0]), ("key", args[1])):
            points[f"{parent}.{part}"] = tensor.detach().flatten(1).float().cpu().clone()

    return record


def _attended(name: str, points: dict[str, Tensor]) -> Callable[..., None]:
    parent = name.rpartition(".")[0]

    def record(_: Any, __: Any, result: Any) -> None:
        points[f"{parent}.attended"] = result.detach().flatten(1).float().cpu().clone()

    return record


def _heights(module: Any, total: int, parts: tuple[str, ...]) -> list[int]:
    if len(parts) == 3:
        base = getattr(module, "base_layer", module)
        return [base.q_proj_shard_size, base.kv_proj_shard_size, base.kv_proj_shard_size]
    return [total // len(parts)] * len(parts)


def _answer(file: Path, runner: Any, request: dict[str, Any], points: dict[str, Tensor]) -> None:
    base = dict(_base_tensors(runner.model))
    adapter = dict(_adapter_tensors(runner, request.get("adapter")))
    held = {**base, **adapter}
    tensors = {f"point:{name}": tensor for name, tensor in points.items()}
    tensors |= {f"constant:{name}": tensor for name, tensor in _constants(runner.model, len(request["token_ids"]))}
    tensors |= {f"value:{name}": held[name].float().cpu() for name in request["values"] if name in held}
    facts = {
        "order": json.dumps(list(points)),
        "digests": json.dumps({name: tensor_digest(tensor) for name, tensor in held.items()}),
    }
    _write(file, dump(tensors, torch.float32, facts))


def _write(file: Path, content: bytes) -> None:
    """Complete under its name, or not there: a half-written file is never read."""
    # Every rank of a server writes here.
    written = file.with_suffix(f".{os.getpid()}.part")
    written.write_bytes(content)
    written.rename(file)


def _base_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights that are held unpacked, under the checkpoint's names; packed ones are left out."""
    modules = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        module = modules[owner]
        parent, _, last = owner.removesuffix(".base_layer").rpartition(".")
        if not tensor.is_floating_point() or kind not in ("weight", "bias"):
            continue
        parts = FUSED.get(last, (last,))
        rows = getattr(module, "org_vocab_size", tensor.shape[0])
        heights = _heights(module, rows, parts)
        if parts[0] == "q_a_proj":
            rank = modules[parent].q_lora_rank
            heights = [rank, rows - rank]
        pieces = tensor.detach()[:rows].split(heights, 0)
        for part, piece in zip(parts, pieces, strict=True):
            yield f"{parent}.{part}.{kind}" if parent else f"{part}.{kind}", piece


def _adapter_tensors(runner: Any, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    if adapter is not None:
        yield from readback.slot_tensors(runner.lora_manager, adapter)


def _constants(model: Any, rows: int) -> Iterator[tuple[str, Tensor]]:
    seen = False
    for name, module in model.named_modules():
        eps = getattr(module, "variance_epsilon", None)
        if eps is not None:
            yield f"{name}.eps", torch.tensor(float(eps))
        angles = getattr(module, "cos_sin_cache", None)
        if angles is not None and not seen:
            seen = True
            yield ROTARY, angles[:rows].float().cpu()
