"""The folder of an evaluation: the settings, every finished sample, and the results.

Belongs here: keeping samples, so that a killed evaluation asks nothing twice; refusing to mix two evaluations.
Does not belong here: playing (`player`), statistics (`summary`).

`evaluation.json`: the settings · `samples/*.jsonl.zst`: samples as they finish, gathered into `samples.jsonl.zst` at
the end · `summary.json`, `report.html`. Files are never appended to: samples that finish while one file is written go
into the next.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.errors import OutputError
from orbit_runtime.evaluation.records import EvalSample, compress_samples, decompress_samples
from orbit_runtime.storage import Execution, NotFound, Store
from orbit_runtime.workers.system import ClosedAtEnd

GATHER_SECONDS = 0.05
"""Shortest time between two files, and so the most that a kill can lose."""
ASKED, GATHERED, PARTS = "evaluation.json", "samples.jsonl.zst", "samples/"

Key = tuple[str, str, str, int]


class Journal(ClosedAtEnd):
    """The samples of one writer. One thread adds samples; another writes all that have arrived at once."""

    def __init__(self, store: Store, execution: Execution, folder: str = "") -> None:
        """Args: folder: folder in the store, with its final `/`; empty for the store itself."""
        self._store = store
        self._execution = execution
        self._folder = folder
        self._samples = {sample.key: sample for sample in read_samples(store, folder)}
        self._waiting: list[EvalSample] = []
        self._parts = 0
        self._failure: Exception | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="orbit-evaluation", daemon=True)
        self._writer.start()

    @property
    def samples(self) -> list[EvalSample]:
        return list(self._samples.values())

    def has(self, key: Key) -> bool:
        """Whether the sample is present. An unanswered one is not: it is asked again."""
        sample = self._samples.get(key)
        return sample is not None and sample.outcome != "unanswered"

    def add(self, sample: EvalSample) -> None:
        """Returns at once. Raises the error that prevented earlier samples from being written."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._samples[sample.key] = sample
            self._waiting.append(sample)
            self._changed.notify()

    def close(self) -> None:
        """Waits until everything added is written. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join()

    def gather(self) -> None:
        """Gathers all samples in one file, in an order independent of which finished first; deletes the small files.

        Raises:
            OrbitError: samples could not be written.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._closing = True
            self._changed.notify()
        # Made while the other thread writes the last samples.
        gathered = compress_samples(sorted(self._samples.values(), key=lambda sample: sample.key))
        self.close()
        if self._failure is not None:
            raise self._failure
        self._execution.check()
        self._store.put(f"{self._folder}{GATHERED}", gathered)
        self._store.delete(self._store.list(f"{self._folder}{PARTS}"))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                taken, self._waiting = self._waiting, []
            if not taken:
                return
            self._parts += 1
            name = f"{self._folder}{PARTS}{self._execution.number:06d}-{self._parts:06d}.jsonl.zst"
            try:
                self._execution.check()
                self._store.put(name, compress_samples(taken))
            except Exception as error:
                # If the writer died unnoticed, every later sample would be lost.
                with self._changed:
                    self._failure = error
                return
            with self._changed:
                # Samples that finish meanwhile share a file: with many in flight, one file each would cost too much.
                self._changed.wait_for(lambda: self._closing, GATHER_SECONDS)


def read_samples(store: Store, folder: str = "") -> list[EvalSample]:
    """Every sample in the folder, once even if it was asked again."""
    found: dict[Key, EvalSample] = {}
    names = [f"{folder}{GATHERED}", *sorted(store.list(f"{folder}{PARTS}"))]
    for name in names:
        try:
            data = store.get(name)
        except NotFound:
            continue
        found |= {sample.key: sample for sample in decompress_samples(data, where=f"{store.uri}/{name}")}
    return list(found.values())


def read_settings(store: Store, folder: str = "") -> dict[str, Any] | None:
    """The settings of the evaluation in this folder; None if there is none."""
    try:
        return dict(json.loads(store.get(f"{folder}{ASKED}")))
    except NotFound:
        return None
    except ValueError:
        raise OutputError(f"{ASKED} is not JSON", where=store.uri, fix="choose another --out") from None


def save_settings(
    store: Store, settings: Mapping[str, Any], subjects: Mapping[str, Mapping[str, Any]], folder: str = ""
) -> None:
    """Writes the settings, merged with existing ones: only further models may be added to an evaluation.

    Args:
        settings: environments, prompts and sampling, by name, with digests of their inputs.
        subjects: model → its identity, with digests.

    Raises:
        OutputError: the folder has samples for other settings, or for another model under the same name.
    """
    before = read_settings(store, folder)
    if before is not None:
        changed = _differences(before["settings"], settings)
        known = before["subjects"]
        for name in subjects:
            changed += _differences(known.get(name, subjects[name]), subjects[name], f"{name}: ")
        if changed:
            raise OutputError(
                "the samples in this folder were made with other settings:"
                + "".join(f"\n  {line}" for line in changed),
                where=store.uri,
                fix="restore them to continue, or choose another --out for a new evaluation",
            )
        subjects = {**known, **subjects}
    content = {"settings": settings, "subjects": subjects}
    store.put(f"{folder}{ASKED}", json.dumps(content, indent=1, sort_keys=True).encode())


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], before: str = "") -> list[str]:
    flat_old, flat_new = _flatten(old), _flatten(new)
    return [
        f"{before}{name}: {_short(flat_old.get(name))} then, {_short(flat_new.get(name))} now"
        for name in sorted({*flat_old, *flat_new})
        if flat_old.get(name) != flat_new.get(name)
    ]


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        pairs: Sequence[tuple[str, Any]] = [
            (f"{path}.{key}" if path else str(key), each) for key, each in value.items()
        ]
    elif isinstance(value, list | tuple):
        pairs = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, each in pairs for name, leaf in _flatten(each, key).items()}


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:19]}…"
