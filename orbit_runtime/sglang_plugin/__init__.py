"""What SGLang loads into its own processes: the read-back that proves an adapter live, OFT, and support for CPUs.

Belongs here: the only code that imports SGLang. Does not belong here: the client of the server (`rollout.sglang_api`).
Of Orbit it imports only the adapters' maths, files and digests.

SGLang finds `activate` as an entry point of `sglang.srt.plugins`; `launch` calls it too, so a server started by Orbit
has it however it is installed. It does nothing unless `ORBIT_SGLANG` is set in the environment.
"""

from __future__ import annotations

import os

VARIABLE = "ORBIT_SGLANG"
"""Set by Orbit for the servers that it starts; the plug-in is active only then."""
OFT_VARIABLE = "ORBIT_SGLANG_OFT_BLOCK_SIZE"
"""Set if the server must serve OFT: its buffers are allocated before the first adapter is known."""

EXPERTS_VARIABLE = "ORBIT_SGLANG_EXPERTS"
"""The layout of routed experts' adapters, `None` if they have none; if unset, SGLang is not modified."""
WEIGHT_ONLY_VARIABLE = "ORBIT_SGLANG_WEIGHT_ONLY"
"""Set if activations must not be rounded where SGLang has no setting of its own for that."""


def activate() -> None:
    """Registers the hooks with SGLang. Safe to call twice."""
    if os.environ.get(VARIABLE):
        from orbit_runtime.sglang_plugin.hooks import register

        register(int(os.environ.get(OFT_VARIABLE) or 0), os.environ.get(EXPERTS_VARIABLE, ""))
