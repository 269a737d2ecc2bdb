"""torch's kernels for the pretended device: every one of them runs its CPU twin on the same memory.

Tensors on the device are torch's own, so that views, autograd, saving and generators are torch's too. What a device
would refuse is refused: an operation on several devices, a generator of another device, memory that is pinned for
nothing. What makes the host wait for the device is counted by the function of Orbit that asked for it (`waits`), and
each wait is a line of the file PRETENDED_WAITS, if that is set. PRETENDED_FAULT, such as `{"rollout/rows.py record 9":
"OutOfMemoryError"}`, is the error of torch's that this function's ninth wait is told.

Belongs here: what a device does. Does not belong here: starting a process that has one (`pretended_cuda`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CPU = torch.device("cpu")
NATIVE = {"empty.memory_format", "empty_strided", "resize_", "is_pinned", "record_stream", "is_set_to"}
"""Not replaced, as are all views: they launch no kernel."""
WITHOUT_KEY = {"aten::copy_"}
"""Kernels that torch chooses by the device itself."""
SIZE_FROM_VALUES = {
    "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount", "equal",
    "_local_scalar_dense",
}  # fmt: skip
"""Tell the host a value or a size that only the device knows."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Take indices from the CPU too, which the host waits for, and masks, whose size only the device knows."""
waits: Counter[str] = Counter()
_library: list[torch.library.Library] = []


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if name.startswith("aten::") and (has_kernel or name in WITHOUT_KEY):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            if name.removeprefix("aten::") not in NATIVE and not _is_view(op) and not base.startswith("set_"):
                library.impl(name.removeprefix("aten::"), _kernel(op, base), "CUDA", allow_override=True)
    for choice in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)
    torch.Tensor.pin_memory = _refuse_to_pin
    for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
        owner.synchronize = _counted(owner.synchronize)
    # Ranks whose memory is the host's meet as those of a CPU do.
    join = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda _, **settings: join("gloo", **settings)


def _is_view(op: Any) -> bool:
    returned = op._schema.returns
    return bool(returned) and any(each.alias_info and not each.alias_info.is_write for each in returned)


def _refuse_to_pin(*_: Any, **__: Any) -> Any:
    raise RuntimeError("memory is pinned, which pays only where something is copied beside computing")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*given: Any, **named: Any) -> Any:
        _wait()
        return function(*given, **named)

    return counting


def _wait() -> None:
    """Notes who waits: the innermost function of Orbit, or else who called it."""
    frame = sys._getframe(1)
    place = "autograd"
    while frame is not None:
        _, found, module = frame.f_code.co_filename.rpartition("orbit_runtime/")
        if found:
            place = f"{module} {frame.f_code.co_name}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    waits[place] += 1
    if fault := json.loads(os.environ.get("PRETENDED_FAULT", "{}")).get(f"{place} {waits[place]}"):
        raise getattr(torch, fault)("CUDA error: out of memory" if "Memory" in fault else "CUDA error: unspecified")
    if file := os.environ.get("PRETENDED_WAITS"):
        # At once: a process that forked may end without a word.
        with open(file, "a") as lines:
            lines.write(f"{place}\n")


def _kernel(op: Any, base: str) -> Callable[..., Any]:
    inner = SPECIAL.get(str(op).removeprefix("aten."), op)
    tells, copies = base in SIZE_FROM_VALUES, base == "copy_"

    def kernel(*given: Any, **named: Any) -> Any:
        device = given[0].device if copies else _device_of(op, base, given, named)
        if tells or (copies and _waits_for_copy(*given, **named)):
            _wait()
        back: dict[int, Tensor] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.is_cuda:
                    return value
                host = _host(value)
                back[id(host)] = value
                return host
            if isinstance(value, list | tuple):
                return [on_host(each) for each in value]
            if isinstance(value, torch.Generator):
                return _host_generator(value)
            return CPU if isinstance(value, torch.device) and value.type == "cuda" else value

        given = tuple(on_host(value) for value in given)
        # A number that torch wrapped in a tensor arrives as a number, and not every operation takes it for one.
        kinds = [str(argument.type) for argument in op._schema.arguments]
        given = tuple(
            torch.tensor(value) if kind == "Tensor" and isinstance(value, int | float) else value
            for value, kind in zip(given, kinds, strict=False)
        )
        named = {name: on_host(value) for name, value in named.items()}
        refilled = [name for name, value in named.items() if name.startswith("out") and id(value) in back]
        for name in refilled:
            # A result may get its size from the operation, and this memory cannot grow.
            target = back[id(named[name])]
            named[name] = torch.empty(0, dtype=target.dtype)
            back[id(named[name])] = target
        with torch._C._AutoDispatchBelowAutograd():
            result = inner(*given, **named)
        for name in refilled:
            target = back[id(named[name])]
            target.resize_(named[name].shape)
            _host(target).copy_(named[name])

        def on_device(value: Any) -> Any:
            if isinstance(value, Tensor):
                return back[id(value)] if id(value) in back else _to_device(value, device) if device else value
            return type(value)(map(on_device, value)) if isinstance(value, list | tuple) else value

        return on_device(result)

    return kernel


def _waits_for_copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Without pinned memory the host waits for what comes from the device, however it is asked for."""
    return to.device.type != source.device.type and (source.is_cuda or not non_blocking)


def _device_of(op: Any, base: str, given: tuple[Any, ...], named: dict[str, Any]) -> torch.device | None:
    """Where the result is. Raises RuntimeError for what a device refuses."""
    found: list[tuple[Tensor, bool]] = []
    """Each tensor, and whether it may be a single value that lies on the CPU."""
    generators = []
    for value in (*given, *named.values()):
        if isinstance(value, Tensor):
            found.append((value, not value.dim()))
        elif isinstance(value, list | tuple):
            in_lists = base.startswith(("_fused", "_foreach"))
            found += [(each, not each.dim() and not in_lists) for each in value if isinstance(each, Tensor)]
        elif isinstance(value, torch.Generator):
            generators.append(value)
    if base in INDEXING:
        indices = [each for each in given[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) or not each.is_cuda for each in indices):
            _wait()
        found = [each for each in found if not any(each[0] is index for index in indices)]
    devices = {each.device for each, may_be_elsewhere in found if each.is_cuda or not may_be_elsewhere}
    if len(devices) > 1:
        listed = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {listed} ({op})")
    device: torch.device | None = next(iter(devices), None) or named.get("device")
    for generator in generators:
        if device is not None and generator.device.type != device.type:
            raise RuntimeError(f"Expected a '{device.type}' generator but found one of '{generator.device}' ({op})")
    return device if device is not None and device.type == "cuda" else None


def _host(x: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU's."""
    storage = x.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=x.dtype).set_(same, x.storage_offset(), x.size(), x.stride())


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    moved = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    _host(moved).copy_(x)
    return moved


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Draws what the generator of the device would draw next, which then goes on."""
    host = torch.Generator().manual_seed(hash((generator.initial_seed(), generator.get_offset())))
    generator.set_offset(generator.get_offset() + 4)
    return host


def _rms_norm_backward(
    dy: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, _: Any
) -> tuple[Tensor, Tensor | None]:
    last, normed = [*range(-len(shape), 0)], x * rstd
    scaled = dy if weight is None else dy * weight
    dx = rstd * (scaled - normed * (scaled * normed).mean(last, keepdim=True))
    return dx, None if weight is None else (dy * normed).reshape(-1, *shape).sum(0)


def _addmm(
    added: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Tensor:
    found = beta * added.to(dtype) + alpha * (a.to(dtype) @ b.to(dtype))
    return found if out is None else out.resize_(found.shape).copy_(found)


SPECIAL: dict[str, Callable[..., Any]] = {
    "mm.dtype": lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype),
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm,
    "bmm.dtype": lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype),
    "_fused_sdp_choice.default": lambda *_, **__: 0,
    "_fused_rms_norm_backward.default": _rms_norm_backward,
}
"""What the CPU lacks, or answers for itself only."""
