"""A real SGLang in deterministic mode. Its CPU back end has none, so this needs a GPU; not run on hardware."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import start_engine
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer, lora_targets
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.types import Sampling
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.engines.servers import LORA, OFT, load_adder
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_completions_depend_on_no_order_and_no_neighbour(tmp_path: Path, kind: str) -> None:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    policy, tokenizer = load_adder(LORA if kind == "LoRA" else OFT)
    convert(builtin_folder("tiny-adder", "INT4"), tmp_path / "base", Target("BF16"), show=lambda *_: None)
    settings = ServerSettings(
        model=tmp_path / "base", device="cuda", dtype="bfloat16", targets=lora_targets(tuple(policy.injected.layers)),
        max_running_requests=32, max_sequence_length=256, seed=0, lora_rank=4,
        oft_block_size=OFT.block_size if kind == "OFT" else 0, deterministic=True,
    )  # fmt: skip
    engine = start_engine(
        [SGLangServer(settings, log=tmp_path / "sglang.log")], tokenizer, desk=FolderMailbox(tmp_path / "adapters"),
        max_running_requests=32,
    )  # fmt: skip
    try:
        engine.load_adapter("policy-v1", random_adapter(policy, 1))
        asked = requests_for(
            tokenizer, [f"{a}+{a}=" for a in range(10, 22)], 4, sampling=Sampling(max_new_tokens=5), adapter="policy-v1"
        )
        whole = by_id(list(sample(engine, asked)))
        assert len({tuple(each.token_ids_T) for each in whole.values()}) > 12
        for others in (asked[::-1], asked[::7], asked[5:6]):
            for request_id, found in by_id(list(sample(engine, others))).items():
                expected = whole[request_id]
                assert (found.token_ids_T, found.logprobs_T) == (expected.token_ids_T, expected.logprobs_T)
    finally:
        engine.close()
