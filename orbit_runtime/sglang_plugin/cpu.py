"""Makes SGLang start from its ordinary wheels without a GPU.

Those wheels contain compiled CUDA code. A text model on `--device cpu` calls none of it, but importing SGLang refers to
it, so it is replaced by stand-ins that raise when anything in them is called.

DeepSeek's latent attention is then computed over the latents, for prompts too: SGLang's attention in plain torch reads
keys and values from the cache, which holds nothing else.

Belongs here: stand-ins for compiled packages, and the code paths of SGLang that are used without them.
Does not belong here: the start of a server (`launch`).
Not for machines with a GPU, where the real packages are imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

KERNELS = "sgl_kernel"
OPTIONAL = ("torchvision", "soundfile", "gguf")
"""Packages for images, audio and another file format, which SGLang imports for every model."""
PINNED = ("tensor", "empty", "zeros", "ones", "arange", "full", "empty_like", "zeros_like")


def install() -> None:
    """Installs the stand-ins. Call before anything of SGLang is imported, in every process."""
    import torch

    if torch.cuda.is_available() or KERNELS in sys.modules:
        return
    sys.modules[KERNELS] = _Kernels(KERNELS)
    missing = tuple(name for name in OPTIONAL if not _is_installed(name))
    if missing:
        _remember_absence()
        sys.meta_path.append(_Finder(missing))
    for name in PINNED:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    find = torch.get_device_module
    # A torch built for CUDA reports CUDA as the device of every machine.
    torch.get_device_module = lambda device=None: torch.cpu if device is None else find(device)
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def hooks() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) of each hook."""
    if KERNELS in sys.modules and isinstance(sys.modules[KERNELS], _Kernels):
        registry = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"
        yield f"{registry}.get_handler", _attend_to_latents, "AROUND"
        # SGLang keeps tokens' experts in memory pinned for a GPU, whatever the device is.
        yield "sglang.srt.mem_cache.pool_host.common._cuda_host_register", _leave_unpinned, "AROUND"
        yield "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes", _fork_children, "AROUND"
        yield "sglang.srt.lora.backend.base_backend._compute_moe_lora_info", _cover_all_tokens, "AROUND"


def _leave_unpinned(original: Callable[..., Any], *_: Any, **__: Any) -> None:
    """Rejects the request; requests for torch's own pinned memory are rejected in the same way (`_unpinned`)."""


def _cover_all_tokens(original: Callable[..., Any], num_tokens: int, *values: Any, max_len: int, **named: Any) -> Any:
    """SGLang checks the grid of a kernel that runs on GPUs only. Its LoRA in plain torch joins neighbours with the same
    adapter to one segment, longer than any sequence: 257 tokens of experts with LoRA ended the server."""
    return original(num_tokens, *values, max_len=max(max_len, num_tokens), **named)


def _fork_children(original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """SGLang spawns its children, because CUDA does not survive a fork, and each imports everything again: 20 seconds
    of a core. Here nothing was computed before."""
    multiprocessing.set_start_method("fork", force=True)
    return original(*values, **named)


def _attend_to_latents(original: Callable[..., Any], registry: Any, backend: str) -> Any:
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


class _Kernels(types.ModuleType):
    """`sgl_kernel` without kernels: every name is a function that raises an error saying so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = "<stand-in>"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{KERNELS}.{name} needs a GPU")

        missing.__name__ = name
        setattr(self, name, missing)
        return missing


class _Named(type):
    """Classes with every attribute: its value is the attribute's name, as for enumerations of the real packages."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(metaclass=_Named):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("this package is not installed; a text model does not need it")

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (_Absent,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.split(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _remember_absence() -> None:
    """transformers checks once whether these are installed; if it checked after the stand-ins, it would find them."""
    from transformers.utils import import_utils

    for name in (*OPTIONAL, "torchvision_v2"):
        ask = getattr(import_utils, f"is_{name}_available", None)
        if ask:
            ask()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Memory is pinned for a GPU; without one the request would fail."""

    @functools.wraps(function)
    def without(*values: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return function(*values, **named)

    return without
