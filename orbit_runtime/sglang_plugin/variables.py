"""Environment variables of the servers that Orbit starts, which the plug-in reads."""

from __future__ import annotations

VARIABLE = "ORBIT_SGLANG"
"""The plug-in is active only if it is set."""
OFT_VARIABLE = "ORBIT_SGLANG_OFT_BLOCK_SIZE"
"""Set if the server must serve OFT: its buffers are allocated before the first adapter is known."""
EXPERTS_VARIABLE = "ORBIT_SGLANG_EXPERTS"
"""The layout of routed experts' adapters, `None` if they have none; if unset, SGLang is not modified."""
WEIGHT_ONLY_VARIABLE = "ORBIT_SGLANG_WEIGHT_ONLY"
"""Set if activations must not be rounded where SGLang has no setting of its own for that."""
TAPS_VARIABLE = "ORBIT_SGLANG_TAPS"
"""Names the folder of requests about passes."""
