"""PPO by a trainer of real ranks, whose critic they divide too, against one process."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from orbit_runtime.training.state import CRITIC_PART, PART
from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks
from tests.fakes.held_state import hold_state
from tests.megatron.cases import folder_of
from tests.megatron.test_critic import CRITIC, LORA, check_values, valued
from tests.megatron.test_trainer import TRAINING, apart
from tests.models.family_matrix import adapter_of

pytestmark = [pytest.mark.usefixtures("marked"), pytest.mark.timeout(900)]


@pytest.mark.long
def test_two_steps_of_ppo_publish_what_one_process_does(tmp_path: Path) -> None:
    """Each side values its samples by its own critic, which the first step has taught."""
    (tmp_path / "models").mkdir()
    folder, adapter = folder_of(tmp_path / "models", LORA), adapter_of(LORA)
    settings = replace(TRAINING, critic=CRITIC)
    asked = RankSettings(folder, adapter, GroupSizes(2, tensor=2, expert=2), settings)
    where = "orbit_runtime.training.megatron.rank:MegatronRank"
    group = GroupSettings(where, {"settings": asked}, 2, environment={"OMP_NUM_THREADS": "1"})
    one = TorchTrainer(load_policy(folder, adapter), settings)
    with start_ranks(group, tmp_path / "logs") as ranks:
        many = MegatronTrainer(ranks, "base")
        for step in range(2):
            expected = one.update(valued(one, step)).metrics
            found = many.update(valued(many, step)).metrics
            assert expected["value_loss"] > 0
            assert dict(found) == pytest.approx(dict(expected), rel=1e-4, abs=1e-5)
            many.score(range(5, 17))
            state, alone = hold_state(many), hold_state(one)
            for part in (PART, CRITIC_PART):
                moments = apart(state[part], alone[part])
                assert moments["exp_avg"] <= 1e-5, part
                assert moments["exp_avg_sq"] <= 2e-5, part
            # Where sums differ in their last bits, a value may be rounded to the other side when it is published: from
            # here on both go on with the same ones.
            one.load_state(state)
            assert publishable(many, step + 1).digest == publishable(one, step + 1).digest
        check_values(one, many, valued(one, 5))
        assert any(abs(value) > 0.01 for sample in valued(one, 5) for value in sample.columns["value"])
