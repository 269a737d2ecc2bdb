"""What SGLang computes on the way to its log-probs, and what it holds, for the one pass that Orbit asks about.

Belongs here: forward hooks on SGLang's modules, and their names as a checkpoint has them.
Does not belong here: comparing (`parity.locate`), the trainer's side (`policy.snapshot`).

Orbit puts a request in a folder that both see, sends the sequence, and reads the answer from there. Nothing is hooked
and nothing is copied while no request lies there. Of several ranks each answers for itself, with what no lower one has
told; tensors that are cut over them are left out, their results are not. The facts of the slots go the same way when a
publish is proven: no request of their own is in the way of those that sample, and digests are computed beside the
passes that follow.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import dump, tensor_digest
from orbit_runtime.sglang_plugin import ranks, readback
from orbit_runtime.sglang_plugin.rotation import FUSED

VARIABLE = "ORBIT_SGLANG_TAPS"
"""The folder; set by Orbit for the servers it starts."""
REQUEST, ANSWER = "request.json", "answer-{rank}.safetensors"
FACTS_REQUEST, FACTS, TOLD = "facts-request.json", "facts-{name}.json", "told-{name}-{rank}"
OTHERS_SECONDS = 30.0
LOOK_SECONDS = 0.001
TAPPED = (
    "embed_tokens", "input_layernorm", "qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "post_attention_layernorm",
    "gate", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "norm",
)  # fmt: skip
ROTARY = "rotary angles"


@dataclass(frozen=True, eq=False)
class Point:
    """What one rank has of one result, fp32 on the CPU."""

    data: Tensor
    share: Share


@dataclass(frozen=True)
class Share:
    """What a rank's result is to that of all."""

    kind: Literal["whole", "part", "summand"] = "whole"
    """A part stands beside the others along the last axis. Summands are equal where they were summed up already."""
    place: int = 0
    is_copy: bool = False
    """A lower rank has it too."""


def around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **named: Any) -> Any:
    """A pass of `ModelRunner`; answers the request that lies there, if this pass is the one it speaks of.

    The client takes the request away: another rank may come to look for it later.
    """
    file = _find_request(REQUEST)
    if file is None:
        return original(runner, forward_batch, *args, **named)
    request = json.loads(file.read_text())
    if forward_batch.input_ids.tolist() != request["token_ids"]:
        return original(runner, forward_batch, *args, **named)
    points: dict[str, Point] = {}
    with ExitStack() as taps:
        for handle in _tap(runner.model, points):
            taps.callback(handle.remove)
        result = original(runner, forward_batch, *args, **named)
    _answer(file.parent / ANSWER.format(rank=ranks.own_rank()), runner, request, points)
    return result


def tell(runner: Any, forward_batch: Any, take: Callable[[Any, Collection[str], Collection[str]], TellsFacts]) -> None:
    """After a pass, on every rank: answers the request for facts, once, with the first pass that reads its tokens whole
    under all the adapters it speaks of. All ranks find the same one, because it is told by what is in the batch.

    The answer is there in two steps. That one comes is said before the pass's own results leave, so that whoever has
    those knows to wait for it; what it says is worked out in a thread, beside the passes that follow.

    Args:
        take: copies, at once, what facts about adapters of the pass and others are made of.
    """
    file = _find_request(FACTS_REQUEST)
    if file is None or not forward_batch.forward_mode.is_extend():
        return
    request = json.loads(file.read_text())
    name = request["name"]
    if name in _answered or not set(request["adapters"]) <= _read_whole(runner, forward_batch, request["token_ids"]):
        return
    _answered.clear()
    _answered.add(name)
    if not ranks.own_rank():
        _write(file.parent / FACTS.format(name=name), b"{}")
    taken = take(runner, request["adapters"], request["standing"])
    _worker.submit(_end, file.parent, name, taken)


class TellsFacts(Protocol):
    """What was copied on one rank."""

    def own(self) -> dict[str, Any]:
        """Of this rank, in the host's memory."""
        ...

    def facts(self, every: list[Any]) -> dict[str, Any]:
        """On rank 0, of what every rank told, in order."""
        ...


def _read_whole(runner: Any, forward_batch: Any, token_ids_T: Sequence[int]) -> set[str]:
    """Names of the adapters under which this pass computes exactly these tokens, from the first to the last."""
    known = runner.lora_manager.lora_refs
    tokens, names, start = forward_batch.input_ids.tolist(), set(), 0
    # Not strict: SGLang may have filled the batch up with sequences of nobody's.
    for key, length in zip(forward_batch.lora_ids, forward_batch.extend_seq_lens_cpu, strict=False):
        if key in known and tokens[start : start + length] == token_ids_T:
            names.add(known[key].lora_name)
        start += length
    return names


def _end(folder: Path, name: str, taken: TellsFacts) -> None:
    own, rank = taken.own(), ranks.own_rank()
    if rank:
        _write(folder / TOLD.format(name=name, rank=rank), pickle.dumps(own))
        return
    others = [_receive(folder / TOLD.format(name=name, rank=rank)) for rank in range(1, ranks.count())]
    _write(folder / FACTS.format(name=name), json.dumps({"facts": taken.facts([own, *others])}).encode())


def _receive(file: Path) -> Any:
    """What another rank of this server put there, as its own kind and in its own words."""
    until = time.monotonic() + OTHERS_SECONDS
    while time.monotonic() < until:
        try:
            told = pickle.loads(file.read_bytes())
        except FileNotFoundError:
            time.sleep(LOOK_SECONDS)
            continue
        file.unlink()
        return told
    return {"unhooked": [], "told": {}, "error": f"told nothing of the pass within {OTHERS_SECONDS:.0f} s"}


_answered: set[str] = set()
"""The newest request; a later pass may read the same tokens."""
# One thread of torch's: decoding needs the cores, and a second one would wait for a core that is taken.
_worker = ThreadPoolExecutor(1, "orbit-facts", initializer=torch.set_num_threads, initargs=(1,))


def _find_request(name: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    file = Path(folder) / name if folder else None
    return file if file is not None and file.exists() else None


def _tap(model: Any, points: dict[str, Point]) -> Iterator[Any]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        if last == "attn":
            projection = modules.get(f"{name.rpartition('.')[0]}.qkv_proj")
            shares = _shares(projection, 3)
            yield module.register_forward_pre_hook(_queries(name, shares, points))
            yield module.register_forward_hook(_attended(name, shares[0], points))
        elif last in TAPPED and (last != "norm" or name.count(".") == 1):
            yield module.register_forward_hook(_results(name, module, points))


def _results(name: str, module: Any, points: dict[str, Point]) -> Callable[..., None]:
    parent, _, last = name.rpartition(".")
    parts = FUSED.get(last, (last,))
    shares = _shares(module, len(parts))

    def record(_: Any, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        pieces = tensor.split(_heights(module, tensor.shape[-1], parts), -1)
        for part, piece, share in zip(parts, pieces, shares, strict=True):
            points[f"{parent}.{part}"] = _point(piece, share)

    return record


def _queries(name: str, shares: Sequence[Share], points: dict[str, Point]) -> Callable[..., None]:
    parent = name.rpartition(".")[0]

    def record(_: Any, args: Any) -> None:
        for part, tensor, share in (("query", args[0], shares[0]), ("key", args[1], shares[1])):
            points[f"{parent}.{part}"] = _point(tensor.flatten(1), share)

    return record


def _attended(name: str, share: Share, points: dict[str, Point]) -> Callable[..., None]:
    parent = name.rpartition(".")[0]

    def record(_: Any, __: Any, result: Any) -> None:
        points[f"{parent}.attended"] = _point(result.flatten(1), share)

    return record


def _point(tensor: Tensor, share: Share) -> Point:
    return Point(tensor.detach().float().cpu().clone(), share)


def _shares(module: Any, count: int) -> list[Share]:
    """Of the results of each part of a layer, over ranks."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear

    base = getattr(module, "base_layer", module)
    place, size = get_group_rank_size(getattr(base, "tp_group", None))
    if size > 1 and isinstance(base, RowParallelLinear):
        # SGLang sums up behind some of these layers only, with the next norm.
        return [Share("summand", place)] * count
    if size == 1 or not isinstance(base, ColumnParallelLinear) or base.gather_output:
        return [Share(is_copy=ranks.own_rank() > 0)] * count
    copies = base.num_kv_head_replicas if count == 3 else 1
    # Queries first; neighbours may share a head of keys and values.
    others = Share("part", place // copies, place % copies > 0)
    return [Share("part", place), *[others] * (count - 1)]


def _heights(module: Any, total: int, parts: tuple[str, ...]) -> list[int]:
    if len(parts) == 3:
        base = getattr(module, "base_layer", module)
        return [base.q_proj_shard_size, base.kv_proj_shard_size, base.kv_proj_shard_size]
    return [total // len(parts)] * len(parts)


def _answer(file: Path, runner: Any, request: dict[str, Any], points: dict[str, Point]) -> None:
    tensors = {f"point:{name}": each.data for name, each in points.items() if not each.share.is_copy}
    shares = json.dumps({name: [each.share.kind, each.share.place] for name, each in points.items()})
    if ranks.own_rank():
        _write(file, dump(tensors, torch.float32, {"shares": shares}))
        return
    base = dict(_base_tensors(runner.model))
    adapter = dict(_adapter_tensors(runner, request.get("adapter")))
    held = {**base, **adapter}
    tensors |= {f"constant:{name}": tensor for name, tensor in _constants(runner.model, len(request["token_ids"]))}
    tensors |= {f"value:{name}": held[name].float().cpu() for name in request["values"] if name in held}
    facts = {
        "order": json.dumps(list(points)),
        "shares": shares,
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
    """Weights that are held unpacked, under the checkpoint's names; packed ones and those that are cut are left out."""
    modules = dict(model.named_modules())
    is_alone = ranks.count() == 1
    for name, tensor in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        module = modules[owner]
        parent, _, last = owner.removesuffix(".base_layer").rpartition(".")
        if not tensor.is_floating_point() or kind not in ("weight", "bias") or not (is_alone or _is_whole(module)):
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


def _is_whole(module: Any) -> bool:
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    base = getattr(module, "base_layer", module)
    return not isinstance(base, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))


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
