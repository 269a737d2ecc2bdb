"""The plug-in in SGLang's own processes: the read-back that proves an adapter live, OFT, and support for CPUs.

Belongs here: the only code that imports SGLang. Does not belong here: the client of the server (`rollout.sglang_api`).
Of Orbit it imports only the adapters' maths, files and digests.

SGLang finds `activate` as an entry point of `sglang.srt.plugins`; `launch` calls it too, so a server started by Orbit
has it however it is installed. It does nothing unless `ORBIT_SGLANG` is set in the environment.
"""

from __future__ import annotations

import os

from orbit_runtime.workers.servers.protocol import VARIABLE, read_settings


def activate() -> None:
    """Registers the hooks with SGLang. Safe to call twice."""
    if os.environ.get(VARIABLE):
        from orbit_runtime.sglang_plugin.hooks import register

        register(read_settings(os.environ))
