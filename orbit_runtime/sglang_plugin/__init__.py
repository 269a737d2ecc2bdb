"""What SGLang loads into its own processes: the read-back that proves an adapter live, OFT, and what a CPU needs.

Belongs here: the only code that imports SGLang. Does not belong here: the client of the server (`rollout.sglang_api`).
Imports of Orbit: the adapters' maths, files and digests, nothing else.

SGLang finds `activate` as an entry point of `sglang.srt.plugins`; `launch` calls it as well, so that a server that
Orbit starts has it however it is installed. Without `ORBIT_SGLANG` in the environment it does nothing.
"""

from __future__ import annotations

import os

VARIABLE = "ORBIT_SGLANG"
"""Set by Orbit for the servers it starts; only then does the plug-in act."""
OFT_VARIABLE = "ORBIT_SGLANG_OFT_BLOCK_SIZE"
"""Set where the server is to serve OFT: its buffers are allocated before the first adapter is known."""

EXPERTS_VARIABLE = "ORBIT_SGLANG_EXPERTS"
"""How the adapters of routed experts are laid out, `None` without such; where it is not set, SGLang is left alone."""


def activate() -> None:
    """Registers the hooks with SGLang; safe to call twice."""
    if os.environ.get(VARIABLE):
        from orbit_runtime.sglang_plugin.hooks import register

        register(int(os.environ.get(OFT_VARIABLE) or 0), os.environ.get(EXPERTS_VARIABLE, ""))
