"""A run whose memory runs out ends with 79, and says in which stage."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import OutOfMemoryError
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.storage import Bundle, open_store
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


def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_began_from(tmp_path: Path) -> None:
    held: list[int] = []

    def counting(completion: str, prompt: Any, fields: Any) -> float:
        held.append(sum(type(each) is Bundle for each in gc.get_objects()))
        return float(len(completion) % 2)

    for steps in (1, 2):
        spec = OrbitRun.model_validate(small_manifest(steps=steps))
        run(spec, out=str(tmp_path), rewards={"correct": counting}, progress=SilentProgress())
    assert len(held) == 2 * 16
    assert not any(held)
