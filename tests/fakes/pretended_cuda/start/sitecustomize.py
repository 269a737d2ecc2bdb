"""In the path of a process with a pretended device: torch has the device from its import on."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class TorchFinder(MetaPathFinder):
    """Loads the pretended runtime before torch, and torch's kernels for it after torch. Stays: who only asks whether
    torch is there finds it here as well."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        ctypes.CDLL(os.environ["PRETENDED_RUNTIME"], ctypes.RTLD_GLOBAL)
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: Any) -> None:
                execute(module)
                from tests.fakes.pretended_cuda.device import install

                install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


if "PRETENDED_RUNTIME" in os.environ:
    sys.meta_path.insert(0, TorchFinder())
