"""Parts of an adapter on several ranks: joined they are the whole, and what one rank holds otherwise shows."""

from __future__ import annotations

import pickle

import pytest
import torch

from orbit_runtime.sglang_plugin import shards
from orbit_runtime.sglang_plugin.shards import ShardPiece, borrow, join, lend, pack, with_pieces

WHOLE = {
    "column.lora_A": torch.randn(4, 16), "column.lora_B": torch.randn(12, 4), "row.lora_A": torch.randn(4, 24),
    "keys.lora_B": torch.randn(8, 4), "experts.w2.lora_A": torch.randn(3, 4, 6),
}  # fmt: skip
SIZE = 4


def pieces(rank: int, whole: dict[str, torch.Tensor] = WHOLE) -> list[ShardPiece]:
    """Four ranks and two heads of keys, each on two ranks."""
    return [
        ShardPiece("column.lora_A", whole["column.lora_A"], is_copy=rank > 0),
        ShardPiece("column.lora_B", whole["column.lora_B"].chunk(SIZE)[rank], 0, rank),
        ShardPiece("row.lora_A", whole["row.lora_A"].chunk(SIZE, 1)[rank], 1, rank),
        ShardPiece("keys.lora_B", whole["keys.lora_B"].chunk(2)[rank // 2], 0, rank // 2, rank % 2 > 0),
        ShardPiece(
            "experts.w2.lora_A", whole["experts.w2.lora_A"].chunk(3, 2)[min(rank, 2)], 2, min(rank, 2), rank == 3
        ),
    ]


def sent(ranks: list[list[ShardPiece]], *, whole: bool = False) -> list[list[ShardPiece]]:
    return [pickle.loads(pickle.dumps(pack(each, whole=whole))) for each in ranks]


def lent(ranks: list[list[ShardPiece]]) -> list[list[ShardPiece]]:
    """The first keeps its own; all that is sent of the others is where their values lie."""
    first, *others = ranks
    received = [first]
    for each in others:
        told = pickle.dumps(lend({0: pack(each, whole=False, copied=False)}))
        assert len(told) < 2000
        received.append(borrow(*pickle.loads(told))[0])
    return received


def whole(ranks: list[list[ShardPiece]]) -> dict[str, torch.Tensor]:
    return {name: each.whole() for name, each in join(ranks).items()}


def test_the_parts_of_all_ranks_are_the_published_tensors() -> None:
    held = [pieces(rank) for rank in range(SIZE)]
    for ranks in (sent(held), lent(held), held):
        joined = whole(ranks)
        assert joined.keys() == WHOLE.keys()
        assert all(torch.equal(joined[name], WHOLE[name]) for name in WHOLE)
        assert all(each.shape == tuple(WHOLE[name].shape) for name, each in join(ranks).items())


def test_what_several_ranks_hold_is_sent_once_and_then_as_a_digest() -> None:
    first, second, *_ = sent([pieces(rank) for rank in range(SIZE)])
    assert [type(each.data) for each in first] == [torch.Tensor] * 5
    assert [each.name for each in second if isinstance(each.data, str)] == ["column.lora_A", "keys.lora_B"]


def test_a_part_is_sent_without_the_buffer_that_it_is_a_view_of() -> None:
    buffer = torch.zeros(64, 1024)
    (packed,) = pack([ShardPiece("row.lora_A", buffer[:, :1], 1)], whole=False)
    assert len(pickle.dumps(packed)) < 4096


def test_another_value_on_one_rank_changes_a_value_or_a_name() -> None:
    for index, piece in enumerate(pieces(3)):
        ranks = [pieces(rank) for rank in range(SIZE)]
        ranks[3][index] = ShardPiece(piece.name, piece.data * 2, piece.axis, piece.part, piece.is_copy)
        joined = whole(sent(ranks))
        assert joined.keys() == whole(lent(ranks)).keys()
        if piece.is_copy:
            assert f"{piece.name}.rank=3" in joined
            assert piece.name not in joined
        else:
            assert not torch.equal(joined[piece.name], WHOLE[piece.name])


def test_a_rank_that_holds_nothing_shows_in_every_tensor() -> None:
    joined = whole(sent([pieces(0), pieces(1), [], pieces(3)]))
    assert not {name for name, tensor in joined.items() if name in WHOLE and tensor.shape == WHOLE[name].shape}
    assert "column.lora_A.rank=2" in joined


def test_a_rank_is_told_apart_by_what_it_holds_alone() -> None:
    other = {name: tensor + 1 for name, tensor in WHOLE.items()}
    ranks = sent([pieces(0), pieces(1, other), pieces(2), pieces(3)], whole=True)
    assert [rank for rank in range(SIZE) if with_pieces(WHOLE, ranks, rank) is not None] == [1]
    found = with_pieces(WHOLE, ranks, 1)
    assert found is not None
    assert torch.equal(found["column.lora_B"].chunk(SIZE)[1], other["column.lora_B"].chunk(SIZE)[1])
    assert torch.equal(found["column.lora_B"].chunk(SIZE)[0], WHOLE["column.lora_B"].chunk(SIZE)[0])
    assert torch.equal(found["column.lora_A"], other["column.lora_A"])


def test_a_rank_that_lacks_a_tensor_is_told() -> None:
    ranks = sent([pieces(0), pieces(1)[1:], pieces(2), pieces(3)], whole=True)
    found = with_pieces(WHOLE, ranks, 1)
    assert found is not None
    assert "column.lora_A" not in found


def test_what_was_lent_is_kept_until_it_was_opened_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_kept", [])
    told, opening = lend({0: pack(pieces(0), whole=False, copied=False)})
    lend({})
    assert len(shards._kept) == 1, "nobody has opened it"
    (held,) = borrow(told, opening).values()
    lend({})
    assert not shards._kept
    assert torch.equal(held[0].data, WHOLE["column.lora_A"]), "the memory lives as long as its tensors"  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"given back|No such file"):
        borrow(told, opening)
    lend({0: pack(pieces(0), whole=False, copied=False)})
    monkeypatch.setattr(shards, "KEPT_SECONDS", -1.0)
    lend({})
    assert not shards._kept, "its reader was given up"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_lent_values_have_the_same_bits_in_any_dtype_and_shape(dtype: torch.dtype) -> None:
    view, empty, one = torch.randn(8, 6).to(dtype).T, torch.empty(0, 3, dtype=dtype), torch.ones(1, dtype=dtype)
    given = {"view": view, "empty": empty, "one": one}
    told, opening = lend({3: [ShardPiece(name, tensor) for name, tensor in given.items()]})
    found = {each.name: each.data for each in borrow(told, opening)[3]}
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in given.items())  # type: ignore[union-attr, arg-type]
