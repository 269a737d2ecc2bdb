"""Which adapter sampled a completion's tokens, told with the tokens themselves.

Belongs here: noting what a batch was prepared with, and adding it to what SGLang answers. Does not belong here: what
stands in the slots (`readback`).

SGLang's answers name no adapter. A client that only believed its own request would carry the wrong policy version
where the server applied another slot, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KEY = "orbit_adapter"
"""In `meta_info`: a list, its last entry the adapter's name; empty text: the bare base."""
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
BASE = ""
_applied: dict[str, str] = {}
"""Adapter's name by SGLang's id, of the newest batch with it. As many entries as adapters were ever published."""


def hooks() -> list[tuple[str, Any, str]]:
    return [(f"{STREAMER}.build_additional_customized_info", _add, "AROUND")]


def note_batch(manager: Any, adapters: Iterable[str]) -> None:
    """After SGLang chose the slots of a batch: an id counts as applied where its slot holds it."""
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
