"""Measures what a model's own code does with several sequences in one pass, on a small random copy of the model.

Orbit packs sequences into one row and decodes from cached keys and values. Both are right only if nothing but attention
moves information between tokens, and if every layer calls it once. No flag of transformers says so, hence the passes.

Belongs here: the copy (every kind of layer once, sizes cut), its passes, the kept answer, and rotary embeddings that
depend on the length of a pass. Does not belong here: which models are measured (`load`).

Legend: `S` positions of one sequence, `R` targets, `N` hidden size; attention's letters as in `attention`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig

from orbit_runtime.errors import OrbitError, UnsupportedError
from orbit_runtime.policy.attention import IMPLEMENTATION, AttentionSettings, attend_rows, decoder_of, hidden_of
from orbit_runtime.policy.modules import fuse_norms
from orbit_runtime.policy.packed import Branch, PackedBatch, PackedPlan, build_packed, gather_rows
from orbit_runtime.storage.cache import Cache

VERSION = 1
"""Changes with what is measured, so that no older answer is used."""
TOLERANCE = 1e-4
"""Largest difference between equal hidden states, relative to the largest of them; rounding gives 1e-6, leaks 1e-2."""
HEADS = 2
CPU = torch.device("cpu")
CUT = {
    "num_key_value_heads": HEADS, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0, "sliding_window": 4,
    "attention_chunk_size": 4, "attention_window_size": 4,
}  # fmt: skip
"""Fields that do not change the kinds of layers, and their largest value in the copy. Windows are shorter than the
sequences, so that a layer which does not pass its window to attention is found.
"""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the passes of a copy showed."""

    packed_equals_alone: bool = False
    """Sequences in one row, two of them behind a shared prefix, have the hidden states of transformers' own passes over
    each alone."""
    far_equals_alone: bool = False
    """The same for a sequence beside a token at the last position that a sequence may have."""
    attends_once: bool = False
    """Each layer calls attention exactly once."""
    cached_equals_pass: bool = False
    """A step from cached keys and values has the hidden state of a pass over the whole sequence."""
    failed: str = ""
    """Error of the model's code; empty if it ran."""

    @property
    def reason(self) -> str:
        """Why sequences cannot be packed; empty if they can."""
        if self.failed:
            return self.failed
        if not self.packed_equals_alone:
            return "sequences that share a row change each other, so more than attention connects their tokens"
        if not self.far_equals_alone:
            return "a sequence's hidden states depend on the longest sequence of the pass"
        return "" if self.attends_once else "its layers do not call attention exactly once each"


def check_rope(config: PretrainedConfig, longest: int, where: str) -> None:
    """
    Args:
        longest: maximum length of a sequence.

    Raises:
        UnsupportedError: the model's rotary angles depend on the longest sequence of a pass.
    """
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in [each for each in found.values() if isinstance(each, dict)] or [found]:
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind:
            raise UnsupportedError(
                f"rotary embeddings of type {kind} depend on the longest sequence of a pass, so what a sequence gets "
                "depends on those beside it",
                where=where,
                fix="choose a model whose rope_type is default, linear, llama3, yarn or longrope",
            )
        limit = rope.get("original_max_position_embeddings")
        if kind == "longrope" and limit is not None and longest > limit:
            raise UnsupportedError(
                f"rotary embeddings of type longrope change for a whole pass with a sequence of more than {limit} "
                f"tokens, and {longest} are allowed",
                where=where,
                fix=f"set spec.model.maxSequenceLength to {limit} or less",
            )


def cached_behaviour(model: nn.Module, raw: dict[str, Any], longest: int, cache: Cache) -> Behaviour:
    """`measure`, or its answer for the same config.json, length and libraries from the cache.

    Args:
        raw: config.json.
    """
    facts = [VERSION, transformers.__version__, torch.__version__, longest, raw]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    with suppress(OSError):
        known = cache.load_listing(key)
        if known is not None:
            return Behaviour(**known)
    found = measure(model, longest)
    if not found.failed:
        with suppress(OSError):
            cache.save_listing(key, asdict(found))
    return found


def measure(model: nn.Module, longest: int) -> Behaviour:
    """
    Args:
        model: transformers' modules; their parameters need no storage.
        longest: maximum length of a sequence.

    Raises:
        OrbitError: a layer requires something of attention that a plan does not support.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            return _measure(*_build_copies(model), longest)
        except OrbitError:
            raise
        except Exception as error:  # the code of a family that Orbit does not know raises anything
            lines = str(error).strip().splitlines() or [""]
            return Behaviour(failed=f"{type(error).__name__}: {lines[0]}")


def _measure(plain: nn.Module, ours: nn.Module, longest: int) -> Behaviour:
    """Args: plain: with transformers' own attention; ours: the same weights, with `attention.orbit_attention`."""
    tokens = torch.randint(3, CUT["vocab_size"], (40,), generator=torch.Generator().manual_seed(1)).tolist()
    branches = [
        Branch(0, tokens[:7], tokens[7:17]),
        Branch(0, tokens[:7], tokens[17:23]),
        Branch(1, tokens[23:27], tokens[27:40]),
    ]
    sequences = [[*each.prefix_T, *each.continuation_T] for each in branches]
    alone = [_alone(plain, each) for each in sequences]
    of_targets = [hidden_SN[len(each.prefix_T) - 1 : -1] for each, hidden_SN in zip(branches, alone, strict=True)]
    packed = _Watched(build_packed(branches, CPU))
    is_packed_rightly = _equal(packed.hidden(ours), torch.cat(of_targets))
    batch = build_packed([branches[2], Branch(2, tokens[:3], (0,))], CPU)
    longest, position_T = max(longest, batch.longest), batch.position_T.clone()
    position_T[-1] = longest - 1
    far = _Watched(replace(batch, position_T=position_T, longest=longest))
    attends_once = packed.order == list(range(len(decoder_of(ours).layers)))
    last_BN = torch.stack([hidden_SN[-1] for hidden_SN in alone[1:]])
    return Behaviour(
        packed_equals_alone=is_packed_rightly,
        far_equals_alone=_equal(far.hidden(ours)[:-1], of_targets[2]),
        attends_once=attends_once,
        cached_equals_pass=attends_once and _is_cached_rightly(ours, sequences[1:], last_BN),
    )


def _alone(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """`[S, N]` of transformers' own pass over one sequence."""
    return decoder_of(model)(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def _equal(found: Tensor, expected: Tensor) -> bool:
    """False for values that are not finite."""
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


class _Watched(PackedPlan):
    """A packed pass that notes which layers attend."""

    def __init__(self, batch: PackedBatch) -> None:
        super().__init__(batch, "SDPA", capture=True)
        self.order: list[int] = []

    def attend(
        self, layer: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, look: AttentionSettings
    ) -> Tensor:  # fmt: skip
        self.order.append(layer)
        return super().attend(layer, q_1HTD, k_1KTD, v_1KTD, look)

    def hidden(self, model: nn.Module) -> Tensor:
        """`[R, N]` of the batch's targets."""
        hidden_TN = hidden_of(model, self.batch.token_ids_T[None], self.batch.position_T[None], self)[0]
        return gather_rows(hidden_TN, self.batch.target_source_R)


def _is_cached_rightly(model: nn.Module, sequences: Sequence[Sequence[int]], expected_BN: Tensor) -> bool:
    """Steps each sequence's last token, from the keys and values of a packed pass over the others."""
    prefill = _Watched(build_packed([Branch(row, each[:-1], (0,)) for row, each in enumerate(sequences)], CPU))
    prefill.hidden(model)
    assert prefill.captured is not None
    # The engine keeps those of all layers in one block.
    if len({(k_TKD.shape[1], max(k_TKD.shape[2], v_TKD.shape[2])) for k_TKD, v_TKD in prefill.captured}) > 1:
        return False
    token_B1 = torch.tensor([each[-1:] for each in sequences])
    position_B1 = torch.tensor([[len(each) - 1] for each in sequences])
    plan = _StepPlan(prefill.captured, position_B1[:, 0].tolist())
    return _equal(hidden_of(model, token_B1, position_B1, plan)[:, 0], expected_BN)


class _StepPlan:
    """Attention of each sequence's newest token over its cached past."""

    layout = (-1, 1)

    def __init__(self, captured: Sequence[tuple[Tensor, Tensor]], position_B: list[int]) -> None:
        """Args: position_B: also the number of captured tokens of each sequence."""
        self._past = [[x_TKD.split(position_B) for x_TKD in pair] for pair in captured]
        self.longest = max(position_B) + 1

    def attend(self, layer: int, q_BH1D: Tensor, k_BK1D: Tensor, v_BK1D: Tensor, look: AttentionSettings) -> Tensor:
        rows = []
        for row, past in enumerate(zip(*self._past[layer], strict=True)):
            k_1KSD, v_1KSD = (
                torch.cat((old.transpose(0, 1), new_BK1D[row]), 1)[None, :, -(look.window or 0) :]
                for old, new_BK1D in zip(past, (k_BK1D, v_BK1D), strict=True)
            )
            rows.append(attend_rows(q_BH1D[row][None], k_1KSD, v_1KSD, visible_B1QS=None, look=look, kernel="Eager"))
        return torch.cat(rows).transpose(1, 2)


def _build_copies(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two models with the same random weights, the second with Orbit's attention and norms."""
    kinds, failed = _kinds(model), ValueError("a small copy has layers of other kinds")
    for config in _small_configs(model.config, kinds):  # type: ignore[arg-type]
        try:
            plain, ours = (_build(type(model), config, attention) for attention in ("eager", IMPLEMENTATION))
            _alone(plain, [3, 4])
        except Exception as error:
            failed = error
            continue
        if set(_kinds(ours)) == set(kinds):
            fuse_norms(ours)
            return plain, ours
    raise failed


def _kinds(model: nn.Module) -> list[Hashable]:
    """Kind of each decoder layer: its modules' names, classes and settings; of numbers only that there is one."""
    kinds: list[Hashable] = []
    for layer in decoder_of(model).layers:
        settings = [
            (name, type(module).__name__, key, value if isinstance(value, bool | str) else type(value).__name__)
            for name, module in layer.named_modules()
            for key, value in {"": "", **vars(module)}.items()
            if isinstance(value, bool | str | int | float | None) and key != "training" and not key.startswith("_")
        ]
        kinds.append(frozenset(settings))
    return kinds


def _small_configs(config: PretrainedConfig, kinds: list[Hashable]) -> Iterator[PretrainedConfig]:
    """Yields a config with the first layer of each kind; then one with all layers up to the last of those, for models
    in which a layer's kind follows from its number.
    """
    firsts = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    if len(firsts) == 1:
        firsts = list(range(min(2, len(kinds))))
    for layers in (firsts, list(range(firsts[-1] + 1))):
        small: Any = copy.deepcopy(config)
        for name, value in vars(config).items():
            if isinstance(value, list | tuple) and len(value) == len(kinds):
                setattr(small, name, type(value)(value[index] for index in layers))
        small.num_hidden_layers = len(layers)
        own = {int(key): value for key, value in (config.to_dict().get("per_layer_config") or {}).items()}
        if own:
            small.per_layer_config = {
                new: own[index] | _cut(own[index]) for new, index in enumerate(layers) if index in own
            }
        _cut_sizes(small)
        yield small


def _cut_sizes(config: Any) -> None:
    """Fewer heads of the same size, so that tables of rotary factors still fit, and narrower layers."""
    # Not getattr: it raises for a field that differs between layers.
    fields = vars(config)
    heads = int(config.num_attention_heads)
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    size = int(fields.get("head_dim") or config.hidden_size // heads)
    config.num_attention_heads = min(kv_heads, HEADS) * min(heads // kv_heads, HEADS)
    config.hidden_size = config.num_attention_heads * size
    for name, value in _cut(fields).items():
        setattr(config, name, value)


def _cut(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: min(fields[name], most) for name, most in CUT.items() if isinstance(fields.get(name), int)}


def _build(kind: Any, config: PretrainedConfig, attention: str) -> nn.Module:
    """A model of this class, whose decoder has random fp32 weights."""
    with init_empty_weights(include_buffers=False):
        model = kind._from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for module in decoder_of(model).modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            value = torch.randn(empty.shape, generator=generator)
            if empty.dim() > 1:
                value *= empty.shape[-1] ** -0.5
            else:
                value = 0.1 * value + (1.0 if name == "weight" else 0.0)
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model.eval()
