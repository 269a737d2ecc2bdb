"""The plan: what a run needs on a machine, whether it fits, what limits it, and what to change if it does not fit.

Belongs here: the result and its assembly. Does not belong here: bytes of a part (`parts`), choosing (`search`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import assumptions as known
from orbit_runtime.planner.activations import Recompute
from orbit_runtime.planner.adapter_size import AdapterSize, adapter_size
from orbit_runtime.planner.assumptions import GIB
from orbit_runtime.planner.job import Devices, Job, Machine, build_job
from orbit_runtime.planner.layout import Layout, objection
from orbit_runtime.planner.parts import PHASES, WIDENED, Copies, Parts, Phase, base_bytes
from orbit_runtime.planner.search import Candidate, advise, capacity_of, choose
from orbit_runtime.planner.serving import ServerMemory, find_objection, find_refusal, server_gpus, server_memory
from orbit_runtime.planner.support import Problem, find_problems
from orbit_runtime.planner.support.combinations import Combination, Support, find_support
from orbit_runtime.planner.support.kernels import EXCHANGE, choose_kernels
from orbit_runtime.planner.support.manifests import MANIFESTS, TAUGHT, check_token_ids, engine_problems, read_manifest
from orbit_runtime.planner.support.served import argument_problems, served_problems
from orbit_runtime.spec import OrbitRun


@dataclass(frozen=True)
class Plan:
    """Sizes are bytes on the fullest device; on the CPU, the device is main memory."""

    run: str
    model: str
    source: str
    precision: str
    machine: str
    trainer: str
    engine: str
    capacity: int | None
    layout: Layout
    micro_batch_tokens: int
    recompute: Recompute
    base_copies: Copies
    adapter: AdapterSize
    phases: dict[Phase, Parts]
    kv_tokens: int
    """Tokens that the KV cache of one replica holds."""
    kv_sequences: int
    """Full-length sequences that one replica holds; further completions wait."""
    binding: Phase
    """The phase with the least room."""
    host_bytes: int
    disk_bytes: int
    download_bytes: int
    servers: int
    """Number of SGLang servers that Orbit starts."""
    server_gpus: int
    """GPUs of each server; on the CPU, its processes."""
    devices: Devices
    server_memory: ServerMemory | None
    """Memory settings of each server on a GPU; None without servers, or if the memory is unknown."""
    support: Support
    notes: tuple[str, ...]
    cautions: tuple[str, ...]
    """Notes that are repeated when a run starts: GPUs that nothing uses, an engine that rounds otherwise than the
    trainer.
    """
    problems: tuple[Problem, ...]
    waits: bool = False
    """Whether an engine in the trainer's process samples fewer completions at a time than were asked for."""
    is_lowered: bool = False
    """Whether memory for sequences of full length is short, so that it matters how long they really are."""

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def is_too_big(self) -> bool:
        """Whether the run exceeds the devices' memory, whatever else is wrong."""
        return self.capacity is not None and any(self.total(phase) > self.capacity for phase in self.phases)

    @property
    def download_seconds(self) -> float:
        return self.download_bytes / known.DOWNLOAD_BYTES_PER_SECOND

    def total(self, phase: Phase) -> int:
        return sum(self.phases[phase].values())

    @property
    def server_devices(self) -> tuple[range, ...]:
        """GPUs of each server, numbered over the machine; empty on the CPU."""
        return self.devices.servers(self.servers, self.server_gpus) if len(self.devices.engine) else ()

    @property
    def widens_base(self) -> bool:
        """Whether a torch trainer on a CPU holds its linears dense in the compute dtype."""
        return WIDENED in self.phases["load"]

    def base_bytes(self) -> int:
        """Bytes of one copy on one device, without what tensor parallelism leaves whole."""
        train = self.phases["train"]
        return train.get("base", train.get("base (trainer)", 0))

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes everywhere."""
        fields = asdict(self)
        for problem in fields["problems"]:
            del problem["is_limit"]
        del fields["waits"], fields["is_lowered"]
        fields["phases"] = {phase: {**parts, "total": self.total(phase)} for phase, parts in self.phases.items()}
        devices = {
            "trainer": list(self.devices.trainer),
            "servers": [list(gpus) for gpus in self.server_devices],
        }
        return {
            **fields, "devices": devices, "fits": self.fits, "download_seconds": round(self.download_seconds, 1),
        }  # fmt: skip


def plan(
    run: OrbitRun, model: ModelFacts, machine: Machine, *, may_choose: bool = True, devices: Devices | None = None
) -> Plan:
    """Plans a run. Pure. `problems` lists what does not fit or is not supported; only a wrong manifest raises.

    Args:
        may_choose: whether a micro-batch that the manifest leaves open may be lowered until it fits.
        devices: the devices, if they differ from what the layout makes of the machine: a trainer may use fewer.

    Raises:
        ManifestError: the precision is not the checkpoint's, or a target, rank or block size suits no layer.
    """
    job = build_job(run, machine, may_choose=may_choose, devices=devices)
    adapter = size_adapter(job, model)
    gpus = len(job.devices.engine)
    size, refusal = server_gpus(model, job, gpus), find_refusal(model, job, gpus)
    choice = choose(model, job, machine, adapter, size)
    support = find_support(_combination(job, model, machine))
    host, disk = _host_bytes(choice, machine), _disk_bytes(model, job, adapter)
    problems = (
        *find_problems(MANIFESTS, read_manifest(run.spec, model, job.trainer)),
        *_unsupported(support),
        *(() if support.state == "refused" else served_problems(model, job, machine)),
        *islice((*engine_problems(run.spec, job.engine), *find_problems(TAUGHT, run.spec)), 1),
        *(() if refusal is None else (Problem(refusal.message, refusal.where or "spec", refusal.fix or ""),)),
        *_copies_problem(job),
        *division_problems(model, job, choice.setting.layout, machine),
        *argument_problems(model, job, machine, size),
        *_too_big(choice, model, machine),
        *_short(machine.host_bytes if machine.gpu else None, host, "main memory", "placement.resources.memory"),
        *_short(machine.disk_bytes, disk, "disk", "placement.modelCache.sizeLimit"),
    )
    cautions = (*_of_kernels(model, job, machine), *_idle(model, job, size, gpus))
    sizes, binding = choice.sizes, choice.binding
    per_token = sizes.kv_bytes_per_sequence / job.spec.model.max_sequence_length
    kv = sizes.phases["rollout"].get("KV cache", 0)
    waits = job.samples and job.in_process and kv < sizes.running * sizes.kv_bytes_per_sequence
    fewer = waits or choice.setting.micro_batch_tokens < job.spec.training.micro_batch_tokens
    full = job.spec.model.max_sequence_length
    unknown = f"every sequence is counted with {full} tokens: a run, which knows its prompts, may need less"
    is_open = job.samples and run.spec.rollout.sampling.max_new_tokens is None
    undecided = f"rollout.sampling.maxNewTokens is unknown until the run has read its prompts: below {full}"
    notes = (
        *_notes(choice, model, job, machine, support),
        *[unknown] * (fewer and job.in_process), *[undecided] * is_open, *cautions,
    )  # fmt: skip
    return Plan(
        run=run.name, model=model.name, source=model.source, precision=model.precision, machine=machine.name,
        trainer=job.trainer, engine=job.engine, capacity=capacity_of(machine), layout=choice.setting.layout,
        micro_batch_tokens=choice.setting.micro_batch_tokens, recompute=choice.setting.recompute,
        base_copies=choice.setting.copies, adapter=adapter,
        phases=sizes.phases, kv_tokens=int(kv / per_token) if per_token else 0,
        kv_sequences=kv // sizes.kv_bytes_per_sequence if sizes.kv_bytes_per_sequence else 0, binding=binding,
        servers=job.spec.rollout.replicas if job.engine == "SGLang" else 0, server_gpus=size, devices=job.devices,
        server_memory=server_memory(choice),
        host_bytes=host, disk_bytes=disk, download_bytes=model.checkpoint_bytes, support=support, notes=notes,
        cautions=cautions, problems=problems, waits=waits,
        is_lowered=fewer or (job.spec.training.recompute == "Auto" and choice.setting.recompute != "None"),
    )  # fmt: skip


def check_fits(made: Plan) -> None:
    """Raises `UnsupportedError` (78) with the first problem, and the others in its message, if there are any."""
    if made.problems:
        first, *others = made.problems
        message = "; ".join([first.message, *(other.message for other in others)])
        raise UnsupportedError(message, where=first.where, fix=first.fix)


def size_adapter(job: Job, model: ModelFacts) -> AdapterSize:
    """The size of the adapter, if the manifest does not contradict the model.

    Raises:
        ManifestError: see `plan`.
    """
    if job.spec.model.precision not in ("Auto", model.precision):
        raise ManifestError(
            f"the manifest says {job.spec.model.precision}, the checkpoint is {model.precision} ({model.name})",
            where="spec.model.precision",
            fix=f"write {model.precision} or Auto, or name another checkpoint in spec.model.uri",
        )
    check_token_ids(job.spec, model.architecture.vocab_size)
    return adapter_size(model.architecture, job)


def _combination(job: Job, model: ModelFacts, machine: Machine) -> Combination:
    targets = job.spec.adapter.targets or model.architecture.default_targets
    experts = job.experts if model.architecture.num_experts else "None"
    teacher = job.spec.algorithm.teacher
    return Combination(
        model.precision, model.architecture.family, job.spec.adapter.type, experts, job.engine, job.trainer,
        machine.num_gpus,
        job.spec.rollout.deterministic, any(target.rpartition(".")[2] == "down_proj" for target in targets),
        machine.gpu.capability if machine.gpu else None, teacher is not None and not teacher.is_on_ranks,
        job.spec.model.compute_precision == "FP32",
    )  # fmt: skip


def _unsupported(support: Support) -> list[Problem]:
    if support.state != "refused":
        return []
    return [Problem("; ".join(support.reasons), f"spec.{support.where}", support.fix, is_limit=True)]


def _copies_problem(job: Job) -> list[Problem]:
    if job.spec.placement.base_copies != "Shared" or job.in_process or job.is_elsewhere:
        return []
    message = "the trainer and SGLang's servers are processes of their own, and each holds the base"
    return [Problem(message, "spec.placement.baseCopies", "write Auto or Two, or rollout.engine: Torch")]


def division_problems(model: ModelFacts, job: Job, layout: Layout, machine: Machine) -> list[Problem]:
    """Obstacles to dividing a model among ranks like this; none if a single process trains."""
    if job.trainer == "Torch":
        return []
    gpus = len(job.devices.trainer)
    why = objection(model, job, layout)
    if why is None and machine.gpu is not None and layout.num_gpus != gpus:
        why = f"the sizes are for {layout.num_gpus} ranks, but the trainer has {gpus} GPUs"
    if why is None and machine.nodes > 1 and machine.node_gpus % layout.tensor:
        why = f"the parts of a matrix, {layout.tensor}, must stay on one node, which has {machine.node_gpus} GPUs"
    if why is None:
        return []
    message = f"{model.name} cannot be divided like this: {why}"
    fix = "leave the block out, and the planner chooses"
    return [Problem(message, "spec.training.parallel", fix, is_limit=True)]


def _idle(model: ModelFacts, job: Job, size: int, gpus: int) -> list[str]:
    """Notes on GPUs that servers leave unused because the model cannot be cut over all of them."""
    servers = job.spec.rollout.replicas
    if job.engine != "SGLang" or job.spec.rollout.tensor_parallel is not None or servers * size >= gpus:
        return []
    why = find_objection(model, job, gpus // servers, gpus) or f"{servers} servers share them evenly"
    return [f"{gpus - servers * size} of {gpus} GPUs are unused: {why}"]


def _too_big(choice: Candidate, model: ModelFacts, machine: Machine) -> list[Problem]:
    capacity, phase = capacity_of(machine), choice.binding
    if choice.fits or capacity is None:
        return []
    needed = choice.needed(phase)
    device = f"one {machine.gpu.name}" if machine.gpu else "this machine"
    biggest = sorted(choice.sizes.phases[phase].items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in biggest)
    message = (
        f"{model.name} needs {needed / GIB:.1f} GiB in phase {phase}, {device} has {capacity / GIB:.1f}: "
        f"{(needed - capacity) / GIB:.1f} GiB too much ({parts})"
    )
    where = "spec.placement.gpuProduct" if machine.gpu else "spec.model.uri"
    return [Problem(message, where, *advise(choice, machine))]


def _short(has: int | None, needs: int, what: str, field: str) -> list[Problem]:
    if has is None or needs <= has:
        return []
    message = f"the run needs {needs / GIB:.1f} GiB of {what}, {has / GIB:.1f} are available"
    return [Problem(message, f"spec.{field}", f"give it at least {needs / GIB:.0f} GiB")]


def _notes(choice: Candidate, model: ModelFacts, job: Job, machine: Machine, support: Support) -> list[str]:
    notes: list[str] = []
    setting = choice.setting
    if support.state in ("planned", "missing"):
        notes += support.reasons
    if setting.micro_batch_tokens < job.spec.training.micro_batch_tokens:
        notes.append(
            f"{job.spec.training.micro_batch_tokens} tokens a micro-batch do not fit: {setting.micro_batch_tokens} do"
        )
    if job.spec.training.recompute == "Auto" and setting.recompute != "None" and choice.fits:
        notes.append(f"the memory of a backward pass does not fit: training.recompute is {setting.recompute}")
    held = choice.sizes.phases["rollout"].get("KV cache", 0) // max(1, choice.sizes.kv_bytes_per_sequence)
    if job.samples and held < choice.sizes.running:
        notes.append(f"the KV cache holds {held} of {choice.sizes.running} completions at full length; the others wait")
    left_out = sum(stored.num_bytes for stored in model.weights if stored.weight.role == "mtp")
    if left_out and not job.speculates_with_mtp:
        notes.append(f"the MTP layer, {left_out / GIB:.1f} GiB of the files, is not loaded: nothing speculates with it")
    if job.engine_arguments and job.engine == "SGLang":
        notes.append("rollout.engineArguments are passed to SGLang as they are: not run on hardware")
    if model.architecture.passes and "packed" not in model.architecture.passes:
        notes.append(f"{model.architecture.passes}; activations are those of sequences at full length, without padding")
    if model.unknown:
        notes.append(f"{len(model.unknown)} tensors are not of this family, counted as they are: {model.unknown[0]} …")
    return notes


def _of_kernels(model: ModelFacts, job: Job, machine: Machine) -> Iterator[str]:
    if machine.gpu is None or not job.samples or job.engine != "SGLang":
        return
    kernels = choose_kernels(
        model,
        job.spec.model.activation_precision,
        adapts_experts=job.spec.adapter.type == "LoRA" and job.experts != "None",
        engine_arguments=job.engine_arguments,
    )
    if kernels.rounded:
        yield (
            f"SGLang rounds the inputs of {' and '.join(kernels.rounded)} before it multiplies, the trainer does not: "
            "parity measures the difference. Not run on hardware"
        )
    if kernels.requantised:
        yield (
            f"with `{EXCHANGE}` SGLang quantises the base's FP8 anew on Blackwell, and samples from another base than "
            "the one that is trained: leave it out to keep the file's. Not run on hardware"
        )


def _host_bytes(choice: Candidate, machine: Machine) -> int:
    """Main memory beside the GPUs, on the node that needs most; on the CPU it is the device itself."""
    setting = choice.setting
    if machine.gpu is None:
        return max(choice.sizes.total(phase) for phase in PHASES)
    job = setting.job
    served = job.spec.rollout.replicas * setting.server_gpus if job.engine == "SGLang" else 0
    gathered = setting.adapter.total * (known.CHECKPOINT_BYTES + 2)
    # A server that releases its weights keeps a copy of them in main memory.
    backup = served * base_bytes(setting, "engine") if job.sleep == "All" else 0
    # Each process of a server joins gate and up of the adapters that it has loaded, in memory of its own.
    loaded = served * known.ADAPTER_VERSIONS * setting.adapter.written_parameters * 2
    # With several nodes, the first has the servers; each of the others has ranks.
    ranks = max(1, setting.layout.num_gpus)
    processes = ranks + served if machine.nodes == 1 else max(machine.node_gpus, served)
    return processes * known.HOST_RANK_BYTES + gathered + backup + loaded


def _disk_bytes(model: ModelFacts, job: Job, adapter: AdapterSize) -> int:
    """The model's files, the kept checkpoints and as many published adapters."""
    kept = job.spec.checkpoint.keep + 1
    best = job.spec.checkpoint.keep_best.count if job.spec.evaluation.every_steps else 0
    return model.checkpoint_bytes + (kept * (known.CHECKPOINT_BYTES + 2) + best * 2) * adapter.total
