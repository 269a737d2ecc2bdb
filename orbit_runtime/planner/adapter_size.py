"""Counts the parameters of an adapter before anything is allocated.

LoRA of a linear: `r (in + out)`. OFT of a distinct input: `in (b - 1) / 2`, shared by projections with the same input.
Experts of a layer: `PerExpert`, one each; `Shared`, one for all; `SharedOuter`, one for the side that faces the hidden
state (LoRA: A of gate and up, B of down; OFT: the input of gate and up) and one each for the inner side; `None`, none.

A rank that holds a part of a matrix holds that part's share of what faces the end that is cut; what faces the other end
is whole on every rank.

Belongs here: counting. Does not belong here: bytes (`parts`), the adapters themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from orbit_runtime.errors import ManifestError
from orbit_runtime.model_info.weights import Architecture, Weight
from orbit_runtime.planner.job import Job

LEFT_OUT = ("mtp", "vision")
CUT_BY_COLUMNS = ("o_proj", "down_proj")
"""Linears that write the hidden state; other divided linears are cut by rows."""
DIVIDED = ("attention", "dense_mlp", "shared_expert")
"""Roles of weights that tensor parallelism cuts; experts are distributed whole."""


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Parameters of the adapter; `experts` counts those of routed experts."""

    dense: int
    experts: int
    rotation_elements: int
    """OFT: elements of R over all distinct inputs, by which an engine multiplies; 0 for LoRA."""
    written_parameters: int
    """Parameters as published: OFT writes a shared rotation once for each layer that shares it."""
    num_layers: int
    """Linears that get an adapter; all experts of a layer count once."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


def adapted_weights(model: Architecture, job: Job) -> list[Weight]:
    """The weights that get an adapter. Raises `ManifestError` for a target that names nothing."""
    linears = [w for w in model.weights if w.is_linear and w.role not in LEFT_OUT]
    names = {w.target for w in linears}
    targets = job.spec.adapter.targets or model.default_targets
    if model.passes and not job.spec.adapter.targets:
        targets = tuple(each for each in targets if any(_names(each, w) and _suits(w, job) for w in linears))
    for index, target in enumerate(targets):
        if not any(_names(target, w) for w in linears):
            near = get_close_matches(target, names, n=1)
            raise ManifestError(
                f"`{target}` matches no linear layer of a {model.family} model",
                where=f"spec.adapter.targets[{index}]",
                fix=(f"did you mean `{near[0]}`? " if near else "")
                + f"This family's usual targets: [{', '.join(model.default_targets)}]",
            )
    chosen = [w for w in linears if any(_names(target, w) for target in targets)]
    return [w for w in chosen if w.role != "routed_expert" or job.experts != "None"]


def adapter_size(model: Architecture, job: Job, *, tensor: int = 1, expert: int = 1) -> AdapterSize:
    """The adapter's parameters; with `Full`, all of the model's. Raises `ManifestError` also for a rank or block size
    that a layer cannot have.

    Args:
        tensor, expert: into how many parts matrices and the experts of a layer are divided: those of one rank are
            counted.
    """
    if job.spec.adapter.type == "Full":
        count = model.num_parameters()
        return AdapterSize(count, 0, 0, count, sum(w.is_linear and w.role not in LEFT_OUT for w in model.weights))
    weights = adapted_weights(model, job)
    _check_sizes(weights, job)
    dense = [w for w in weights if w.role != "routed_expert"]
    experts = [w for w in weights if w.role == "routed_expert"]
    if job.spec.adapter.type == "LoRA":
        count = sum(job.rank * sum(cut_shape(w, tensor)) for w in dense)
        with_experts = sum(_lora_experts(w, model, job, w.count // expert) for w in experts)
        return AdapterSize(count, with_experts, 0, count + with_experts, len(weights))
    each = (job.rank - 1) / 2

    def copies(weight: Weight) -> int:
        """Number of R for an input of a layer's experts."""
        return 1 if _is_shared(weight, model, job) else weight.count // expert

    dense_width = sum(cut_shape(w, tensor)[-1] for w in _inputs(dense))
    expert_width = sum(w.shape[-1] * copies(w) for w in _inputs(experts))
    written = sum(cut_shape(w, tensor)[-1] for w in dense) + sum(w.shape[-1] * copies(w) for w in experts)
    return AdapterSize(
        int(dense_width * each),
        int(expert_width * each),
        (dense_width + expert_width) * job.rank,
        int(written * each),
        len(weights),
    )


def cut_shape(weight: Weight, tensor: int) -> tuple[int, int]:
    """`(out, in)` of one rank's part of a linear that is no routed expert."""
    out, into = weight.shape
    if not weight.is_split or weight.role not in DIVIDED:
        return out, into
    return (out, into // tensor) if weight.target in CUT_BY_COLUMNS else (out // tensor, into)


def _names(target: str, weight: Weight) -> bool:
    return target in (weight.target, weight.module) or weight.module.endswith(f".{target}")


def _suits(weight: Weight, job: Job) -> bool:
    """Whether an adapter of this rank or block size can be on the linear."""
    return weight.shape[-1] % job.rank == 0 if job.spec.adapter.type == "OFT" else job.rank <= min(weight.shape)


def _check_sizes(weights: list[Weight], job: Job) -> None:
    """A size that the manifest does not write is not at fault there: the model asks for another than the usual."""
    lora, oft = job.spec.adapter.lora, job.spec.adapter.oft
    for weight in weights:
        out, into = weight.shape
        if lora is not None and lora.rank > min(out, into):
            raise ManifestError(
                f"rank {lora.rank} is more than {weight.module} has, which is [{out}, {into}]",
                where="spec.adapter.lora.rank" if "rank" in lora.model_fields_set else "spec.model.uri",
                fix=f"write at most {min(out, into)} in spec.adapter.lora.rank, or leave the module out of "
                "spec.adapter.targets",
            )
        if oft is not None and into % oft.block_size:
            raise ManifestError(
                f"blocks of {oft.block_size} do not divide the {into} input features of {weight.module}",
                where="spec.adapter.oft.blockSize" if "block_size" in oft.model_fields_set else "spec.model.uri",
                fix=f"write a divisor of {into} in spec.adapter.oft.blockSize, or leave the module out of "
                "spec.adapter.targets",
            )


def faces_outside(weight: Weight, model: Architecture) -> bool:
    """Whether the weight reads the hidden state, as gate and up do."""
    return weight.input.endswith(".in") and weight.shape[-1] == model.hidden_size


def _lora_experts(weight: Weight, model: Architecture, job: Job, count: int) -> int:
    """Args: count: experts that have their own."""
    out, into = weight.shape
    if job.experts == "Shared":
        return job.rank * (out + into)
    if job.experts == "PerExpert":
        return job.rank * (out + into) * count
    outer, inner = (into, out) if faces_outside(weight, model) else (out, into)
    return job.rank * (outer + inner * count)


def _is_shared(weight: Weight, model: Architecture, job: Job) -> bool:
    """OFT: whether all experts of a layer have one R for this input."""
    return job.experts == "Shared" or (job.experts == "SharedOuter" and faces_outside(weight, model))


def _inputs(weights: list[Weight]) -> Iterator[Weight]:
    """Yields one weight for each distinct input."""
    return iter({w.input: w for w in weights}.values())
