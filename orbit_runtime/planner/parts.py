"""Bytes on one device, part by part and phase by phase, for one layout.

Belongs here: the arithmetic. Does not belong here: choosing a layout (`search`), constants (`assumptions`).

Parts have readable names: the same names appear in the table, in `--json` and in messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from orbit_runtime.model_info.gpus import GPUCard
from orbit_runtime.model_info.stages import stage_layers
from orbit_runtime.model_info.weights import ModelFacts, Role, StoredWeight
from orbit_runtime.planner import assumptions as known
from orbit_runtime.planner.activations import (
    KEYS_AND_VALUES,
    Recompute,
    expert_outputs,
    in_key_blocks,
    key_copies,
    live_elements,
    recomputed_elements,
    saved_elements,
)
from orbit_runtime.planner.adapter_size import AdapterSize, adapter_size
from orbit_runtime.planner.job import Job, Machine
from orbit_runtime.planner.layout import Layout

Phase = Literal["load", "rollout", "train", "publish"]
PHASES: tuple[Phase, ...] = ("load", "rollout", "train", "publish")
Copies = Literal["Shared", "Two"]
Parts = dict[str, int]
WIDENED = "base, widened"


@dataclass(frozen=True)
class Setting:
    """Everything that determines how much a device holds."""

    model: ModelFacts
    job: Job
    machine: Machine
    adapter: AdapterSize
    layout: Layout
    copies: Copies
    micro_batch_tokens: int
    recompute: Recompute
    server_gpus: int = 1
    """GPUs of each SGLang server."""
    widened: bool = False
    """Whether the trainer holds linears dense in the compute dtype, so that no pass casts or dequantises them again."""

    @property
    def engine_layout(self) -> Layout:
        """The engine's layout. Our own servers cut experts like the rest; an engine in the trainer's process cuts
        nothing. On the CPU, all parts are in one memory."""
        if self.machine.gpu is None or self.job.engine != "SGLang":
            return Layout()
        return Layout(tensor=self.server_gpus, expert=self.server_gpus, data=self.job.spec.rollout.replicas)

    @property
    def attention_groups(self) -> int:
        """Groups of a server's GPUs, each of which holds the whole attention (`attn-dp-size`)."""
        groups = self.job.engine_arguments.get("attn-dp-size", 1) if self.job.engine == "SGLang" else 1
        return groups if self.engine_layout.tensor % groups == 0 else 1

    @cached_property
    def local(self) -> AdapterSize:
        """The adapter of one of the trainer's ranks, before its layers are divided."""
        layout = self.layout
        return adapter_size(self.model.architecture, self.job, tensor=layout.tensor, expert=layout.expert)

    @property
    def ranks_here(self) -> int:
        """Ranks of the trainer in the memory of one device; on the CPU, all of them."""
        return 1 if self.machine.gpu else self.layout.num_gpus

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in a pass: fp32 on the CPU, BF16 on a GPU."""
        return 2 if self.machine.gpu else 4


@dataclass(frozen=True)
class PartSizes:
    """Parts by phase, and the requested contents of the KV cache."""

    phases: dict[Phase, Parts]
    kv_bytes_per_sequence: int
    """Bytes on this device for one sequence at full length."""
    running: int
    """Most sequences that this device's replica would hold."""

    def total(self, phase: Phase) -> int:
        return sum(self.phases[phase].values())


def size_parts(setting: Setting) -> PartSizes:
    """Bytes on the fullest device."""
    job = setting.job
    trainer, server = _trainer_side(setting), _server_side(setting)
    passes = _times(setting.ranks_here, _training(setting))
    exported = {_named("export", setting): _local_adapter(setting) * 2 * setting.ranks_here}
    per_sequence, running = _kv(setting)
    work = _engine_work(setting)
    alone = job.is_split or job.is_elsewhere
    if not job.samples:
        loading = {"loading buffer": _loading(setting)}
        phases: dict[Phase, Parts] = {
            "load": _merged(trainer.loaded, loading),
            "rollout": {},
            "train": _merged(trainer.resident, passes),
            "publish": _merged(trainer.resident, exported),
        }
    elif job.in_process:
        # Nothing is kept between passes, neither by the engine nor by the trainer.
        work = {"KV cache": per_sequence * running, **work}
        phases = {
            "load": {**trainer.loaded, "loading buffer": _loading(setting)},
            "rollout": {**trainer.resident, "adapter slots": _slots(setting), **_times(job.replicas, work)},
            "train": {
                **trainer.resident, "adapter slots": _slots(setting) // known.ADAPTER_VERSIONS, **passes,
            },
            "publish": {**trainer.resident, "adapter slots": _slots(setting), **exported},
        }  # fmt: skip
    else:
        cache = _times(job.replicas, {"KV cache": per_sequence * running, **work})
        awake = {} if job.is_elsewhere else {**server, **cache}
        beside = {} if alone else awake
        proof = {} if job.is_elsewhere else {"adapter slots, copied": _proof_copies(setting)}
        loading = {"loading buffer": _loading(setting)}
        # A server starts once the trainer has its base and its adapter.
        phases = {
            "load": _merged(trainer.loaded, {} if alone else server, loading),
            # An engine with GPUs of its own proves a publish while it samples.
            "rollout": _merged({} if job.is_split else trainer.resident, awake, proof if job.is_split else {}),
            "train": _merged(trainer.resident, _asleep(setting, beside), passes),
            "publish": _merged(trainer.resident, beside, {} if alone else proof, exported),
        }
    named = {phase: {name: size for name, size in parts.items() if size} for phase, parts in phases.items()}
    return PartSizes(named, per_sequence, running)


@dataclass(frozen=True)
class TrainerMemory:
    loaded: Parts
    """Parts held before the first step."""
    resident: Parts
    """Parts held in every phase, including the optimiser's."""


def _trainer_side(setting: Setting) -> TrainerMemory:
    base = _base(setting, "trainer")
    if setting.job.in_process and not setting.job.is_split:
        # The single copy is the engine's: it also holds what the trainer does not need.
        base = _base(setting, "engine")
    loaded = _times(setting.ranks_here, {**base, **_widened(setting), **_runtime(setting, "trainer")})
    return TrainerMemory(loaded, {**loaded, **_times(setting.ranks_here, _optimizer(setting))})


def _server_side(setting: Setting) -> Parts:
    """Memory that awake SGLang servers hold on a device, except the KV cache and the tensors of a pass."""
    job = setting.job
    if job.in_process or job.is_elsewhere:
        return {}
    base = _times(job.replicas, _base(setting, "engine"))
    slots = {"adapter slots": _slots(setting)}
    return {**base, **_times(job.replicas, {**_runtime(setting, "engine"), **slots})}


def _asleep(setting: Setting, awake: Parts) -> Parts:
    """Memory that a sleeping server still holds on the trainer's device; on a CPU it releases nothing.

    A server that releases its cache also releases what its allocator kept of a pass. It never releases its graphs:
    SGLang would for `SGLANG_MEMORY_SAVER_CUDA_GRAPH`, which its prefill graphs refuse.
    """
    if setting.job.sleep == "None" or setting.machine.gpu is None:
        return awake
    freed: tuple[str, ...] = ("KV cache", "engine workspace")
    if setting.job.sleep == "All":
        freed += ("base (engine)",)
    return {name: size for name, size in awake.items() if not name.startswith(freed)}


def base_bytes(setting: Setting, side: Literal["trainer", "engine"]) -> int:
    """Bytes of one copy of the base on one device."""
    return sum(_base(setting, side).values())


def _times(count: int, parts: Parts) -> Parts:
    return {name: count * size for name, size in parts.items()}


def _merged(*each: Parts) -> Parts:
    """Sums parts by name: both sides have, for example, a process and fragmented memory."""
    merged: Parts = {}
    for parts in each:
        for name, size in parts.items():
            merged[name] = merged.get(name, 0) + size
    return merged


# --- base ---


def _base(setting: Setting, side: Literal["trainer", "engine"]) -> Parts:
    """One copy of the base. If layers are divided: of the fullest stage, or on the CPU, where all stages share one
    memory, of their mean."""
    stages = _stages(setting) if side == "trainer" else 1
    if stages == 1:
        return _base_of(setting, side, None)
    each = [_base_of(setting, side, (stage, stages)) for stage in range(stages)]
    if setting.machine.gpu is None:
        return {name: math.ceil(size / stages) for name, size in _merged(*each).items()}
    return max(each, key=lambda parts: sum(parts.values()))


def _stages(setting: Setting) -> int:
    """Pipeline stages, at most one per layer: more are refused elsewhere."""
    return min(setting.layout.pipeline, setting.model.architecture.num_layers)


def _is_in(stored: StoredWeight, setting: Setting, stage: tuple[int, int] | None) -> bool:
    weight = stored.weight
    if stage is None:
        return True
    if weight.layer is not None:
        return weight.layer in stage_layers(setting.model.architecture.num_layers, *stage)
    is_first, is_last = stage[0] == 0, stage[0] == stage[1] - 1
    if weight.role != "embedding":
        return is_last
    is_tied = not any(other.role == "head" for other in setting.model.architecture.weights)
    return is_first or (is_last and is_tied)


def _base_of(setting: Setting, side: Literal["trainer", "engine"], stage: tuple[int, int] | None) -> Parts:
    """`replicated`: what tensor parallelism leaves whole, such as routers, norms and low-rank down-projections."""
    layout = setting.layout if side == "trainer" else setting.engine_layout
    even = whole = 0.0
    for stored in base_weights(setting.model, side, with_mtp=setting.job.speculates_with_mtp):
        if not _is_in(stored, setting, stage):
            continue
        weight, size = stored.weight, _resident_bytes(stored, setting)
        if weight.role == "routed_expert":
            even += size / layout.expert
            continue
        groups = setting.attention_groups if side == "engine" and weight.role == "attention" else 1
        ways = _ways(stored, setting, layout.tensor // groups)
        if side == "trainer" and weight.role in ("embedding", "head"):
            # Each rank of a trainer holds the whole vocabulary.
            ways = 1
        even += size / layout.tensor
        whole += size / ways - size / layout.tensor
    named = "base" if setting.copies == "Shared" or setting.job.is_split else f"base ({side})"
    return {named: math.ceil(even), f"{named}, replicated": math.ceil(whole)}


def _widened(setting: Setting) -> Parts:
    """What linears held dense take beyond their own bytes: fp32 in place of BF16, or BF16 as saved and as products read
    it; packed bytes stay. With them the output layer, or an embedding that is it."""
    if not setting.widened:
        return {}
    is_tied = not any(each.role == "head" for each in setting.model.architecture.weights)
    head = "embedding" if is_tied else "head"
    return {
        WIDENED: sum(
            stored.num_bytes if stored.format == "BF16" else stored.weight.num_parameters * 4
            for stored in base_weights(setting.model, "trainer")
            if stored.weight.role == head or (stored.weight.is_linear and stored.weight.role != "routed_expert")
        )
    }


def base_weights(
    model: ModelFacts, side: Literal["trainer", "engine"], *, with_mtp: bool = False
) -> Iterator[StoredWeight]:
    """The weights that a side loads: MTP layers only for an engine that speculates; no vision tower for the trainer."""
    left_out: tuple[Role, ...] = ("mtp", "vision") if side == "trainer" else () if with_mtp else ("mtp",)
    return (stored for stored in model.weights if stored.weight.role not in left_out)


def _resident_bytes(stored: StoredWeight, setting: Setting) -> int:
    """Bytes in memory. Our loader keeps norms, other small parameters and all that trains in the compute dtype."""
    if setting.job.spec.adapter.type == "Full":
        return stored.weight.num_parameters * setting.compute_bytes
    small = not stored.weight.is_linear and stored.weight.role != "embedding"
    is_bias = stored.weight.name.endswith(".bias")
    if small and not is_bias:
        return stored.weight.num_parameters * setting.compute_bytes
    return stored.num_bytes


def _ways(stored: StoredWeight, setting: Setting, tensor: int) -> int:
    weight = stored.weight
    if not weight.is_split:
        return 1
    if weight.target in ("k_proj", "v_proj"):
        return min(tensor, setting.model.architecture.kv.heads)
    return tensor


def _loading(setting: Setting) -> int:
    """Bytes of loading: tensors go to the device one at a time, a layer's experts separately."""
    return max(stored.num_bytes // stored.weight.count for stored in setting.model.weights)


# --- adapter ---


def _optimizer(setting: Setting) -> Parts:
    local = _local_adapter(setting)
    return {
        _named("", setting): local * known.MASTER_BYTES,
        "optimizer": _owned_adapter(setting) * known.MOMENT_BYTES,
        "critic": _of_critic(local, setting) * known.MASTER_BYTES,
        "critic's optimizer": _of_critic(_owned_adapter(setting), setting) * known.MOMENT_BYTES,
        "teacher": _teacher(setting),
    }


def _named(what: str, setting: Setting) -> str:
    """Name of a part of what trains."""
    whole = {"": "masters", "export": "model export"}
    return whole[what] if setting.job.spec.adapter.type == "Full" else f"adapter {what}".rstrip()


def _teacher(setting: Setting) -> int:
    """An adapter trained before is in the compute dtype; one that follows the policy has its own masters.
    The size of the former is unknown; the size of the run's own adapter is assumed."""
    teacher, parameters = setting.job.spec.algorithm.teacher, setting.adapter.total
    if teacher is None or teacher.type in ("Base", "Served"):
        return 0
    return parameters * (setting.compute_bytes if teacher.type == "Adapter" else known.MASTER_BYTES)


def _of_critic(adapter: int, setting: Setting) -> int:
    """The critic's parameters where the policy's adapter has `adapter` of its own: an adapter that is divided alike and
    scales with its rank; a head of `hidden_size` weights and a bias, which only the last stage has."""
    job = setting.job
    critic = job.spec.algorithm.decided_critic
    if critic is None:
        return 0
    head = setting.model.architecture.hidden_size + 1
    return math.ceil(adapter * (critic.rank or job.rank) / max(1, job.rank)) + head


def _local_adapter(setting: Setting) -> int:
    """Adapter parameters on one rank, of the largest stage."""
    return math.ceil(setting.local.total * _stage_share(setting))


def _owned_adapter(setting: Setting) -> int:
    """Adapter parameters that one rank has the moments of: the ranks of a stage deal out what they hold in copies."""
    ranks = setting.layout.num_gpus // setting.layout.pipeline
    return math.ceil(setting.adapter.total * _stage_share(setting) / ranks)


def _stage_share(setting: Setting) -> float:
    """The share of the layers that the largest stage holds."""
    stages, layers = _stages(setting), setting.model.architecture.num_layers
    return 1.0 if stages == 1 else len(stage_layers(layers, 0, stages)) / layers


def _slots(setting: Setting) -> int:
    """Bytes of the adapter slots by which the engine multiplies, one per version that it holds."""
    size = setting.adapter
    if setting.job.in_process:
        one = size.total * setting.compute_bytes
        if setting.job.spec.adapter.type == "OFT":
            # R, and the fp32 parameters of every layer, kept for reading back.
            one = size.rotation_elements * setting.compute_bytes + size.written_parameters * known.MASTER_BYTES
        return one * known.ADAPTER_VERSIONS
    ways = 1 if setting.job.experts in ("Shared", "None") else setting.engine_layout.expert
    experts = math.ceil(size.experts / ways)
    elements = size.rotation_elements if setting.job.spec.adapter.type == "OFT" else size.dense + experts
    return elements * setting.compute_bytes * known.SERVER_SLOTS


def _proof_copies(setting: Setting) -> int:
    """Bytes of the slots that a server copies while it proves a publish: the new version's and the standing one's."""
    return _slots(setting) // known.SERVER_SLOTS * known.ADAPTER_VERSIONS


# --- rollout ---


def _kv(setting: Setting) -> tuple[int, int]:
    """(bytes of one full-length sequence on this device, sequences that its replica should hold)."""
    kv, layout = setting.model.architecture.kv, setting.engine_layout
    scale = setting.compute_bytes / 2
    per_token, window = kv.bytes_per_token, kv.bytes_per_sequence
    if setting.job.in_process and kv.own_bytes_per_token is not None:
        per_token, window = kv.own_bytes_per_token, 0
    longest = setting.job.spec.model.max_sequence_length
    positions = in_key_blocks(longest) if setting.job.in_process else longest
    one = (positions * per_token + window) * scale + kv.state_bytes
    # With several attention groups on a server's GPUs, each group holds the keys and values of its own sequences.
    groups = setting.attention_groups
    shares = min(layout.tensor // groups, kv.heads) * layout.pipeline
    replicas = max(1, layout.data * layout.context * groups)
    return math.ceil(one / shares), math.ceil(setting.job.running / replicas)


def server_prefill_tokens(gpu: GPUCard | None) -> int:
    """Prompt tokens of one prefill pass of SGLang if `chunked-prefill-size` is not set."""
    if gpu is None:
        return known.CPU_PREFILL_TOKENS
    return next(tokens for below, tokens in known.SERVER_PREFILL_TOKENS if gpu.usable_bytes < below)


def _engine_work(setting: Setting) -> Parts:
    """A prefill pass: nothing is kept for a backward pass, so one layer's tensors are alive at a time."""
    model, in_process = setting.model.architecture, setting.job.in_process
    prompt = setting.job.spec.model.max_sequence_length * setting.job.running
    chosen = known.PREFILL_TOKENS if in_process else server_prefill_tokens(setting.machine.gpu)
    tokens = min(setting.job.engine_arguments.get("chunked-prefill-size", chosen), prompt)
    # The hidden states, and what each of a token's experts adds to them, are whole on every GPU of a server.
    whole = expert_outputs(model)
    divided = (live_elements(model) - whole) / setting.engine_layout.tensor
    width = setting.compute_bytes
    stream = model.hidden_size * model.streams * (known.STREAM_BYTES if in_process else width)
    return {
        "engine workspace": math.ceil(tokens * ((divided + whole) * width + stream)),
        "dequantisation": _dequantisation(setting) if in_process else 0,
    }


# --- training ---


def _training(setting: Setting) -> Parts:
    model, layout, job = setting.model.architecture, setting.layout, setting.job
    spec, width = job.spec, setting.compute_bytes
    step_tokens = spec.training.prompts_per_step * spec.algorithm.group_size * spec.model.max_sequence_length
    tokens = min(setting.micro_batch_tokens, step_tokens)
    # Before it finishes one pass, the first stage has begun as many passes as there are stages.
    share = layout.context / (_stages(setting) * _stage_share(setting))
    # Policy and critic train in turn: the gradients of one are freed before those of the other exist.
    policy = _local_adapter(setting)
    local = max(policy, _of_critic(policy, setting))
    stream = known.STREAM_BYTES / width
    saved = saved_elements(model, job, setting.recompute, layout.tensor, layout.token_sets, stream=stream)
    again = recomputed_elements(model, job, setting.recompute, layout.tensor, stream=stream)
    computed = tokens * _row_share(setting)
    parts: Parts = {
        "activations": math.ceil(computed * saved * width / share),
        "layer recomputed": math.ceil(computed * again * width / layout.context),
        "gradients": local * known.GRADIENT_BYTES,
        # With `Full`, the rounded weights are the model itself.
        "adapter, rounded": 0 if job.spec.adapter.type == "Full" else local * width,
    }
    if layout.token_sets > 1 and model.num_experts:
        # Tokens of all ranks that divide the same experts, gathered before each layer of experts and not kept.
        parts["activations gathered"] = tokens * model.hidden_size * width * layout.token_sets
    if layout.tensor > 1:
        # All tokens of one part of one layer, in the backward pass too.
        parts["layer's input gathered"] = math.ceil(tokens * model.hidden_size * width / layout.context)
    if layout.context > 1:
        parts["keys and values gathered"] = _gathered_keys(setting, tokens)
    if job.spec.adapter.type == "OFT":
        whole = setting.local.rotation_elements * local // max(1, setting.local.total)
        parts["adapter, rounded"] = whole * (width + known.ROTATION_GRAPH_BYTES)
    if teacher := spec.algorithm.teacher:
        if teacher.type == "Served" and teacher.decided.top_k:
            parts["teacher's tokens"] = tokens * teacher.decided.top_k * known.TOLD_BYTES
        elif not teacher.is_column:
            parts["teacher's states"] = tokens * model.hidden_size * width
        if teacher.type in ("Average", "Lagged"):
            parts["adapter, rounded"] += _local_adapter(setting) * width
    parts["dequantisation"] = _dequantisation(setting)
    rows = min(tokens, max(1, known.LOGIT_ELEMENTS // model.vocab_size))
    parts["logits"] = math.ceil(rows * model.vocab_size * 4 * known.LOGIT_COPIES)
    return parts


def _row_share(setting: Setting) -> float:
    """Tokens that a pass computes for each of a micro-batch's, which counts a prompt once: with rows of their own, the
    completions of a prompt each have it in theirs."""
    spec = setting.job.spec
    passes = setting.model.architecture.passes
    if not passes or "packed" in passes or not setting.job.samples:
        return 1.0
    length, group = spec.model.max_sequence_length, spec.algorithm.group_size
    return group * length / (length + (group - 1) * spec.new_tokens)


def _gathered_keys(setting: Setting, tokens: int) -> int:
    """Bytes of keys and values of other ranks' tokens, held while a layer's backward pass needs them."""
    layout, model = setting.layout, setting.model.architecture
    by_layer: dict[int, int] = {}
    for weight in model.weights:
        if weight.layer is not None and weight.target in KEYS_AND_VALUES:
            by_layer[weight.layer] = by_layer.get(weight.layer, 0) + weight.shape[0]
    widths = by_layer.values() or [0]
    kept = sum(widths) * _stages(setting) * _stage_share(setting) if setting.recompute == "None" else max(widths)
    kept *= key_copies(setting.job)
    return math.ceil(tokens * kept * setting.compute_bytes / layout.tensor * (1 - 1 / layout.context))


def _dequantisation(setting: Setting) -> int:
    """Dense weights alive at once; 0 if every linear multiplies by its packed weights directly."""
    if setting.job.spec.adapter.type == "Full":
        return 0
    width = setting.compute_bytes
    limit = known.DENSE_BYTES["cuda" if setting.machine.gpu else "cpu"]
    dense = experts = 0
    for stored in base_weights(setting.model, "trainer"):
        weight = stored.weight
        if not weight.is_linear or (stored.format == "BF16" and width == 2):
            continue
        one = math.prod(weight.shape) * width
        if weight.role == "routed_expert":
            experts = max(experts, one * math.ceil(weight.count / setting.layout.expert))
        else:
            dense = max(dense, math.ceil(one / setting.layout.tensor))
    budget = known.EXPERT_DENSE_BYTES if setting.machine.gpu else limit
    return max(min(dense, limit), min(experts, budget))


# --- runtime ---


def _runtime(setting: Setting, side: Literal["trainer", "engine"]) -> Parts:
    """Libraries of a side's process, and memory that the allocator cannot use."""
    if setting.machine.gpu is None:
        return {"runtime": known.HOST_PROCESS_BYTES}
    size = known.CONTEXT_BYTES
    layout = setting.layout if side == "trainer" else setting.engine_layout
    if max(layout.num_gpus, setting.layout.num_gpus) > 1:
        size += known.NCCL_BYTES
    is_server = side == "engine" and not setting.job.in_process
    if is_server and setting.job.trainer == "Megatron" and setting.job.sleep != "None":
        size += known.BARE_CONTEXT_BYTES
    graphs = known.GRAPH_BYTES if is_server else 0
    kept = setting.machine.gpu.usable_bytes if side == "trainer" or setting.job.is_split else 0
    margin = 0 if setting.machine.gpu.name in known.MEASURED_GPUS else int(kept * known.MARGIN_FRACTION)
    named = "runtime" if setting.job.in_process else f"runtime ({side})"
    return {
        named: size, "CUDA graphs": graphs, "reserve": int(kept * known.RESERVE_FRACTION),
        "reserve, GPU not measured": margin,
    }  # fmt: skip
