"""A pass whose tokens are divided, in one process: each part attends to all keys as the whole pass does."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch

from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.policy.packed import PackedPlan, build_packed, own_tokens
from tests.models.test_chunked import BRANCHES, CPU, SIZES, expected, random_inputs, with_gradients


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 6, 100])
@pytest.mark.parametrize("kernel", ["Eager", "SDPA", "Chunked"])
@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_a_pass_attend_as_the_whole_does(
    count: int, kernel: Literal["Eager", "SDPA", "Chunked"], window: int | None, with_sinks: bool
) -> None:
    """Values, and the gradients of queries, keys and values, against fp64 with every score written out."""
    sizes = SIZES["MLA"]
    whole = build_packed(BRANCHES, CPU)
    tokens = len(whole.token_ids_T)
    parts = [build_packed(BRANCHES, CPU, (place, count)) for place in range(count)]
    inputs = random_inputs(tokens, sizes)
    look = AttentionSettings(0.3, window, torch.linspace(-1.0, 2.0, sizes[0]) if with_sinks else None)
    exact = with_gradients(expected(whole, inputs, look), inputs)

    padding = parts[0].num_tokens - tokens
    q_THD, k_TKD, v_TKD = (torch.cat((x, x[:1].detach().expand(padding, -1, -1))) for x in inputs)
    met = torch.cat((k_TKD.flatten(1), v_TKD.flatten(1)), 1)
    out = torch.empty(parts[0].num_tokens, sizes[0], sizes[3])
    for part in parts:
        assert part.places_T is not None
        own = part.places_T
        # What other processes would have sent is at hand here.
        plan = PackedPlan(part, kernel, meet=partial(lambda whole_TN, _: whole_TN, met))
        out = out.index_copy(
            0, own, plan.attend_tokens(0, q_THD[own], k_TKD[own], v_TKD[own], look).view(-1, *out.shape[1:])
        )
    found = with_gradients(out[:tokens], inputs)
    for value, wanted in zip(found, exact, strict=True):
        assert float((value - wanted).abs().max()) <= 8e-6 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_hold_every_token_once_with_its_position(count: int) -> None:
    whole = build_packed(BRANCHES, CPU)
    parts = [build_packed(BRANCHES, CPU, (place, count)) for place in range(count)]
    tokens, positions = (torch.full((parts[0].num_tokens,), -1) for _ in range(2))
    for part in parts:
        assert part.places_T is not None
        assert len(part.token_ids_T) == parts[0].num_tokens // count
        tokens[part.places_T], positions[part.places_T] = part.token_ids_T, part.position_T
    assert tokens[: len(whole.token_ids_T)].tolist() == whole.token_ids_T.tolist()
    assert positions[: len(whole.position_T)].tolist() == whole.position_T.tolist()
    assert own_tokens(8, (0, 2)) == (range(0, 2), range(6, 8))
