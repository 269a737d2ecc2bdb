"""What SGLang computes on the way to its log-probs, and the weights it holds, for the one pass that Orbit requests.

Belongs here: forward hooks on SGLang's modules, and their names in a checkpoint.
Does not belong here: comparing (`parity.locate`), the trainer's side (`policy.snapshot`).

Orbit puts a request in a folder that both can access, sends the sequence, and reads the answer from there. Without a
request, nothing is hooked and nothing is copied. A requested pass runs without CUDA graphs. With several
ranks, each answers for itself: with results that no lower rank reports, and with digests of all that it holds.
The facts of the slots are sent the same way when a publish is proven, so no separate request delays those that
sample. Digests are computed concurrently with the following passes.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import dump, tensor_digest
from orbit_runtime.sglang_plugin import ranks, readback
from orbit_runtime.sglang_plugin.rotation import FUSED
from orbit_runtime.sglang_plugin.weights import HeldTensor, base_weights, heights_of, language_model, places_of
from orbit_runtime.workers.servers.protocol import (
    ANSWER,
    FACTS,
    FACTS_REQUEST,
    LOOK_SECONDS,
    REQUEST,
    SEEN,
    TAPS_VARIABLE,
    TOLD,
    open_counter,
    write_whole,
)

TAPPED = (
    "embed_tokens", "input_layernorm", "qkv_proj", "q_proj", "k_proj", "v_proj", "fused_qkv_a_proj_with_mqa",
    "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "post_attention_layernorm", "gate", "router",
    "gate_up_proj", "gate_proj", "up_proj", "down_proj", "norm",
)  # fmt: skip
"""Last parts of the names of modules whose results are reported; `mlp` is one if it routes to experts."""
ROTARY = "rotary angles"


@dataclass(frozen=True, eq=False)
class Point:
    """One rank's part of one result, fp32 on the CPU."""

    data: Tensor
    share: RankShare


@dataclass(frozen=True)
class RankShare:
    """Relation of a rank's result to the result of all."""

    kind: Literal["whole", "part", "summand"] = "whole"
    """Parts are joined along the last axis. Summands are equal if they have already been summed."""
    place: int = 0
    is_copy: bool = False
    """Whether a lower rank has it too."""


def around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **named: Any) -> Any:
    """Wraps a pass of `ModelRunner`; answers the pending request if this pass is the requested one.

    The client removes the request: another rank may look for it later. That the pass was seen is reported before its
    own results are sent; the contents follow from a thread, because digests of a whole base take minutes.
    """
    if _asked_facts(runner, forward_batch):
        with without_graphs(runner):
            return original(runner, forward_batch, *args, **named)
    request = _find_request(REQUEST)
    if request is None or forward_batch.input_ids.tolist() != request["token_ids"]:
        return original(runner, forward_batch, *args, **named)
    points: dict[str, Point] = {}
    with ExitStack() as looking:
        looking.enter_context(without_graphs(runner))
        for handle in _tap(language_model(runner.model), points):
            looking.callback(handle.remove)
        result = original(runner, forward_batch, *args, **named)
    rank, folder = ranks.own_rank(), request["folder"]
    write_whole(folder / SEEN.format(rank=rank), b"")
    answer = folder / ANSWER.format(rank=rank)
    try:
        held = _held(runner, request.get("adapter"))
    except Exception as error:
        _write_failure(answer, error)
    else:
        _worker.submit(_answer, answer, language_model(runner.model), request, points, held, is_first=rank == 0)
    return result


def _asked_facts(runner: Any, forward_batch: Any) -> dict[str, Any] | None:
    """The request for facts that this pass answers."""
    request = _find_request(FACTS_REQUEST)
    if request is None or request["name"] in _answered or not forward_batch.forward_mode.is_extend():
        return None
    return request if set(request["adapters"]) <= _read_whole(runner, forward_batch, request["token_ids"]) else None


def tell(runner: Any, forward_batch: Any, take: Callable[[Any, Collection[str], Collection[str]], Any]) -> None:
    """Runs after a pass, on every rank: answers the request for facts, once, with the first pass that reads its whole
    sequence under all adapters of the request. All ranks find the same pass, because the batch determines it.

    The answer is written in two steps. Its announcement precedes the pass's own results, so a client that has those
    knows that it must wait; the contents are computed in a thread, concurrently with the following passes.

    Args:
        take: copies, immediately, the data for facts about the adapters of the pass and others; see `hooks.Copied`.
    """
    request = _asked_facts(runner, forward_batch)
    if request is None:
        return
    name, folder = request["name"], request["folder"]
    _answered.clear()
    _answered.add(name)
    if not ranks.own_rank():
        write_whole(folder / FACTS.format(name=name), b"{}")
    taken = take(runner, request["adapters"], request["standing"])
    _worker.submit(_end, folder, name, taken, request["seconds"])


def _read_whole(runner: Any, forward_batch: Any, token_ids_T: Sequence[int]) -> set[str]:
    """Names of the adapters under which this pass computes exactly these tokens, from the first to the last."""
    known = runner.lora_manager.lora_refs
    tokens, names, start = forward_batch.input_ids.tolist(), set(), 0
    # Not strict: SGLang may have padded the batch with dummy sequences.
    for key, length in zip(forward_batch.lora_ids, forward_batch.extend_seq_lens_cpu, strict=False):
        if key in known and tokens[start : start + length] == token_ids_T:
            names.add(known[key].lora_name)
        start += length
    return names


def _end(folder: Path, name: str, taken: Any, seconds: float) -> None:
    own, rank = taken.own(), ranks.own_rank()
    if rank:
        write_whole(folder / TOLD.format(name=name, rank=rank), pickle.dumps(own))
        return
    files = [folder / TOLD.format(name=name, rank=rank) for rank in range(1, ranks.count())]
    others = [taken.received(_receive(file, seconds)) for file in files]
    write_whole(folder / FACTS.format(name=name), json.dumps({"facts": taken.facts([own, *others])}).encode())


def _receive(file: Path, seconds: float) -> Any:
    """The report of another rank of this server, in the format of its own `own`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            told = readback.ReportReader(io.BytesIO(file.read_bytes())).load()
        except FileNotFoundError:
            time.sleep(LOOK_SECONDS)
            continue
        except Exception as error:
            told = {"unhooked": [], "reports": {}, "error": f"its report cannot be read: {type(error).__name__}"}
        file.unlink()
        return told
    return {"unhooked": [], "reports": {}, "error": f"reported nothing of the pass within {seconds:.0f} s"}


_answered: set[str] = set()
"""The newest request answered; a later pass may read the same tokens."""
# One torch thread: decoding needs the cores, and a second thread would wait for a busy core.
_worker = ThreadPoolExecutor(1, "orbit-facts", initializer=torch.set_num_threads, initargs=(1,))


def _find_request(name: str) -> dict[str, Any] | None:
    folder = os.environ.get(TAPS_VARIABLE)
    return _read_requests(folder, _counter(folder)[:]).get(name) if folder else None


_counter = functools.cache(open_counter)


@functools.lru_cache(1)
def _read_requests(folder: str, _announced: bytes) -> dict[str, Any]:
    """Files are read once after each announcement: an idle pass reads memory alone."""
    found = {}
    for name in (REQUEST, FACTS_REQUEST):
        with suppress(FileNotFoundError):
            found[name] = json.loads(Path(folder, name).read_bytes()) | {"folder": Path(folder)}
    return found


def _tap(model: Any, points: dict[str, Point]) -> Iterator[Any]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last == "attn":
            shares = _shares(modules.get(f"{parent}.qkv_proj"), 3)
            yield module.register_forward_pre_hook(_queries(parent, shares, points))
        if last == "o_proj":
            yield module.register_forward_pre_hook(_attended(parent, _input_share(module), points))
        is_final_norm = last == "norm" and name.count(".") == 1
        if last in TAPPED and (last != "norm" or is_final_norm):
            yield module.register_forward_hook(_results(name, module, modules.get(parent), points))
        elif last == "mlp" and hasattr(module, "experts"):
            yield module.register_forward_hook(_mixed(name, points))


def _results(name: str, module: Any, owner: Any, points: dict[str, Point]) -> Callable[..., None]:
    parent, _, last = name.rpartition(".")
    parts = FUSED.get(last, (last,))
    shares = _shares(module, len(parts))

    def record(_: Any, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        pieces = tensor.split(heights_of(module, tensor.shape[-1], parts, owner), -1)
        for part, piece, share in zip(parts, pieces, shares, strict=True):
            points[f"{parent}.{part}" if parent else part] = _point(piece, share)

    return record


def _queries(parent: str, shares: Sequence[RankShare], points: dict[str, Point]) -> Callable[..., None]:
    def record(_: Any, args: Any) -> None:
        for part, tensor, share in (("query", args[0], shares[0]), ("key", args[1], shares[1])):
            points[f"{parent}.{part}"] = _point(tensor.flatten(1), share)

    return record


def _attended(parent: str, share: RankShare, points: dict[str, Point]) -> Callable[..., None]:
    """Records the input of attention's output projection, however attention was computed."""

    def record(_: Any, args: Any) -> None:
        points[f"{parent}.attended"] = _point(args[0].flatten(1), share)

    return record


def _mixed(name: str, points: dict[str, Point]) -> Callable[..., None]:
    """A layer's routed and shared experts, summed."""

    def record(_: Any, __: Any, result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        # SGLang sums over ranks here, or in the next norm.
        points[name] = _point(tensor, RankShare("summand", ranks.own_rank()))

    return record


def _point(tensor: Tensor, share: RankShare) -> Point:
    return Point(tensor.detach().float().cpu().clone(), share)


def _shares(module: Any, count: int) -> list[RankShare]:
    """Relation of each part's result of a layer to the result of all ranks."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear

    base = getattr(module, "base_layer", module)
    place, size = get_group_rank_size(getattr(base, "tp_group", None))
    if size > 1 and isinstance(base, RowParallelLinear):
        # SGLang sums after only some of these layers, together with the next norm.
        return [RankShare("summand", place)] * count
    if size == 1 or not isinstance(base, ColumnParallelLinear) or base.gather_output:
        return [RankShare(is_copy=ranks.own_rank() > 0)] * count
    copies = base.num_kv_head_replicas if count == 3 else 1
    places = places_of(module, count)
    return [RankShare("part", place), *(RankShare("part", each, place % copies > 0) for each in places[1:])]


def _input_share(module: Any) -> RankShare:
    """Relation of an output projection's input to the input of all ranks."""
    from sglang.srt.distributed.utils import get_group_rank_size

    place, size = get_group_rank_size(getattr(getattr(module, "base_layer", module), "tp_group", None))
    return RankShare("part", place) if size > 1 else RankShare(is_copy=ranks.own_rank() > 0)


def _held(runner: Any, adapter: str | None) -> list[HeldTensor]:
    held = list(base_weights(language_model(runner.model)))
    if adapter is not None:
        held += readback.slot_tensors(runner.lora_manager, adapter)
    return held


def _answer(
    file: Path,
    model: Any,
    request: dict[str, Any],
    points: dict[str, Point],
    held: Sequence[HeldTensor],
    *,
    is_first: bool,
) -> None:
    """Writes this rank's answer."""
    try:
        tensors, facts = _tell_pass(model, request, points, held, is_first=is_first)
        write_whole(file, dump(tensors, torch.float32, facts))
    except Exception as error:
        _write_failure(file, error)


def _write_failure(file: Path, error: Exception) -> None:
    """Reported, not raised: an exception would take the server down, or be lost in the other thread."""
    write_whole(file, dump({}, torch.float32, {"error": f"{type(error).__name__}: {error}"}))


def _tell_pass(
    model: Any, request: dict[str, Any], points: dict[str, Point], held: Sequence[HeldTensor], *, is_first: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Packed weights are dequantised one tensor at a time."""
    tensors = {f"point:{name}": each.data for name, each in points.items() if not each.share.is_copy}
    if is_first:
        tensors |= {f"constant:{name}": each for name, each in _constants(model, len(request["token_ids"]))}
    wanted, parts = set(request["values"]), {}
    for each in held:
        if wanted and each.name not in wanted:
            continue
        tensor = each.read()
        parts[each.name] = [tensor_digest(tensor), list(tensor.shape), each.axis, each.start]
        if wanted:
            tensors[f"value:{each.name}"] = tensor.detach().float().cpu()
    return tensors, {
        "order": json.dumps(list(points)),
        "shares": json.dumps({name: [each.share.kind, each.share.place] for name, each in points.items()}),
        "parts": json.dumps(parts),
        "absent": json.dumps(_absent(model)),
    }


def _absent(model: Any) -> list[str]:
    """Modules that SGLang computes inside other layers: shared experts as an additional routed one."""
    fused = [name for name, module in model.named_modules() if getattr(module, "num_fused_shared_experts", 0)]
    return [f"{name}.shared_experts" for name in fused if name.endswith(".mlp")]


def _constants(model: Any, rows: int) -> Iterator[tuple[str, Tensor]]:
    # Layers usually share one rotary embedding: each is reported under its own name.
    for name, module in model.named_modules(remove_duplicate=False):
        eps = getattr(module, "variance_epsilon", None)
        if eps is not None:
            yield f"{name}.eps", torch.tensor(float(eps))
        angles = getattr(module, "cos_sin_cache", None)
        if angles is not None:
            # A copy: a shared tensor would be the same bytes under many names.
            yield f"{name.rpartition('.')[0]}.{ROTARY}", angles[:rows].float().cpu().clone()


RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")
"""Attributes in which `ModelRunner` keeps recorded graphs (0.5.23: `_forward_raw`); None if it has none."""


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Within this context, every pass of this `ModelRunner` is computed by its modules."""
    held = {name: getattr(runner, name) for name in RUNNERS if hasattr(runner, name)}
    try:
        for name in held:
            setattr(runner, name, None)
        yield
    finally:
        for name, graphs in held.items():
            setattr(runner, name, graphs)
