"""An algorithm in a line, and what is allowed but seldom meant."""

from __future__ import annotations

from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.spec.objectives import Objective
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.spec.teacher import Teacher

RATIO = {
    "Token": "token",
    "SequenceMean": "answer, mean of log-ratios",
    "SequenceSum": "answer, sum of log-ratios",
}
_BASELINE = {
    "GroupMean": "r - mean of the group",
    "LeaveOneOut": "r - mean of the others",
    "LengthWeighted": "r - mean weighted by length",
    "Critic": "GAE of r against a critic",
    "None": "r",
}
_NORMALIZE = {"Group": ", / deviation of the group", "Batch": ", normalised over the step's tokens", "None": ""}
REDUCTION = {"Token": "mean of tokens", "Sequence": "mean of answers", "Constant": "sum / `maxNewTokens`"}


def find_warnings(spec: RunSpec) -> list[str]:
    """What a manifest says that is allowed and of no use: dropout that the gate of parity takes for a fault, and groups
    in which no answer is compared with another."""
    lora, enforced, algorithm = spec.adapter.lora, spec.parity.preflight == "Enforce", spec.algorithm
    found: list[str] = []
    if algorithm.type == "SFT":
        return found
    if lora is not None and lora.dropout and enforced:
        found.append(
            f"spec.adapter.lora.dropout is {lora.dropout:g}: the trainer drops values and the engine does not. "
            "Log-probs then differ by more than the limit of parity, which ends the run (84): write 0, or "
            "parity.preflight: Report"
        )
    if algorithm.group_size == 1 and algorithm.objective.baseline not in ("Critic", "None", None):
        found.append("a group of one has no gradient: set algorithm.groupSize to 2 or more to learn")
    return found


def describe_algorithm(settings: Algorithm) -> str:
    """Describes the resulting settings in a line."""
    row = settings.objective
    kl = settings.kl.coefficient
    own = [
        advantage_words(row) if settings.advantage.entrypoint is None else settings.advantage.entrypoint,
        f"loss {settings.entrypoint}" if settings.entrypoint else f"ratio of {RATIO[row.ratio]}",
        f"clip {clip_words(row)}",
    ]
    parts = [
        *(["cross-entropy of demonstrated answers"] if row.surrogate == "Likelihood" else []),
        *(own if row.surrogate not in ("Teacher", "Likelihood") else []),
        REDUCTION[row.reduction].replace("`", ""),
        f"KL {kl:g} * {row.kl_estimator} in the {row.kl_placement.lower()}" if kl else "no KL",
    ]
    correction = settings.importance_sampling
    if correction.type != "None":
        cap, floor = correction.bounds
        within = f"{cap:g}" if floor is None else f"{floor:g} to {cap:g}"
        parts.append(f"{correction.type} {within}" + (f", veto {correction.veto:g}" if correction.veto else ""))
    if row.overlong_penalty:
        parts.append(f"overlong {row.overlong_penalty:g} over {settings.overlong.buffer_share:g} of maxNewTokens")
    critic = settings.decided_critic
    if critic is not None:
        parts.append(f"critic: gamma {critic.gamma:g}, lambda {critic.gae_lambda:g}, value clip {critic.value_clip:g}")
    teacher = settings.decided_teacher
    if teacher is not None:
        parts.append(_teacher(teacher))
    if row.max_rounds:
        parts.append(f"dynamic sampling, {row.max_rounds} rounds")
    return f"{settings.type}: " + "; ".join(parts)


def _teacher(teacher: Teacher) -> str:
    over = {"Full": "the vocabulary", "TopK": f"its {teacher.top_k} likeliest tokens", "Sampled": "sampled tokens"}
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(teacher.beta, f"JSD of {teacher.beta:g}")
    who = {
        "Base": "the base",
        "Adapter": str(teacher.uri),
        "Average": f"its own average, decay {teacher.decay}",
        "Lagged": f"itself, at most {teacher.every_steps} steps ago",
        "Served": "the model behind its endpoints",
    }
    return f"teacher: {who[teacher.type]}, {teacher.coefficient:g} * {kind} over {over[teacher.over]}"


def advantage_words(row: Objective) -> str:
    return f"{_BASELINE[str(row.baseline)]}{_NORMALIZE[str(row.normalize)]}"


def clip_words(row: Objective) -> str:
    return f"{'none' if row.clip_low is None else f'{row.clip_low:g}'} and {row.clip_high:g}"
