"""The Megatron trainer as the loop sees it: a `Trainer` that calls a group of ranks.

Belongs here: files and digests of an adapter that ranks hold in parts. Does not belong here: the work of a rank
(`rank`), the processes (`workers`). Nothing here imports Megatron-Core.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections import ChainMap
from collections.abc import Buffer, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.adapters.buffer import AdapterBuffer, opening_of, read_place, write_place
from orbit_runtime.adapters.files import (
    CONFIG_FILE,
    MODEL_FILE,
    PEFT_PREFIX,
    ROTATIONS_FILE,
    digest_applied,
    join_tensors,
    published_scaling,
)
from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.adapters.state import config_json, join_differences, published_tensors
from orbit_runtime.digests import PIECE_BYTES, Piece, Pieces, cut, hash_pieces, tree_digest
from orbit_runtime.errors import GateError, InternalError
from orbit_runtime.policy.facts import PolicyFacts, join_facts
from orbit_runtime.policy.snapshot import Snapshot
from orbit_runtime.training.megatron.outline import (
    WINDOW_BYTES,
    DividedFile,
    FileWindow,
    HeldParameter,
    Holder,
    Outline,
    TensorEntry,
    What,
    build_divided,
    held_runs,
    layer_of,
    master_keys,
    split_entries,
    whole_shape,
)
from orbit_runtime.training.megatron.packed_tensors import receive, send
from orbit_runtime.training.megatron.rank import RankScore, TrainerRankFacts
from orbit_runtime.training.megatron.rank_parameters import WindowResult
from orbit_runtime.training.megatron.snapshots import RankSnapshot, join_snapshots
from orbit_runtime.training.state import CRITIC_PART, MOMENTS, PART, parse_state
from orbit_runtime.types import (
    AdapterManifest,
    AdapterMemory,
    AdapterSink,
    Computed,
    Probe,
    Sample,
    Scored,
    StateWriter,
    UpdateResult,
)
from orbit_runtime.workers.child.heartbeat import STALL_SECONDS
from orbit_runtime.workers.ranks.group import RankGroup

WINDOW = "window"
SHARED_WINDOWS = 16
"""Windows of a large file that ranks write where it is read: enough to hash one while they write the next."""
PARTS: Mapping[Holder, str] = {"policy": PART, "critic": CRITIC_PART}
"""Owner → name of its state in a checkpoint."""


def check_copies(
    outlines: Sequence[Outline], found: Sequence[Mapping[str, Pieces | tuple[Pieces, ...]]], of: str = ""
) -> None:
    """One of the ranks that hold a part publishes it and keeps it, so the others must hold the same values.

    Args:
        found: rank by rank, the pieces of its parameters.
        of: whose parameters they are, for the message.

    Raises:
        GateError: two ranks differ; the message names them and the tensor.
    """
    first: dict[tuple[str, WeightPart | None], tuple[int, Pieces | tuple[Pieces, ...]]] = {}
    for rank, (outline, held) in enumerate(zip(outlines, found, strict=True)):
        for key, applied in held.items():
            place = outline[key].place
            other, pieces = first.setdefault((key, None if place.is_whole else place.part), (rank, applied))
            if pieces != applied:
                raise GateError(
                    f"ranks {other} and {rank} hold different values of {of}{key}: one of them is stale or damaged",
                    where="trainer",
                    fix="resume from the last checkpoint; where it comes again, test the memory of that device",
                )


class MegatronTrainer:
    """A `Trainer` over ranks. What it saves or publishes does not depend on how the model is divided."""

    def __init__(self, ranks: RankGroup, base_model: str) -> None:
        """
        Args:
            ranks: each holds a `MegatronRank`.
            base_model: name recorded in the published `adapter_config.json`.
        """
        self._ranks = ranks
        self._base_model = base_model
        self._turn = threading.Lock()
        """Held during a call to the ranks: another thread reads a checkpoint while the next step runs."""
        facts: list[TrainerRankFacts] = self._call("facts")
        self._sizes = facts[0].sizes
        stage = len(facts) // self._sizes.pipeline
        self.facts: PolicyFacts = join_facts([each.policy for each in facts[::stage]])
        self._config = self.facts.adapter
        self._outlines = [each.outline for each in facts]
        self._critic_outlines = [each.critic for each in facts]
        self.outline: Mapping[str, HeldParameter] = ChainMap(*[dict(outline) for outline in self._outlines])
        self._is_shared = False
        """Whether every rank was able to write to this machine's memory when it last had to."""
        self._outline_of: dict[Holder, Outline] = {"policy": self.outline}
        if facts[-1].critic:
            self._outline_of["critic"] = ChainMap(*map(dict, self._critic_outlines))
        self._reader: StateWriter | None = None
        """Writer that may still be reading masters and moments."""

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        self._let_be_read()
        results = self._call("update", tuple(samples_D))
        return results[0]  # type: ignore[no-any-return]

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> list[array[float]]:
        # Ranks hold no second adapter, so the teacher is the base.
        asked = "reference" if name == "teacher" else name
        columns = ChainMap(*self._call("column", asked, tuple(samples_D)))
        return [columns[index] for index in range(len(samples_D))]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        with self._turn:
            # Ranks report every layer that they begin. A collective's timeout is shorter, and its error more specific.
            return list(self._ranks.call(method, *arguments, patience=STALL_SECONDS))

    # --- publishing and proof ---

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        """Every rank writes its parts where the sink's files lie; of ranks on other machines they come through this
        process, a window at a time."""
        if self._config.type == "OFT":
            self._call("prepare_publish")
        settings = config_json(self._config, self._base_model)
        found = {CONFIG_FILE: sink.write(CONFIG_FILE, len(settings), cut(settings))}
        for name, file in self._files.items():
            found[name] = sink.fill(name, file.sizes, self._write(file, sink, name))
        return AdapterManifest(found)

    @cached_property
    def _files(self) -> dict[str, DividedFile]:
        # Made once: with experts it has 100,000 tensors and more.
        if self._config.type == "LoRA":
            return {MODEL_FILE: build_divided(map(_in_peft, self._entries("lora")), torch.bfloat16)}
        parameters, turned = map(_in_peft, self._entries("master")), self._entries("rotations")
        return {
            MODEL_FILE: build_divided(parameters, torch.float32),
            ROTATIONS_FILE: build_divided(turned, torch.bfloat16),
        }

    def _write(self, file: DividedFile, sink: AdapterSink, name: str) -> Iterator[int]:
        start, size = sink.places[name]
        write_place(sink.descriptor, memoryview(file.header), start, start + size)
        yield len(file.header)
        limit = max(WINDOW_BYTES, size // SHARED_WINDOWS) if self._is_shared else WINDOW_BYTES
        for window in file.windows(limit):
            if not self._fill(window, file.dtype, sink, start + window.start):
                raise InternalError(f"a rank holds other sizes than it told, from {window.spots[0].key} on")
            yield window.start + window.size

    def _fill(self, window: FileWindow, dtype: torch.dtype, memory: AdapterMemory, start: int) -> bool:
        """Whether the ranks' values are exact in `dtype` and have the expected shapes.

        Raises:
            InternalError: the ranks' parts are not the whole window.
        """
        filled: list[WindowResult] = self._call("fill", window, dtype, opening_of(memory), start)
        self._is_shared = not any(one.sent for one in filled)
        for position, data in (each for one in filled for each in one.sent):
            write_place(memory.descriptor, memoryview(data), start + position, start + window.size)
        is_exact = all(each.is_exact for each in filled)
        written = sum(each.bytes for each in filled)
        if is_exact and written != window.size:
            raise InternalError(f"the ranks wrote {written} bytes of {window.size}, from {window.spots[0].key} on")
        return is_exact

    def _read(self, window: FileWindow, dtype: torch.dtype) -> Buffer | None:
        """A window's bytes, in memory of its own; None if they are not exact."""
        memory = AdapterBuffer()
        start = memory.allot(WINDOW, window.size)
        return read_place(memory.descriptor, start, window.size) if self._fill(window, dtype, memory, start) else None

    def _entries(self, what: What) -> list[TensorEntry]:
        """Entries of every layer. Applied values are read from each layer itself, everything else from its owner."""
        entries = []
        for key, held in self.outline.items():
            kind = key.rpartition(".")[2]
            source = key if what == "applied" else f"{held.owner}.{kind}"
            entries += split_entries(what, key, source, held, whole_shape(what, held, self._config))
        return entries

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        results: list[RankScore] = self._call("score", tuple(token_ids_T))
        check_copies(self._outlines, [each.applied for each in results])
        check_copies(self._critic_outlines, [each.critic for each in results], "the critic's ")
        is_whole = all(
            outline.keys() == each.applied.keys() for outline, each in zip(self._outlines, results, strict=True)
        )
        # From the last stage, which alone has the output layer.
        last = results[-1]
        scalings = frozenset[float | None]().union(*(each.scalings for each in results))
        return (
            Scored(
                (0.0, *last.adapted),
                # A digest of only some tensors cannot match the published one: `explain` reports the difference
                # instead.
                self._applied_digest(results, scalings) if is_whole else None,
                top_T=(-1, *last.adapted_top),
            ),
            Scored((0.0, *last.base), None, top_T=(-1, *last.base_top)),
        )

    def explain(self, files: Mapping[str, Buffer]) -> str:
        """Differences between the values that the newest `score` applied and the published ones, rank by rank; empty if
        there are none.

        Sends every rank whole layers, one after another; each rank compares its part.

        Example: `rank 1: model.layers.1.mlp.down_proj.lora_A is zero (1 of 28 tensors differs)`
        """
        published, scaling = published_tensors(files), published_scaling(files)
        told: list[list[str]] = [[] for _ in self._outlines]
        for _, group in groupby(sorted(self.outline), key=layer_of):
            values = {key: join_tensors(self.outline[key].file_names, published) for key in group}
            for sentences, found in zip(told, self._call("explain", send(values), scaling), strict=True):
                sentences += found
        return "; ".join(
            f"rank {rank}: {join_differences(sentences, len(outline))}"
            for rank, (sentences, outline) in enumerate(zip(told, self._outlines, strict=True))
            if sentences
        )

    @cached_property
    def _applied_entries(self) -> list[TensorEntry]:
        return self._entries("applied")

    def _applied_digest(self, results: Sequence[RankScore], scalings: frozenset[float | None]) -> str | None:
        entries = self._applied_entries
        by_name = self._hashed_whole(results)
        file = build_divided([entry for entry in entries if entry.name not in by_name], torch.bfloat16)
        found: list[Piece] = []
        for window in file.windows():
            data = self._read(window, file.dtype)
            if data is None:
                return None
            found += hash_pieces(cut(data, window.pieces))
        pieces = iter(found)
        for entry, size in zip(file.entries, file.sizes[1:], strict=True):
            by_name[entry.name] = tuple(islice(pieces, -(-size // PIECE_BYTES)))
        return digest_applied({entry.name: entry.shape for entry in entries}, by_name, scalings)

    def _hashed_whole(self, results: Sequence[RankScore]) -> dict[str, Pieces]:
        """Pieces of the applied tensors that one rank holds whole, as experts are where they are divided among ranks:
        that rank has hashed them."""
        found: dict[str, Pieces] = {}
        for outline, result in zip(self._outlines, results, strict=True):
            for key, tensors in result.applied.items():
                held = outline[key]
                by_row = len(held.file_names) > 1
                runs = held_runs("applied", held, self._config, by_row=by_row)
                shape = whole_shape("applied", held, self._config)
                if runs.num_values == math.prod(shape[1:] if by_row else shape):
                    names = held.file_names if runs.rows is None else [held.file_names[row] for row in runs.rows]
                    found |= dict(zip(names, tensors, strict=True))
        return found

    @contextmanager
    def probing(self, probe: Probe, seed: int) -> Iterator[None]:
        """Like `Masters.probing`, on every rank."""
        self._call("begin_probing", probe, seed)
        try:
            yield
        finally:
            self._call("end_probing")

    def snapshot(
        self,
        token_ids_T: Sequence[int],
        adapter: str | None,
        files: Mapping[str, Buffer],
        *,
        copies: int = 1,
        routed_TLC: np.ndarray | None = None,
    ) -> Snapshot:
        """Like `policy.snapshot.take_snapshot`."""
        tokens, applied = tuple(token_ids_T), adapter is not None
        parts: list[RankSnapshot] = self._call("snapshot", tokens, applied, copies, routed_TLC)
        found = join_snapshots(parts, self._sizes, len(tokens) - 1, files if applied else {}, self._base_values)
        return replace(found, routed_TLC=routed_TLC)

    def _base_values(self, holders: Mapping[str, Sequence[int]]) -> dict[str, list[Tensor]]:
        values = [receive(each) for each in self._call("base_values", holders)]
        return {name: [values[rank][name] for rank in ranks] for name, ranks in holders.items()}

    def base_digest(self) -> str:
        """`tree:…` over each rank's part of the base; it depends on how the model is divided."""
        titles = {f"rank {rank}": digest for rank, digest in enumerate(self._call("base_digest"))}
        return tree_digest(
            {name: (Piece(len(digest), sha256(digest.encode()).hexdigest()),) for name, digest in titles.items()}
        )

    # --- checkpoint ---

    def save_state(self, writer: StateWriter) -> None:
        self._let_be_read()
        for holder in self._outline_of:
            file = self._state_file(holder, self._call("counters", holder)[0])
            writer.write(PARTS[holder], sum(file.sizes), partial(self._pieces, file))
        self._reader = writer

    def _state_file(self, holder: Holder, counters: Mapping[str, int]) -> DividedFile:
        kinds: tuple[What, ...] = ("master", *(MOMENTS if counters["updates"] else ()))
        outline = self._outline_of[holder]
        entries = [
            TensorEntry(f"{what}/{key}", what, key, None, outline[key].place.shape)
            for what in kinds
            for key in master_keys(outline)
        ]
        return build_divided(entries, torch.float32, {"counters": json.dumps(counters, sort_keys=True)}, holder)

    def _pieces(self, file: DividedFile) -> Iterator[Buffer]:
        yield file.header
        for window in file.windows():
            data = self._read(window, file.dtype)
            assert data is not None, "masters and moments are not rounded"
            yield from cut(data, window.pieces)

    def _let_be_read(self) -> None:
        """Call before masters or moments change: a checkpoint written during this step needs the old values."""
        if self._reader is not None:
            self._reader.wait()
            self._reader = None

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        self._let_be_read()
        for holder, outline in self._outline_of.items():
            # A run that starts from another run's adapter may have a critic although that run had none.
            if holder == "policy" or PARTS[holder] in parts:
                self._load_part(holder, outline, parts[PARTS[holder]])

    def _load_part(self, holder: Holder, outline: Outline, part: Buffer) -> None:
        """Writes one window after another to memory from which every rank reads its parts."""
        _, counters = parse_state(part, {key: outline[key].place.shape for key in master_keys(outline)})
        file, data = self._state_file(holder, counters), memoryview(part).cast("B")
        # Behind the header tensors lie as they would be written now.
        values = data[data.nbytes - sum(file.sizes[1:]) :]
        for window in file.windows():
            first = window.start - len(file.header)
            self._give(window, values[first : first + window.size])
        self._call("set_counters", holder, counters)

    def _give(self, window: FileWindow, data: memoryview) -> None:
        memory = AdapterBuffer()
        start, opening = memory.reserve(WINDOW, window.size), opening_of(memory)
        write_place(memory.descriptor, data, start, window.size)
        if not all(self._call("take", window, opening, start, None)):
            self._call("take", window, opening, start, bytes(data))


def _in_peft(entry: TensorEntry) -> TensorEntry:
    return TensorEntry(f"{PEFT_PREFIX}{entry.name}.weight", entry.what, entry.key, entry.index, entry.shape)
