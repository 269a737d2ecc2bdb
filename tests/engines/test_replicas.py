"""Two real SGLang servers behind one engine: one may die or go wrong, and the other goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.errors import GateError
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.parity.liveness import Limits, Reading, check_proofs, prove
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Sampling
from tests.engines.servers import Adder, post_to, server_of, start_server
from tests.engines.test_contract import policy_logprobs
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import by_id, random_adapter, requests_for
from tools.chart.dashboards import RUN

RunInside = Callable[..., None]
NewName = Callable[[], str]
LIMITS = Limits(1e-3, 0.02)


@pytest.fixture(scope="module")
def pair(lora_adder: Adder, inside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    yield from start_server(lora_adder, tmp_path_factory.mktemp("pair"), oft_block_size=0, replicas=2)


@pytest.fixture
def engine(pair: ServedEngine) -> Iterator[ServedEngine]:
    yield pair
    for name in pair.adapters():
        pair.unload_adapter(name)


def publish(
    engine: ServedEngine, adder: Adder, name: str, adapter: AdapterFiles, previous: list[Reading] | None
) -> list[Reading]:
    """Proves what stands under `name`, on every copy, as a run does that published before."""
    policy, tokenizer = adder
    trainer = policy_scores(policy, adapter, canary(tokenizer))
    for copy in engine.copies():
        copy.score(canary(tokenizer), [None])
    proven = [
        prove(adapter, name, copy, trainer, canary(tokenizer), limits=LIMITS,
              previous=previous[index] if previous else None)
        for index, copy in enumerate(engine.copies())
    ]  # fmt: skip
    check_proofs([proof for proof, _ in proven])
    assert all(proof.cached_error is not None for proof, _ in proven), "the canary's beginning came from the cache"
    return [reading for _, reading in proven]


def test_both_answer_with_the_policys_log_probs(engine: ServedEngine, lora_adder: Adder, new_name: NewName) -> None:
    policy, tokenizer = lora_adder
    name, adapter = new_name(), random_adapter(policy, 1)
    engine.load_adapter(name, adapter)
    publish(engine, lora_adder, name, adapter, None)
    requests = requests_for(
        tokenizer, [f"{a}+{a}=" for a in range(10, 26)], 4, sampling=Sampling(max_new_tokens=4), adapter=name
    )
    found = by_id(list(sample(engine, requests)))
    for request in requests[::5]:
        answer = found[request.request_id]
        expected = policy_logprobs(policy, adapter, request.prompt_ids_T, answer.token_ids_T)
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=5e-5)
    done = [_metric(engine, index) for index in (0, 1)]
    assert min(done) > 0, done


def test_what_the_plug_in_tells_comes_with_the_proofs_own_pass(
    engine: ServedEngine, lora_adder: Adder, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = lora_adder
    name, adapter = new_name(), random_adapter(policy, 3)
    engine.load_adapter(name, adapter)

    async def refused() -> None:
        raise AssertionError("asked over HTTP, while others sample")

    for replica in engine.replicas:
        monkeypatch.setattr(replica.api, "facts", refused)
    publish(engine, lora_adder, name, adapter, None)
    for replica in engine.replicas:
        assert replica.taps is not None
        assert not list(replica.taps.iterdir())


def test_the_runs_metrics_hold_what_the_dashboard_asks_of_every_server(engine: ServedEngine) -> None:
    metrics = RunMetrics(run="r", namespace="a")
    metrics.add_engine(engine.read_servers)
    told = metrics.render().decode()
    queries = " ".join(query for panel in RUN.rows["Engine"] for query in panel.queries.values())
    wanted = set(re.findall(r"(?:sglang:|orbit_engine_)\w+", queries))
    assert len(wanted) >= 6
    for name in wanted:
        for replica in ("replica 0", "replica 1"):
            found = [line for line in told.splitlines() if line.startswith(f"{name}{{")]
            assert any(f'replica="{replica}"' in line and 'run="r"' in line for line in found), (name, replica)


def _metric(engine: ServedEngine, index: int) -> float:
    server = server_of(engine, index)
    text = httpx.get(f"{server.url}/metrics", headers=dict(server.headers), timeout=30, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("sglang:generation_tokens_tot"))


def test_one_killed_in_mid_generation_loses_and_doubles_nothing_and_comes_back_with_the_policy(
    engine: ServedEngine, lora_adder: Adder, new_name: NewName
) -> None:
    policy, tokenizer = lora_adder
    name, adapter = new_name(), random_adapter(policy, 7)
    engine.load_adapter(name, adapter)
    before = publish(engine, lora_adder, name, adapter, None)
    requests = requests_for(
        tokenizer, [f"{a}+{b}=" for a in range(10, 50) for b in (11, 47)], 8, sampling=Sampling(max_new_tokens=24),
        adapter=name,
    )  # fmt: skip
    killed = threading.Timer(0.5, lambda: os.killpg(server_of(engine, 1).pid, signal.SIGKILL))
    killed.start()
    completions = list(sample(engine, requests))
    killed.join()
    assert len(completions) == len(by_id(completions)) == len(requests)
    for copy in engine.copies():
        (scored,) = copy.score(canary(tokenizer), [name])
        assert scored.applied_digest == expected_applied_digest(adapter.files)
        assert copy.adapter_digest(name) == adapter.digest
    # Asked last: the other server may have answered everything before the lost one was back.
    assert [replica.restarts for replica in engine.replicas] == [0, 1]
    following, moved = new_name(), random_adapter(policy, 8)
    engine.load_adapter(following, moved)
    publish(engine, lora_adder, following, moved, before)


COPY = (
    "names = {{each.lora_name: key for key, each in manager.lora_refs.items()}}\n"
    "old, new = (manager.memory_pool.uid_to_buffer_id[names[name]] for name in ({old!r}, {new!r}))\n"
    "for tables in (manager.memory_pool.A_buffer, manager.memory_pool.B_buffer):\n"
    "    for layers in tables.values():\n"
    "        for table in layers:\n"
    "            table[new].copy_(table[old])\n"
)
CHANGE = (
    "key = next(key for key, each in manager.lora_refs.items() if each.lora_name == {old!r})\n"
    "slot = manager.memory_pool.uid_to_buffer_id[key]\n"
    "for layers in manager.memory_pool.B_buffer.values():\n"
    "    for table in layers:\n"
    "        table[slot].mul_(2)\n"
)
SHARE = (
    "import sglang.srt.mem_cache.radix_cache as cache\n"
    "cache.RadixKey.kept = cache.RadixKey.__init__\n"
    "def init(self, token_ids, extra_key=None, *args, **named):\n"
    "    cache.RadixKey.kept(self, token_ids, None, *args, **named)\n"
    "cache.RadixKey.__init__ = init\n"
)
UNSHARE = (
    "import sglang.srt.mem_cache.radix_cache as cache\n"
    "cache.RadixKey.__init__ = cache.RadixKey.kept\n"
)  # fmt: skip


@pytest.mark.parametrize("fault", ["stale", "changed since", "shared cache", "evicted", "other base"])
def test_a_fault_of_one_replica_is_named_by_the_next_proof(
    engine: ServedEngine, lora_adder: Adder, new_name: NewName, run_inside: RunInside, tmp_path: Path, fault: str
) -> None:
    policy, tokenizer = lora_adder
    old, new = new_name(), new_name()
    adapters = {old: random_adapter(policy, 1), new: random_adapter(policy, 2)}
    engine.load_adapter(old, adapters[old])
    before = publish(engine, lora_adder, old, adapters[old], None)
    if fault == "shared cache":
        run_inside(engine, SHARE, index=1)
        # Nothing that was computed before the fault is left: what is shared is shared among what comes.
        assert post_to(engine, "/flush_cache", {}, index=1).status_code == 200
        engine.copies()[1].score(canary(tokenizer), [old])
    engine.load_adapter(new, adapters[new])
    base = server_of(engine, 1)._settings.model
    if fault == "stale":
        engine.copies()[1].score(canary(tokenizer), [old, new])
        run_inside(engine, COPY.format(old=old, new=new), index=1)
    elif fault == "changed since":
        run_inside(engine, CHANGE.format(old=old), index=1)
    elif fault == "evicted":
        assert post_to(engine, "/unload_lora_adapter", {"lora_name": old}, index=1).status_code == 200
    elif fault == "other base":
        _other_base(base, tmp_path / "base", engine)
    says = {
        "stale": "replica 1: the engine's slot holds .*has other values",
        "changed since": f"replica 1: {old}, which sampled until now, is no longer as .*lora_B.* is 2 times",
        "shared cache": "replica 1: versions share cached keys and values",
        "evicted": f"replica 1: {old}, which sampled until now, .*evicted",
        "other base": "replica 1: the engine's base differs from that of the previous publish",
    }[fault]
    try:
        with pytest.raises(GateError, match=says) as caught:
            publish(engine, lora_adder, new, adapters[new], before)
    finally:
        if fault == "shared cache":
            run_inside(engine, UNSHARE, index=1)
            assert post_to(engine, "/flush_cache", {}, index=1).status_code == 200
        elif fault == "evicted":
            body = {"lora_name": old, "lora_path": str(engine.loaded[old].files())}
            assert post_to(engine, "/load_lora_adapter", body, index=1).status_code == 200
        elif fault == "other base":
            _update_weights(engine, base)
    assert caught.value.exit_code == 84
    assert "replica 0" not in str(caught.value)


def _other_base(healthy: Path, folder: Path, engine: ServedEngine) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(healthy, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.2
    save_file(tensors, file, metadata={"format": "pt"})
    _update_weights(engine, folder)


def _update_weights(engine: ServedEngine, folder: Path) -> None:
    body = {"model_path": str(folder), "flush_cache": True}
    answer = post_to(engine, "/update_weights_from_disk", body, index=1)
    assert answer.json()["success"], answer.text
