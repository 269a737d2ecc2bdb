"""Reports which adapter sampled a completion's tokens, together with the tokens.

Belongs here: recording the adapter that a batch was prepared with, and adding it to SGLang's response. Does not belong
here: the contents of the slots (`readback`).

SGLang's responses name no adapter. A client that relied on its own request alone would record the wrong policy version
if the server applied another slot, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KEY = "orbit_adapter"
"""Key in `meta_info`: a list whose last entry is the adapter's name; empty for the bare base."""
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
BASE = ""
_applied: dict[str, str] = {}
"""Adapter name by SGLang's id, from its newest batch. Has one entry for every adapter ever published."""


def hooks() -> list[tuple[str, Any, str]]:
    return [(f"{STREAMER}.build_additional_customized_info", _add, "AROUND")]


def note_batch(manager: Any, adapters: Iterable[str]) -> None:
    """Call after SGLang chose the slots of a batch: an id counts as applied if its slot holds it."""
    if not _applied:
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

        SchedulerOutputStreamer.has_additional_customized_info = True
        _applied[BASE] = ""
    pool = manager.memory_pool
    for each in set(adapters):
        slot = pool.uid_to_buffer_id.get(each)
        is_held = slot is not None and pool.buffer_id_to_uid[slot] == each and each in manager.lora_refs
        _applied[each] = manager.lora_refs[each].lora_name if is_held else ""


def _add(original: Any, streamer: Any, reqs: Sequence[Any]) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = original(streamer, reqs)
    return {**told, KEY: [[_applied.get(req.lora_id or BASE, "")] for req in reqs]}
