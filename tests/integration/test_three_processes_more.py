"""Trainer, inference and orchestrator apart: runs that begin with an adapter, have a teacher, or sample nothing."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import ModelError, UsageError
from orbit_runtime.loop.replay import replay
from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.samples import read_samples
from orbit_runtime.services.calls import build_inference_host
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.remote_engine import RemoteEngine
from orbit_runtime.services.side_manifest import open_manifest
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from orbit_runtime.storage.cache import RetryPolicy
from orbit_runtime.types import AdapterFiles, Completion, Request, Sampling
from tests.integration.killing import demanding_manifest, small_manifest, timeless_rows
from tests.integration.three_processes import TOKEN, Side, remote_sides, run_apart, two_sides


def alone(asked: dict[str, Any], out: Path) -> Store:
    run(OrbitRun.model_validate(asked), out=str(out), progress=SilentProgress())
    return open_store(str(out))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with adapters."""
    out = tmp_path_factory.mktemp("begun") / "run"
    alone(small_manifest(steps=4, every_steps=2), out)
    return out


def with_initial(begun: Path) -> dict[str, Any]:
    asked = small_manifest(steps=3)
    asked["spec"]["adapter"]["initFrom"] = str(begun)
    return asked


def with_teacher(begun: Path) -> dict[str, Any]:
    asked = small_manifest(steps=3)
    asked["spec"]["algorithm"]["teacher"] = {
        "type": "Adapter", "uri": str(begun / "adapters" / "policy-v4"), "preflight": "Report", "preflightPrompts": 8,
    }  # fmt: skip
    return asked


def sampled_teacher(begun: Path) -> dict[str, Any]:
    asked = with_teacher(begun)
    asked["spec"]["algorithm"]["teacher"] |= {"over": "Sampled"}
    return asked


def demonstrations(_: Path, **data: Any) -> dict[str, Any]:
    asked = small_manifest(steps=6, every_steps=2)
    spec = asked["spec"]
    spec["algorithm"] = {"type": "SFT"}
    prompts = [{"uri": "builtin://two-digit-addition", "completionField": "answer"}]
    spec["data"] = {"prompts": prompts, "limit": 200, **data}
    spec["training"] = {"steps": 6, "promptsPerStep": 8, "learningRate": 2e-3}
    del spec["environment"]
    return asked


MORE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "an adapter to begin with": with_initial,
    "an adapter that teaches": with_teacher,
    "its sampled tokens alone": sampled_teacher,
    "an average that teaches": lambda _: demanding_manifest("OFT on NVFP4, its own teacher", steps=2),
    "demonstrations": lambda begun: demonstrations(begun, validation={"share": 0.1, "everySteps": 2}),
}


def killed_in_between(side: Side, run_it: Callable[[], Any], after: Callable[[], bool]) -> None:
    """The side is lost once `after` holds, and its successor is there a moment later."""

    def kill() -> None:
        while not after():
            time.sleep(0.005)
        side.kill()
        side.start()

    thread = threading.Thread(target=kill)
    thread.start()
    run_it()
    thread.join()


LONG = ("its sampled tokens alone", "an average that teaches", "an adapter that teaches")
"""Left to `make test-long`."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in MORE]
)
def test_three_processes_have_the_bits_of_one(tmp_path: Path, begun: Path, name: str) -> None:
    asked = MORE[name](begun)
    one = alone(asked, tmp_path / "one")
    with two_sides(asked) as sides:
        assert ("inference" in sides) == (asked["spec"]["algorithm"].get("type") != "SFT")
        assert run_apart(asked, tmp_path / "three", sides).ended == "done"
    three = open_store(str(tmp_path / "three"))
    assert timeless_rows(three) == timeless_rows(one)
    for key in ("teacher.json", "rollouts/step-000002.jsonl.zst"):
        assert three.exists(key) == one.exists(key)
        assert not one.exists(key) or three.get(key) == one.get(key)


@pytest.mark.parametrize(
    "name",
    ["an adapter to begin with", pytest.param("its sampled tokens alone", marks=pytest.mark.long), "demonstrations"],
)
def test_a_trainer_that_is_lost_changes_nothing(tmp_path: Path, begun: Path, name: str) -> None:
    """Before the first checkpoint: it is told its beginning again."""
    asked = copy.deepcopy(MORE[name](begun))
    asked["spec"]["checkpoint"]["everySteps"] = 100
    one = alone(asked, tmp_path / "one")
    with two_sides(asked) as sides:
        trainer = sides["trainer"]
        asks = [0]
        update = trainer.host._calls["update"]

        def counted(*arguments: Any) -> Any:
            asks[0] += 1
            return update(*arguments)

        trainer.host._calls = {**trainer.host._calls, "update": counted}
        killed_in_between(trainer, lambda: run_apart(asked, tmp_path / "three", sides), lambda: asks[0] > 1)
    assert timeless_rows(open_store(str(tmp_path / "three"))) == timeless_rows(one)


def test_a_run_of_an_earlier_version_goes_on_with_the_rates_that_it_began_with(tmp_path: Path) -> None:
    """1e-4 where no manifest had one, whatever the model's size; also when its trainer is lost."""
    asked = small_manifest(steps=2, every_steps=2)
    asked["spec"]["algorithm"]["type"], asked["spec"]["training"]["learningRate"] = "PPO", 1e-4
    alone(asked, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    asked["spec"]["training"]["steps"] = 5
    one, three = alone(asked, tmp_path / "one"), open_store(str(tmp_path / "three"))
    del asked["spec"]["training"]["learningRate"]
    with two_sides(asked) as sides:
        killed_in_between(
            sides["trainer"],
            lambda: run_apart(asked, tmp_path / "three", sides),
            lambda: three.exists("rollouts/step-000003.jsonl.zst"),
        )
        connection = Connection("trainer", sides["trainer"].url, TOKEN, patience=5.0)
        assert connection.facts()["identity"]["spec.training.learningRate"] == 2e-3
    assert timeless_rows(three) == timeless_rows(one)


def test_an_adapter_that_lies_elsewhere_for_the_trainer_goes_to_it_as_bytes(tmp_path: Path, begun: Path) -> None:
    asked = with_initial(begun)
    one = alone(asked, tmp_path / "one")
    with two_sides(asked) as sides:
        begin = sides["trainer"].host._calls["begin"]
        told: list[bool] = []

        def blind(place: str, digest: str, files: Any) -> bool:
            told.append(bool(begin("/nowhere" if files is None else place, digest, files)))
            return told[-1]

        sides["trainer"].host._calls = {**sides["trainer"].host._calls, "begin": blind}
        run_apart(asked, tmp_path / "three", sides)
    assert told == [False, True]
    assert timeless_rows(open_store(str(tmp_path / "three"))) == timeless_rows(one)


def test_another_teacher_than_the_runs_is_refused_before_anything_is_written(tmp_path: Path, begun: Path) -> None:
    asked, other = with_teacher(begun), with_teacher(begun)
    other["spec"]["algorithm"]["teacher"]["uri"] = str(begun / "adapters" / "policy-v2")
    with two_sides(other) as sides, pytest.raises(ModelError, match="read another teacher") as caught:
        run(
            OrbitRun.model_validate(asked), out=str(tmp_path / "out"), progress=SilentProgress(),
            sides=remote_sides(sides),
        )  # fmt: skip
    assert caught.value.where == "spec.algorithm.teacher.uri"
    assert not (tmp_path / "out").exists()


def test_demonstrations_have_no_inference_process() -> None:
    asked = open_manifest(OrbitRun.model_validate(demonstrations(Path())), Path.cwd(), RetryPolicy())
    with pytest.raises(UsageError) as caught:
        build_inference_host(asked, "127.0.0.1", [].append, ExitStack())
    assert caught.value.where == "spec.algorithm.type"


def test_an_evaluation_within_a_run_says_the_same_in_three_processes(tmp_path: Path) -> None:
    """Samples and scores, before the first step, within, and after the last."""
    asked = small_manifest(steps=2)
    held_out = [{"name": "held-out", "prompts": [{"uri": "builtin://two-digit-multiplication"}]}]
    asked["spec"]["evaluation"] = {"everySteps": 1, "samples": 2, "limit": 4, "environments": held_out}
    one = alone(asked, tmp_path / "one")
    with two_sides(asked) as sides:
        assert run_apart(asked, tmp_path / "three", sides).ended == "done"
    three = open_store(str(tmp_path / "three"))
    rows = timeless_rows(three)
    assert rows == timeless_rows(one)
    assert [row["eval_held-out_mean"] for row in rows] == [row["eval_held-out_mean"] for row in timeless_rows(one)]
    for step in range(3):
        folder = f"evaluation/step-{step:06d}"
        told, expected = (json.loads(each.get(f"{folder}/summary.json")) for each in (three, one))
        assert len(expected["scores"][0]["means"]) == 4
        assert told["scores"] == expected["scores"]
        samples = [
            {(each.environment, each.prompt_id, each.sample_index): (each.completion, each.reward)
             for each, _ in read_samples(store, f"{folder}/samples.jsonl.zst")}
            for store in (three, one)
        ]  # fmt: skip
        assert len(samples[1]) == 8
        assert samples[0] == samples[1]


# --- what was under way when a version was published ---


def adapter_of(begun: Path, version: int) -> AdapterFiles:
    folder = begun / "adapters" / f"policy-v{version}"
    names = ("adapter_config.json", "adapter_model.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    return AdapterFiles(version, {name: (folder / name).read_bytes() for name in names}, manifest["facts"]["digest"])


def answers(begun: Path, side: Side, lose: bool) -> dict[int, Completion]:
    """Some requests end under one version, are continued under the next one, and then the process is lost."""
    import asyncio

    connection = Connection("inference", side.url, TOKEN, patience=30.0)
    connection.open("a folder", 1)
    engine, sampling = RemoteEngine(connection, lambda _: False), Sampling(max_new_tokens=24, ignore_eos=True)
    prompts = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]
    found: dict[int, Completion] = {}

    async def take(enough: Callable[[], bool]) -> None:
        async for completion in engine.completions():
            found[completion.request_id] = completion
            if enough():
                return

    engine.load_adapter("policy-v2", adapter_of(begun, 2))
    engine.submit([Request(at, at, prompt, sampling, "policy-v2", None) for at, prompt in enumerate(prompts)])
    for _ in range(3):
        engine._advance(1)
    engine.load_adapter("policy-v4", adapter_of(begun, 4))
    engine.abort()
    # One asks for its rest before all of them were handed back.
    engine.submit([Request(3, 3, prompts[0], sampling, "policy-v4", None)])
    asyncio.run(take(lambda: len(found) == 3))
    engine.unload_adapter("policy-v2")
    for _ in range(2):
        engine._advance(1)
    if lose:
        side.kill()
        side.start()
    asyncio.run(take(lambda: False))
    assert connection.restarts == int(lose)
    connection.close()
    return found


def test_an_inference_process_is_told_again_without_the_versions_that_are_gone(begun: Path) -> None:
    asked = small_manifest(steps=1)
    side = Side("inference", asked)
    try:
        undisturbed, lost = answers(begun, side, lose=False), answers(begun, side, lose=True)
    finally:
        side.kill()
    assert sorted(lost) == [0, 1, 2, 3]
    assert lost == undisturbed
    assert set(lost[3].versions_T) == {4}


def test_stragglers_are_cancelled_at_the_engine_of_another_process(tmp_path: Path) -> None:
    asked = small_manifest(steps=2)
    asked["spec"]["rollout"] = {"overSampling": 2, "sampling": {"maxNewTokens": 24}}
    with two_sides(asked) as sides:
        assert run_apart(asked, tmp_path / "three", sides).ended == "done"
    store = open_store(str(tmp_path / "three"))
    rows = timeless_rows(store)
    assert [(row["groups"], row["prompts_cancelled"]) for row in rows] == [(4, 2)] * 2
    again = replay(store, steps=None, show=lambda _done, _total: None)
    assert again.is_equal
