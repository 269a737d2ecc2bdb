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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig

from orbit_runtime.adapters.layer import Selection
from orbit_runtime.errors import ModelError, OrbitError, UnsupportedError
from orbit_runtime.policy.attention import (
    BESIDE_CACHE,
    IMPLEMENTATION,
    PACKED,
    AttentionSettings,
    Mode,
    attend_rows,
    decoder_of,
    hidden_of,
    layers_of,
    run_decoder,
)
from orbit_runtime.policy.modules import fuse_norms
from orbit_runtime.policy.packed import Branch, PackedBatch, PackedPlan, build_packed, gather_rows
from orbit_runtime.policy.recurrent import pack_recurrence
from orbit_runtime.policy.whole_rows import OwnCache, OwnRows, keep_states
from orbit_runtime.storage.cache import Cache

VERSION = 6
"""Changes with what is measured, so that no older answer is used."""
TOLERANCE = 1e-4
"""Largest difference between equal hidden states, relative to the largest of them; rounding gives 1e-6, leaks 1e-2."""
STATES = "its layers keep states beside keys and values"
HEADS = 2
CPU, CPU_INDEX = torch.device("cpu"), torch.empty(0)
CUT = {
    "num_key_value_heads": HEADS, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0, "sliding_window": 4,
    "attention_chunk_size": 4, "attention_window_size": 4, "index_topk": 4, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
"""Fields that do not change the kinds of layers, and their largest value in the copy. Windows are shorter than the
sequences, so that a layer which does not pass its window to attention is found.
"""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the passes of a copy showed."""

    mode: Mode = PACKED
    refused: str = ""
    """Why nothing computes the model rightly; empty if `mode` does."""


def check_rope(config: PretrainedConfig, longest: int, where: str) -> None:
    """
    Args:
        longest: maximum length of a sequence.

    Raises:
        ModelError: the model has no rotary angles.
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
        if isinstance(base := rope.get("rope_theta"), int | float) and base <= 0:
            raise ModelError(f"rope_theta is {base}: rotary angles need more than 0", where=where, fix="correct it")
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
        if known := cache.load_listing(key):
            return Behaviour(Mode(**known | {"uncalled": tuple(known["uncalled"])}))
    found = measure(model, longest)
    if not found.refused:
        with suppress(OSError):
            cache.save_listing(key, asdict(found.mode))
    return found


def measure(model: nn.Module, longest: int) -> Behaviour:
    """
    Args:
        model: transformers' modules; their parameters need no storage.
        longest: maximum length of a sequence.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            return _Probe(model, longest).measure()
        except Exception as error:  # the code of a family that Orbit does not know raises anything
            return Behaviour(refused=_told(error))


def _told(error: Exception) -> str:
    if isinstance(error, OrbitError):
        return f"{error.where}: {error.message}" if error.where else error.message
    lines = str(error).strip().splitlines() or [""]
    return f"its code raises {type(error).__name__}: {lines[0]}"


class _Probe:
    """Passes over sequences of the prefixes and continuations below, the first two of which share a prefix."""

    def __init__(self, model: nn.Module, longest: int) -> None:
        self._config, self._kind = _small_copy(model), type(model)
        self._longest = longest
        tokens = torch.randint(3, CUT["vocab_size"], (40,), generator=torch.Generator().manual_seed(1)).tolist()
        self._branches = [
            Branch(0, tokens[:7], tokens[7:17]),
            Branch(0, tokens[:7], tokens[17:23]),
            Branch(1, tokens[23:27], tokens[27:40]),
        ]
        self._sequences = [[*each.prefix_T, *each.continuation_T] for each in self._branches]
        plain = _build(self._kind, self._config, "eager")
        called: set[str] = set()
        linears = {name: each for name, each in decoder_of(plain).named_modules() if isinstance(each, nn.Linear)}
        for name, linear in linears.items():
            linear.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        self._alone = [_alone(plain, each) for each in self._sequences]
        """transformers' own passes over each sequence."""
        self._of_targets = [
            hidden_SN[len(each.prefix_T) - 1 : -1] for each, hidden_SN in zip(self._branches, self._alone, strict=True)
        ]
        self._plain = plain
        self._uncalled = tuple(sorted({name.rpartition(".")[2] for name in linears.keys() - called}))

    def measure(self) -> Behaviour:
        if not _equal(_alone(self._plain, self._sequences[2][:9]), self._alone[2][:9]):
            return Behaviour(refused="its hidden states at a token depend on later tokens")
        sequence = self._sequences[0]
        try:
            run_decoder(self._plain, torch.tensor([sequence]), _far(len(sequence), self._longest))
        except IndexError:
            return Behaviour(refused=f"its table of positions is shorter than {self._longest} tokens")
        logits = self._logits()
        if logits is None:
            return Behaviour(refused="its logits are not those of its output layer, scaled or capped")
        if pack_recurrence(self._plain) and not (
            _tried(partial(self._why_not_packed, BESIDE_CACHE)) or _tried(partial(self._why_not_cached, BESIDE_CACHE))
        ):
            return Behaviour(replace(logits, decode="cache", attention=BESIDE_CACHE, why=STATES))
        why = _tried(self._why_not_packed) or _tried(self._why_not_pages)
        if not why:
            return Behaviour(replace(logits, why=""))
        for attention in ("sdpa", "eager"):
            mode = replace(logits, rows="padded", decode="cache", attention=attention, why=why)
            if _tried(partial(self._why_not_padded, attention)):
                continue
            told = _tried(partial(self._why_not_cached, attention))
            return Behaviour(mode if not told else replace(mode, decode="whole", why=f"{why}; {told}"))
        return Behaviour(replace(logits, rows="single", decode="whole", attention="eager", why=why))

    def _logits(self) -> Mode | None:
        """How its logits follow from its output layer's results; None if in no way that is known."""
        hidden_SN = self._alone[0]
        made_SV = self._plain.get_output_embeddings()(hidden_SN)  # type: ignore[operator]
        (given_SV,) = self._plain(input_ids=torch.tensor(self._sequences[:1]), use_cache=False).logits
        numbers = {
            name: float(value)
            for name, value in vars(self._config).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        caps = [None, *(value for name, value in numbers.items() if "softcap" in name or "soft_cap" in name)]
        scales = [1.0, *(each for value in numbers.values() if value > 0 for each in (value, 1 / value))]
        for scale in scales:
            for cap in caps:
                if _equal(Mode(scale=scale, cap=cap).shaped(made_SV), given_SV):
                    return Mode(scale=scale, cap=cap, uncalled=self._uncalled)
        return None

    def _why_not_packed(self, attention: str = IMPLEMENTATION) -> str:
        ours = _build(self._kind, self._config, attention)
        if attention == IMPLEMENTATION and not ours._supports_attention_backend:
            return f"the attention of {self._kind.__name__} cannot be chosen"
        fuse_norms(ours)
        packed = _Watched(build_packed(self._branches, CPU))
        if not _equal(packed.hidden(ours), torch.cat(self._of_targets)):
            return "sequences that share a row change each other, so more than attention connects their tokens"
        batch = build_packed([self._branches[2], Branch(2, self._sequences[0][:3], (0,))], CPU)
        longest, position_T = max(self._longest, batch.longest), batch.position_T.clone()
        position_T[-1] = longest - 1
        far = _Watched(replace(batch, position_T=position_T, longest=longest))
        if not _equal(far.hidden(ours)[:-1], self._of_targets[2]):
            return "a sequence's hidden states depend on the longest sequence of the pass"
        return ""

    def _why_not_pages(self) -> str:
        ours = _build(self._kind, self._config, IMPLEMENTATION)
        fuse_norms(ours)
        packed = _Watched(build_packed(self._branches, CPU))
        packed.hidden(ours)
        if packed.order != list(range(len(layers_of(ours)))):
            return "its layers do not call attention exactly once each"
        last_BN = torch.stack([hidden_SN[-1] for hidden_SN in self._alone[1:]])
        if not _is_cached_rightly(ours, self._sequences[1:], last_BN):
            return "a step from pages of keys and values is not what a pass over the whole sequence computes"
        return ""

    def _why_not_padded(self, attention: str) -> str:
        model = _build(self._kind, self._config, attention)
        fuse_norms(model)
        hidden_TN = OwnRows(build_packed(self._branches, CPU)).hidden(partial(run_decoder, model), Selection())
        batch = build_packed(self._branches, CPU)
        longer, shorter = self._sequences[:2]
        token_BS = torch.tensor([longer, shorter + [0] * (len(longer) - len(shorter))])
        position_BS = torch.cat((_far(len(longer), self._longest), torch.arange(len(longer))[None]))
        beside_SN = run_decoder(model, token_BS, position_BS)[1, : len(shorter)]
        if _equal(gather_rows(hidden_TN, batch.target_source_R), torch.cat(self._of_targets)) and _equal(
            beside_SN, self._alone[1]
        ):
            return ""
        return "rows of one pass change each other"

    def _why_not_cached(self, attention: str) -> str:
        """Prompts join the batch at different times and have different lengths; then two tokens are decoded, and a row
        leaves in between."""
        model = _build(self._kind, self._config, attention)
        fuse_norms(model)
        decoder, cache = partial(run_decoder, model), OwnCache(self._config)
        for first, sequences in ((0, self._sequences[1:]), (2, self._sequences[:1])):
            batch = build_packed([Branch(row, each[:-2], (0,)) for row, each in enumerate(sequences)], CPU)
            plan = cache.prefill(batch, None)
            plan.hidden(decoder, Selection())
            cache.keep_prompts(first, torch.arange(len(sequences)), CPU_INDEX, CPU_INDEX, plan)
        rows = [1, 2, 0]
        for step in (2, 1):
            if step == 1:
                cache.move_rows(torch.tensor([2]), torch.tensor([1]), 0)
                rows = [1, 0]
            tokens_B = torch.tensor([self._sequences[row][-step] for row in rows])
            positions_B = np.array([len(self._sequences[row]) - step for row in rows])
            found_BN = cache.plan(tokens_B, positions_B, None).hidden(decoder, Selection())
            if not _equal(found_BN, torch.stack([self._alone[row][-step] for row in rows])):
                return "a step from its own cache is not what a pass over the whole sequence computes"
        return ""


def _far(length: int, longest: int) -> Tensor:
    """Positions `[1, S]` of a sequence whose last token is the last one allowed."""
    return torch.tensor([[*range(length - 1), longest - 1]])


def _tried(check: Callable[[], str]) -> str:
    """Why not: what the check says or raises; empty if neither."""
    try:
        return check()
    except Exception as error:  # the code of a family that Orbit does not know raises anything
        return _told(error)


def _alone(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """`[S, N]` of transformers' own pass over one sequence."""
    return run_decoder(model, torch.tensor([tokens]), torch.arange(len(tokens))[None])[0]


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


def _small_copy(model: nn.Module) -> PretrainedConfig:
    """A small configuration whose model has layers of the same kinds, and runs."""
    kinds, failed = _kinds(model), ValueError("a small copy has layers of other kinds")
    for config in _small_configs(model.config, kinds):  # type: ignore[arg-type]
        try:
            small = _build(type(model), config, "eager")
            found = set(_kinds(small))
            _alone(small, [3, 4])
        except Exception as error:
            failed = error  # type: ignore[assignment]
            continue
        if found == set(kinds):
            return config
    raise failed


def _kinds(model: nn.Module) -> list[Hashable]:
    """Kind of each decoder layer: its modules' names, classes and settings; of numbers only that there is one."""
    kinds: list[Hashable] = []
    for layer in layers_of(model):
        settings = [
            (name, type(module).__name__, key, value if isinstance(value, bool | str) else type(value).__name__)
            for name, module in layer.named_modules()
            for key, value in {"": "", **vars(module)}.items()
            if isinstance(value, bool | str | int | float | None) and key != "training" and not key.startswith("_")
        ]
        kinds.append(frozenset(settings))
    return kinds


def _small_configs(config: PretrainedConfig, kinds: list[Hashable]) -> Iterator[PretrainedConfig]:
    """With the first layer of each kind; then with all layers up to the last of those, for models in which a layer's
    kind follows from its number. Last with the model's own width, for those whose sizes depend on each other."""
    firsts = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    if len(firsts) == 1:
        firsts = list(range(min(2, len(kinds))))
    every = list(range(firsts[-1] + 1))
    for layers, is_narrow in ((firsts, True), (every, True), (firsts, False), (every, False)):
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
        _cut_sizes(small, is_narrow)
        yield small


def _cut_sizes(config: Any, is_narrow: bool) -> None:
    """Fewer heads of the same size, so that tables of rotary factors still fit, and narrower layers."""
    # Not getattr: it raises for a field that differs between layers.
    fields = vars(config)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if heads and is_narrow:
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
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            value = torch.randn(empty.shape, generator=generator)
            if empty.dim() > 1:
                value *= empty.shape[-1] ** -0.5
            else:
                value = 0.1 * value + (1.0 if name == "weight" else 0.0)
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    keep_states(model)
    return model.eval()
