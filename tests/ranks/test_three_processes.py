"""A trainer process whose model is divided among ranks: the rows of `orbit run`, also where a rank is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from orbit_runtime.errors import CollectiveError
from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.policy_server import PolicyServer
from tests.integration.three_processes import Side, run_apart, two_sides

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]


@pytest.fixture
def asked() -> Iterator[dict[str, Any]]:
    server = PolicyServer()
    server.start()
    manifest = small_manifest(steps=4, every_steps=2)
    manifest["spec"]["rollout"] |= {"engine": "OpenAI", "endpoints": [{"url": server.url}]}
    manifest["spec"]["training"] |= {"trainer": "Megatron", "parallel": {"tensor": 2}}
    yield manifest
    server.stop()


def ranks() -> list[psutil.Process]:
    family = psutil.Process().children(recursive=True)
    return [each for each in family if "RankActor" in " ".join(each.cmdline() or [each.name()])]


def lose_a_rank(trainer: Side, mark: Path) -> None:
    """And start the trainer process again, as a supervisor does."""
    while not mark.exists():
        time.sleep(0.02)
    ranks()[1].kill()
    while trainer.host._lost is None:
        time.sleep(0.02)
    trainer.kill()
    trainer.start()


def test_rows_are_those_of_one_process_also_where_a_rank_is_lost(
    asked: dict[str, Any], tmp_path: Path, marked: Callable[[], dict[int, str]]
) -> None:
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "one"), progress=SilentProgress())
    assert ranks() == []
    out = tmp_path / "apart"
    with two_sides(asked) as sides:
        assert len(ranks()) == 2
        first = sides["trainer"].host
        mark = out / "metrics/step-000001.json"
        thread = threading.Thread(target=lose_a_rank, args=(sides["trainer"], mark), daemon=True)
        thread.start()
        assert run_apart(asked, out, sides).ended == "done"
        thread.join()
    assert isinstance(first._lost, CollectiveError)
    assert sides["trainer"].host is not first
    assert timeless_rows(open_store(str(out))) == timeless_rows(open_store(str(tmp_path / "one")))
    assert marked() == {}
