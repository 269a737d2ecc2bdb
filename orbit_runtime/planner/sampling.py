"""Which settings of sampling each kind of engine gives with log-probs of the distribution that it draws from.

One row for each setting, or two together, that a kind of engine does not give, and why. `orbit validate`, `orbit plan`,
the operator and a run ask here: `docs/decisions/0098-sampling-that-an-engine-gives.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Sampling

Kind = Literal["Torch", "SGLang", "SGLang without plug-in", "SGLang, deterministic", "vLLM"]
"""`SGLang` runs Orbit's plug-in, as each server that Orbit starts."""

IS_SET: dict[str, Callable[[Sampling], bool]] = {
    "temperature": lambda sampling: sampling.temperature != 1.0,
    "topK": lambda sampling: sampling.top_k > 0,
    "topP": lambda sampling: sampling.top_p < 1.0,
    "minP": lambda sampling: sampling.min_p > 0.0,
    "repetitionPenalty": lambda sampling: sampling.repetition_penalty != 1.0,
    "logitBias": lambda sampling: bool(sampling.logit_bias),
    "stop": lambda sampling: bool(sampling.stop),
    "stopTokenIds": lambda sampling: bool(sampling.stop_token_ids),
    "ignoreEos": lambda sampling: sampling.ignore_eos,
}
"""By the manifest's name; `maxNewTokens` is always given."""


@dataclass(frozen=True)
class Lack:
    """What one kind of engine cannot give: a setting, or several together."""

    fields: tuple[str, ...]
    """The first is blamed."""
    why: str


_BEFORE = "its log-probs are those before it cuts the distribution"
_PENALTY = Lack(
    ("repetitionPenalty",),
    "it penalises tokens of the answer alone, not of the prompt, and where it schedules ahead each of them one token "
    "late",
)
_ENDS = Lack(("ignoreEos", "stopTokenIds"), "where it ignores end tokens, it ignores these as well")

LACKS: dict[Kind, tuple[Lack, ...]] = {
    "Torch": (),
    "SGLang": (_PENALTY, _ENDS),
    "SGLang without plug-in": (*(Lack((name,), _BEFORE) for name in ("topK", "topP", "minP")), _PENALTY, _ENDS),
    "SGLang, deterministic": (*(Lack((name,), _BEFORE) for name in ("topK", "topP", "minP")), _PENALTY, _ENDS),
    "vLLM": (Lack(("minP", "topP"), "it cuts by minP first, and so leaves more to topP than the trainer counts with"),),
}
"""Of SGLang 0.5.23, read in its `layers/sampler.py`, `sampling/penaltylib` and `managers/schedule_batch.py`, and of
vLLM 0.32, by its documentation: no vLLM was run with these."""


def check_sampling(sampling: Sampling, kind: Kind, name: str) -> None:
    """Raises UnsupportedError (78) for what this kind of engine does not give.

    Args:
        name: of the engine or server, for the message.
    """
    for lack in LACKS[kind]:
        if all(IS_SET[field](sampling) for field in lack.fields):
            blamed, *others = lack.fields
            together = f" together with {' and '.join(others)}" if others else ""
            raise UnsupportedError(
                f"{name} gives no {blamed}{together}: {lack.why}",
                where=f"spec.rollout.sampling.{blamed}",
                fix=f"write engine: Torch, or remove {' or '.join(lack.fields)}",
            )


def shaping_fields(sampling: Sampling) -> tuple[str, ...]:
    """Settings, by the manifest's name, that make log-probs others than the model's own."""
    shaping = ("temperature", "topK", "topP", "minP", "repetitionPenalty", "logitBias")
    return tuple(field for field in shaping if IS_SET[field](sampling))


def sampling_of(spec: RunSpec) -> Sampling:
    sampling = spec.rollout.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        stop=tuple(sampling.stop),
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sorted((int(token), bias) for token, bias in sampling.logit_bias.items())),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def check_engine(spec: RunSpec, engine: str | None = None) -> None:
    """Raises UnsupportedError (78) for settings of sampling that the manifest's engine does not give.

    What attached servers give is known once they are asked.

    Args:
        engine: what `Auto` became; None: as the manifest says.
    """
    if (engine or spec.rollout.engine) == "SGLang":
        kind: Kind = "SGLang, deterministic" if spec.rollout.deterministic else "SGLang"
        check_sampling(sampling_of(spec), kind, kind)


def check_teacher_sampling(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) where a served teacher would be compared with another distribution than its own."""
    teacher = spec.algorithm.teacher
    shaping = shaping_fields(sampling_of(spec)) if teacher is not None and teacher.type == "Served" else ()
    if shaping:
        raise UnsupportedError(
            f"servers tell how likely the model itself finds a token, and with {' and '.join(shaping)} the policy "
            "samples from another distribution than its own",
            where=f"spec.rollout.sampling.{shaping[0]}",
            fix=f"remove {' and '.join(shaping)}, or take a teacher on the run's own base",
        )
