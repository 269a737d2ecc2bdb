"""A run whose memory runs out ends with 79, and says in which stage."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import OutOfMemoryError
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.storage import newest_readable, open_store
from tests.integration.killing import small_manifest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """This process gets no more than 64 GiB of addresses: a kernel that overcommits (a kubelet sets that)
    would kill it instead."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_a_sequence_that_is_too_long_is_told_with_the_field_to_lower(tmp_path: Path) -> None:
    """`orbit run` would have refused it: from Python nothing is planned first."""
    spec = load_manifest(
        QUICKSTART,
        [
            "spec.training.steps=1", "spec.model.maxSequenceLength=1000064",
            "spec.rollout.sampling.maxNewTokens=1000000", "spec.rollout.maxRunningRequests=1000",
            # The one kernel that takes memory for each pair of tokens.
            "spec.training.attention=Eager",
        ],
    )  # fmt: skip
    with pytest.raises(OutOfMemoryError, match=r"memory ran out in stage preflight, .*llocate memory") as caught:
        run(spec, out=str(tmp_path / "run"))
    assert (caught.value.exit_code, caught.value.where) == (79, "spec.model.maxSequenceLength")
    # The folder is free again, and says how it ended.
    assert b"OutOfMemoryError" in b"".join(
        open_store(str(tmp_path / "run")).get(key) for key in open_store(str(tmp_path / "run")).list("executions/")
    )


def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_began_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parts(dict[str, Any]):
        """As a mapping of one's own it can be watched."""

    read: list[weakref.ref[Parts]] = []
    held: list[int] = []

    def reading(*arguments: Any, **settings: Any) -> Any:
        bundle, skipped = newest_readable(*arguments, **settings)
        if bundle is not None:
            bundle = replace(bundle, parts=Parts(bundle.parts))
            read.append(weakref.ref(bundle.parts))  # type: ignore[arg-type]
        return bundle, skipped

    def counting(completion: str, prompt: Any, fields: Any) -> float:
        held.append(sum(each() is not None for each in read))
        return float(len(completion) % 2)

    monkeypatch.setattr(sys.modules[run.__module__], "newest_readable", reading)
    for steps in (1, 2):
        spec = OrbitRun.model_validate(small_manifest(steps=steps))
        run(spec, out=str(tmp_path), rewards={"correct": counting}, progress=SilentProgress())
    assert (len(read), len(held)) == (1, 2 * 16)
    assert not any(held)
