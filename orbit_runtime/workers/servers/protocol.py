"""What Orbit and its plug-in in an SGLang server agree on: environment variables, fields of answers, files of requests.

Belongs here: names, versions, and the counter of requests; every process of SGLang imports it. Does not belong here:
writing requests (`rollout.taps`), answering them (`sglang_plugin`), the tickets of adapters (`adapters.ticket`).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ORBIT_SGLANG"
"""The plug-in is active only if it is set."""
OFT_VARIABLE = "ORBIT_SGLANG_OFT_BLOCK_SIZE"
EXPERTS_VARIABLE = "ORBIT_SGLANG_EXPERTS"
WEIGHT_ONLY_VARIABLE = "ORBIT_SGLANG_WEIGHT_ONLY"
TAPS_VARIABLE = "ORBIT_SGLANG_TAPS"

STATE_KEY = "orbit"
"""Key of the plug-in's facts in each internal state that `/server_info` reports."""
FACTS_VERSION = 4
"""Version of these facts; a client that expects another one refuses them."""
APPLIED_KEY = "orbit_adapter"
"""Key in `meta_info`: a list whose last entry is the name of the adapter in the slot that a token was sampled from;
empty for the bare base."""
EXPLAIN_FILE = "explain"
"""Put beside an adapter's files by a client that requests a description of how they differ from the slot."""

REQUEST, SEEN, ANSWER = "request.json", "seen-{rank}", "answer-{rank}.safetensors"
FACTS_REQUEST, FACTS, TOLD = "facts-request.json", "facts-{name}.json", "told-{name}-{rank}"
LOOK_SECONDS = 0.001

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The settings that the plug-in reads from its server's environment."""

    oft_block_size: int = 0
    """0 if the server does not serve OFT: its buffers are allocated before the first adapter is known."""
    experts: str = ""
    """The layout of routed experts' adapters, `None` if they have none; if empty, SGLang is not modified."""
    weight_only: bool = False
    """Whether activations must not be rounded where SGLang has no setting of its own for that."""
    taps: str = ""
    """The folder of requests about passes; empty if none can be made."""


def read_settings(environment: Mapping[str, str]) -> PluginSettings:
    """Raises ValueError for a value that no run sets."""
    size, experts = environment.get(OFT_VARIABLE) or "0", environment.get(EXPERTS_VARIABLE, "")
    if not size.isdecimal():
        raise ValueError(f"{OFT_VARIABLE} is {size!r}, not a number")
    if experts not in ("", "None", "Shared", "SharedOuter", "PerExpert"):
        raise ValueError(f"{EXPERTS_VARIABLE} is {experts!r}, not a layout of experts' adapters")
    weight_only, taps = bool(environment.get(WEIGHT_ONLY_VARIABLE)), environment.get(TAPS_VARIABLE, "")
    return PluginSettings(int(size), experts, weight_only, taps)


def announce(folder: Path) -> None:
    """Call when requests in the folder have changed, and before the pass that they are about is requested."""
    with open_counter(folder) as counter:
        counter[:] = time.monotonic_ns().to_bytes(_COUNT_BYTES, "little")


def open_counter(folder: str | Path) -> mmap.mmap:
    """Memory of both sides that changes with each announcement."""
    file = os.open(f"{folder}.count", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, _COUNT_BYTES)
        return mmap.mmap(file, _COUNT_BYTES)
    finally:
        os.close(file)


def write_whole(file: Path, content: bytes) -> None:
    """Complete under its name, or absent: a partly written file is never read."""
    # Every rank of a server writes to the folder.
    written = file.with_suffix(f".{os.getpid()}.part")
    written.write_bytes(content)
    written.rename(file)
