"""How an SGLang server with Orbit's plug-in is started: interpreter, module, environment.

Belongs here: what is the same wherever it is started, here or by the agent of another container. Does not belong here:
which arguments follow from a run (`rollout.sglang_server`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orbit_runtime.errors import UnsupportedError

PYTHON_VARIABLE = "ORBIT_SGLANG_PYTHON"
"""Interpreter of the environment that SGLang is installed in; default: this process's own."""
PARENT_VARIABLE = "ORBIT_SGLANG_PARENT"
"""Process that a server ends with."""
AGENT_VARIABLE = "ORBIT_ENGINE_URL"
"""Address of the agent in the engine's container (`server_agent`). If unset, servers are child processes."""
MODULE = "orbit_runtime.sglang_plugin.launch"
INSTALL = (
    "install SGLang beside Orbit (pip install 'orbit-rl[sglang]'), or name the interpreter of an environment that has "
    "it in ORBIT_SGLANG_PYTHON; on a cluster the image is the chart's runs.engineImage or placement.image"
)
"""What to do if SGLang is not installed."""
PINNED_SGLANG = "0.5.23"
"""The version whose source Orbit's plug-in was written against. A hook can fit another one and mean something else."""
VERSION_VARIABLE = "ORBIT_SGLANG_VERSION"
"""`Any`: servers start with any version (`rollout.engineVersion`)."""


def check_version(found: str, *, name: str) -> None:
    """Raises UnsupportedError (78), with both versions, if `found` is not the pinned one.

    Args:
        name: name of the server that runs it.
    """
    if found != PINNED_SGLANG:
        raise UnsupportedError(
            f"{name} runs SGLang {found} with Orbit's plug-in, which is made for SGLang {PINNED_SGLANG}",
            where="spec.rollout.engineVersion",
            fix=f"install sglang=={PINNED_SGLANG}; `engineVersion: Any` goes on with another version, in which nothing "
            "was tested",
        )


def launch_command(arguments: Sequence[str]) -> list[str]:
    return [os.environ.get(PYTHON_VARIABLE) or sys.executable, "-m", MODULE, *arguments]


def launch_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and the server's own variables. The server ends with this process."""
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    fixed = {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **fixed}
