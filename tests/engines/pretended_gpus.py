"""What SGLang makes of command lines on GPUs that this machine does not have: its own reading and resolving of
arguments over a pretended machine.

    PYTHONPATH=… <SGLang's python> tests/engines/pretended_gpus.py ASKED.json

A fake: torch is made to answer as if it counted eight GPUs of one kind, and everything after that is SGLang's own code.
No kernel is compiled, no weight is loaded and nothing is computed, so a combination that SGLang accepts here may still
fail when it runs. Belongs here: pretending and asking. Does not belong here: any expectation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(asked: dict[str, Any]) -> None:
    """Each case in a process of its own: SGLang keeps what it resolved, and sets variables."""
    from orbit_runtime.sglang_plugin import activate, cpu
    from orbit_runtime.workers.servers.protocol import VARIABLE

    cpu.install()
    os.environ[VARIABLE] = "1"
    os.environ["SGLANG_PLUGINS"] = "orbit"
    activate()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # Before the pretence: their kernels are imported where there is a GPU.
    import sglang.srt.arg_groups.pipeline
    import sglang.srt.configs.model_config
    import sglang.srt.server_args  # noqa: F401
    from sglang.srt.layers import quantization

    # Only where it was imported beside a GPU.
    quantization.QUANTIZATION_METHODS.setdefault("mxfp4", quantization.Mxfp4Config)
    pretend(asked["gpu"])
    told: dict[str, Any] = {}
    for name, case in asked["cases"].items():
        answer = Path(asked["told"]).with_suffix(".part")
        child = os.fork()
        if child == 0:
            os.environ.update(case["variables"])
            answer.write_text(json.dumps(resolve(case["arguments"])))
            os._exit(0)
        os.waitpid(child, 0)
        told[name] = json.loads(answer.read_text())
    Path(asked["told"]).write_text(json.dumps(told))


def pretend(gpu: dict[str, Any]) -> None:
    """Makes torch answer for eight GPUs. Args: gpu: `name`, `capability` (major, minor), `bytes`, `processors`."""
    import torch

    capability, size = tuple(gpu["capability"]), gpu["bytes"]
    properties = SimpleNamespace(
        name=gpu["name"], total_memory=size, multi_processor_count=gpu["processors"], is_integrated=False,
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=232448, warp_size=32,
    )  # fmt: skip
    torch.version.cuda = torch.version.cuda or "12.9"
    answers: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 8,
        "current_device": lambda: 0, "get_device_name": lambda *_: gpu["name"],
        "get_device_capability": lambda *_: capability, "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (size, size), "empty_cache": lambda: None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    from sglang.srt.utils import common

    for probe in vars(common).values():
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()


def resolve(arguments: list[str]) -> dict[str, Any]:
    """Resolves arguments as a server does before it opens weights: `resolved` ones, or the `error` and where it was
    raised.
    """
    try:
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.server_args import prepare_server_args

        found = prepare_server_args(arguments)
        # As `sglang_plugin.launch` does.
        found.enable_multimodal = False
        found.resolve_once()
        found.check_server_args()
        view = resolved_view(found)
        names = [field.name for field in record_fields(type(found))]
        return {"resolved": {name: plain(getattr(view, name)) for name in names}}
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "error": f"{type(error).__name__}: {error}",
            "at": f"{Path(frame.filename).name}:{frame.lineno}",
            "trace": traceback.format_exc()[-3000:],
        }


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
