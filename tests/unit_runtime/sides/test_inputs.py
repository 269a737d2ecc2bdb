"""What a reader is told of a download, and how soon a request to stop is honoured. Fetching: `storage/test_hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import StoppedOnRequest, UsageError
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.sides.inputs import Inputs, build_patience, transfer_line
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage.cache import RetryPolicy, Transfer
from orbit_runtime.storage.inputs import code_digest
from orbit_runtime.workers.child.signals import StopFlag
from tests.integration.killing import small_manifest

MIB = 2**20


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str, **facts: Any) -> None:
        self.lines.append(message)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def test_a_line_says_how_much_of_how_much_and_how_long_it_takes() -> None:
    assert transfer_line(Transfer("s3://b/m", 3 * MIB, 12 * MIB, 42.0)) == "s3://b/m: 3.0 of 12.0 MiB, 42 s left"
    assert transfer_line(Transfer("s3://b/m", 12, 12, 0.0)) == "s3://b/m: 12 of 12 bytes"
    assert transfer_line(Transfer("hf://o/n", 0, 2**40, None)) == "hf://o/n: 0.0 of 1024.0 GiB, - left"


def test_a_download_is_told_every_ten_seconds_and_at_its_end_and_bytes_count_as_progress() -> None:
    notes, clock = Notes(), Clock()
    status = LiveStatus("r", clock=clock.monotonic)
    patience = build_patience(
        notes.note,
        status.beat,
        StopFlag(),
        120.0,
        sleep=clock.sleep,
        monotonic=clock.monotonic,
    )
    for second in range(26):
        patience.tell(Transfer("hf://o/n", second * MIB, 25 * MIB, 1.0))
        clock.now += 1
    assert [line.split(" ")[1] for line in notes.lines] == ["0.0", "10.0", "20.0", "25.0"]
    assert status.snapshot()["seconds_since_progress"] == pytest.approx(1.0)
    clock.now += 50
    patience.tell(Transfer("hf://o/n", 25 * MIB, 25 * MIB, 1.0))
    assert status.snapshot()["seconds_since_progress"] == pytest.approx(51.0)


def test_a_pause_ends_with_a_request_to_stop() -> None:
    stop, clock = StopFlag(), Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 101:
            stop.request("SIGTERM")

    patience = build_patience(Notes().note, lambda: None, stop, 120.0, sleep=sleep, monotonic=clock.monotonic)
    with pytest.raises(StoppedOnRequest, match="SIGTERM while waiting for a download"):
        patience.sleep(60.0)
    assert clock.now < 102
    assert patience.stop()


def test_what_ships_with_orbit_is_not_fetched_and_code_comes_first_in_the_search_path(tmp_path: Path) -> None:
    made = small_manifest(steps=1)
    (tmp_path / "mine.py").write_text("x = 1\n")
    made["spec"]["environment"]["code"] = {"uri": str(tmp_path)}
    inputs = Inputs(OrbitRun.model_validate(made).spec, {}, RetryPolicy(), ["beside"])
    assert inputs.prompts(0) is None
    assert inputs.code_digest() is None
    assert inputs.search_path() == [str(tmp_path), "beside"]
    assert inputs.code_digest() == code_digest(tmp_path, "w")
    assert (inputs.model() / "config.json").is_file()
    assert list(inputs.to_json()) == ["spec.environment.code.uri"]


def test_a_digest_of_code_sees_names_and_contents_and_what_a_config_map_hides(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "..data"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.py").write_text("x = 1\n")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(second)
    (mounted / "a.py").symlink_to("..data/a.py")
    assert code_digest(first, "w") == code_digest(mounted, "w")
    (first / "a.py").write_text("x = 2\n")
    changed = code_digest(first, "w")
    assert changed != code_digest(mounted, "w")
    (first / "a.py").rename(first / "b.py")
    assert code_digest(first, "w") != changed
    (tmp_path / "a.zip").write_bytes(b"PK")
    assert code_digest(tmp_path / "a.zip", "w").startswith("sha256:")
    (tmp_path / "empty").mkdir()
    for wrong in ("none", "empty", "first/b.py"):
        with pytest.raises(UsageError):
            code_digest(tmp_path / wrong, "w")
