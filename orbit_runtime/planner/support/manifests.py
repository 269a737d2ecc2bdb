"""Combinations that no machine supports: a whole model's weights, replayed routers, three processes; and sampling
settings that a kind of engine supports with log-probs of the distribution that it samples from.

One row for each setting, or combination of settings, that is lacking, and why. `orbit validate`, `orbit plan`, the
operator and a run use it: `docs/decisions/0015-sglang-numbers.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.support import Problem, SupportRow, Words, check_rows
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Sampling
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON

ADAPT = "train an adapter (adapter.type: LoRA)"


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A manifest, and what is known of its model by then."""

    spec: RunSpec
    precision: str = "Auto"
    """The checkpoint's; `Auto` if only the manifest is known."""
    num_experts: int = 0
    replays: bool = True
    """Whether tokens can be sent to given experts, or that is not known yet."""
    trainer: str = ""
    """`Auto` decided; empty if it is not yet."""


def read_manifest(spec: RunSpec, model: ModelFacts, trainer: str) -> ManifestFacts:
    """The manifest's facts, with those from the headers of a checkpoint."""
    shape = model.architecture
    replays = bool(shape.num_experts) and shape.family != "deepseek_v4"
    return ManifestFacts(spec, model.precision, shape.num_experts, replays, trainer)


def _whole(when: Callable[[ManifestFacts], bool | Words | None], why: str, fix: str) -> SupportRow[ManifestFacts]:
    return SupportRow("adapter.type", "Full", lambda asked: asked.spec.adapter.type == "Full" and when(asked), why, fix)


def _packed(asked: ManifestFacts) -> Words | None:
    precision = asked.spec.model.precision if asked.precision == "Auto" else asked.precision
    return None if precision in ("Auto", "BF16") else {"precision": precision}


def _sampled(asked: ManifestFacts) -> Words | None:
    kind = asked.spec.algorithm.type
    return None if kind == "SFT" else {"kind": kind}


MANIFESTS: tuple[SupportRow[ManifestFacts], ...] = (
    _whole(_sampled, "a whole model is trained only on demonstrations: with algorithm.type {kind} an engine would need "
           "every weight at each publish",
           f"{ADAPT}; or write algorithm.type: SFT, and start the run with rewards from the resulting model"),
    _whole(_packed, "{precision} weights are packed and frozen: they cannot be trained",
           f"name a BF16 checkpoint in spec.model, or {ADAPT}"),
    _whole(lambda asked: bool(asked.num_experts), "this version trains no routed experts as a whole", ADAPT),
    _whole(lambda asked: asked.spec.training.trainer == "Megatron",
           "ranks divide a frozen base: they hold no masters of its weights",
           f"write training.trainer: Torch where one GPU is enough, or {ADAPT}"),
    _whole(lambda asked: asked.spec.algorithm.kl.coefficient > 0,
           "no base is left beside the model to keep it close to", f"remove algorithm.kl, or {ADAPT}"),
    _whole(lambda asked: asked.spec.adapter.targets is not None,
           "adapter.targets applies to an adapter, but with `Full` there is none", "remove it"),
    _whole(lambda asked: asked.spec.adapter.init_from is not None,
           "adapter.initFrom applies to an adapter, but with `Full` there is none",
           "name the model to start from in spec.model.uri"),
    SupportRow("rollout.routerReplay", "models without routed experts",
        lambda asked: asked.spec.rollout.router_replay != "None" and not asked.replays and _sampled(asked) is not None,
        "this model has no routed experts, or routers that no other choice can be given to", "remove it"),
    SupportRow("algorithm.entrypoint", "ranks",
        lambda asked: asked.spec.algorithm.entrypoint == FROM_PYTHON and asked.trainer == "Megatron",
        "ranks import a loss by its name, and this one was passed from Python",
        "name it `module:function`, or write `trainer: Torch` in spec.training"),
)  # fmt: skip

APART: tuple[SupportRow[RunSpec], ...] = (
    SupportRow("rollout.sleep", "three processes", lambda spec: spec.rollout.sleep != "None",
        "a server sleeps to make room for the trainer on its GPU, and a trainer in another process does not give back "
        "what it took before the server wakes", "write None, or use `orbit run`"),
    SupportRow("rollout.sampling.maxNewTokens", "three processes",
        lambda spec: spec.rollout.sampling.max_new_tokens is None and spec.algorithm.type != "SFT",
        "a run decides it from its prompts: three processes would each have to", "write a number, or use `orbit run`"),
    SupportRow("training.trainer", "three processes",
        lambda spec: spec.training.trainer == "Auto" and spec.placement.nodes > 1,
        "three processes read `Auto` as Torch, which does not use several nodes",
        "write Megatron, or placement.nodes: 1"),
    SupportRow("adapter.type", "three processes", lambda spec: spec.adapter.type == "Full",
        "the whole of a model is trained in one process: each of its states would pass through the orchestrator",
        "use `orbit sft`, or train an adapter (adapter.type: LoRA)"),
)  # fmt: skip


def check_manifest(asked: ManifestFacts) -> None:
    """Raises UnsupportedError (78) for what no machine would mend."""
    check_rows(MANIFESTS, asked)


def check_apart(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) for what this version supports in one process only."""
    check_rows(APART, spec)


def check_adapted(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) if a run's adapters are requested but it trains the model itself."""
    if spec.adapter.type == "Full":
        raise UnsupportedError(
            "a run that trains a whole model has no adapters: its result is a model",
            where="spec.adapter.type",
            fix="name that model, <run folder>/models/policy-v…: `orbit serve --model`, or `spec.model.uri` of a "
            "manifest with an adapter",
        )


Kind = Literal["Torch", "SGLang", "SGLang without plug-in", "SGLang, deterministic", "vLLM"]
"""`SGLang` runs Orbit's plug-in, as every server does that Orbit starts."""

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
"""Settings by the manifest's name; `maxNewTokens` is always supported."""


@dataclass(frozen=True)
class SamplingLimit:
    """A setting, or several together, that one kind of engine does not support."""

    fields: tuple[str, ...]
    """The message names the first."""
    why: str


_BEFORE = "its log-probs are those before it cuts the distribution"
_PENALTY = SamplingLimit(
    ("repetitionPenalty",),
    "it penalises tokens of the answer alone, not of the prompt, and where it schedules ahead each of them one token "
    "late",
)
_ENDS = SamplingLimit(("ignoreEos", "stopTokenIds"), "where it ignores end tokens, it ignores these as well")

LACKS: dict[Kind, tuple[SamplingLimit, ...]] = {
    "Torch": (),
    "SGLang": (_PENALTY, _ENDS),
    "SGLang without plug-in": (
        *(SamplingLimit((name,), _BEFORE) for name in ("topK", "topP", "minP")),
        _PENALTY,
        _ENDS,
    ),
    "SGLang, deterministic": (*(SamplingLimit((name,), _BEFORE) for name in ("topK", "topP", "minP")), _PENALTY, _ENDS),
    "vLLM": (
        SamplingLimit(("minP", "topP"), "it cuts by minP first, so it leaves more to topP than the trainer assumes"),
    ),
}
"""Limits of SGLang 0.5.23, from its `layers/sampler.py`, `sampling/penaltylib` and `managers/schedule_batch.py`; and of
vLLM 0.32, from its documentation: no vLLM was run with these settings.
"""


def sampling_problems(sampling: Sampling, kind: Kind, name: str) -> Iterator[Problem]:
    """Settings that this kind of engine does not support.

    Args:
        name: name of the engine or server, for the message.
    """
    for lack in LACKS[kind]:
        if all(IS_SET[field](sampling) for field in lack.fields):
            blamed, *others = lack.fields
            together = f" together with {' and '.join(others)}" if others else ""
            yield Problem(
                f"{name} does not support {blamed}{together}: {lack.why}",
                f"spec.rollout.sampling.{blamed}",
                f"write engine: Torch, or remove {' or '.join(lack.fields)}",
                fix_suffices=True,
                is_limit=True,
            )


def check_sampling(sampling: Sampling, kind: Kind, name: str) -> None:
    """Raises UnsupportedError (78) for settings that this kind of engine does not support."""
    for problem in sampling_problems(sampling, kind, name):
        raise problem.error()


def shaping_fields(sampling: Sampling) -> tuple[str, ...]:
    """Settings, by the manifest's name, with which log-probs differ from the model's own."""
    shaping = ("temperature", "topK", "topP", "minP", "repetitionPenalty", "logitBias")
    return tuple(field for field in shaping if IS_SET[field](sampling))


def sampling_of(rollout: Rollout) -> Sampling:
    sampling = rollout.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens or Sampling().max_new_tokens,
        stop=tuple(sampling.stop),
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sorted((int(token), bias) for token, bias in sampling.logit_bias.items())),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def engine_problems(spec: RunSpec, engine: str | None = None) -> Iterator[Problem]:
    """Sampling settings that the manifest's engine does not support.

    What attached servers support is only known once they are asked.

    Args:
        engine: the engine to which `Auto` was resolved; None: the manifest's.
    """
    if (engine or spec.rollout.engine) == "SGLang":
        kind: Kind = "SGLang, deterministic" if spec.rollout.deterministic else "SGLang"
        yield from sampling_problems(sampling_of(spec.rollout), kind, kind)


def check_engine(spec: RunSpec, engine: str | None = None) -> None:
    """Raises UnsupportedError (78) with the first of `engine_problems`."""
    for problem in engine_problems(spec, engine):
        raise problem.error()


def _shaped_beside_teacher(spec: RunSpec) -> Words | None:
    teacher = spec.algorithm.teacher
    shaping = shaping_fields(sampling_of(spec.rollout)) if teacher is not None and teacher.type == "Served" else ()
    return {"first": shaping[0], "shaping": " and ".join(shaping)} if shaping else None


TAUGHT: tuple[SupportRow[RunSpec], ...] = (
    SupportRow(
        "rollout.sampling.{first}", "teachers on servers", _shaped_beside_teacher,
        "servers report log-probs of the model's own distribution, but with {shaping} the policy samples from another",
        "remove {shaping}, or take a teacher on the run's own base",
    ),
)  # fmt: skip


def check_teacher_sampling(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) if a served teacher would be compared with a distribution other than its own."""
    check_rows(TAUGHT, spec)


def check_token_ids(spec: RunSpec, vocabulary: int) -> None:
    """Raises ManifestError (64) for the id of a token that the model does not have."""
    sampling = spec.rollout.sampling
    named = {
        **{f"logitBias.{token}": int(token) for token in sampling.logit_bias},
        **{f"stopTokenIds[{index}]": token for index, token in enumerate(sampling.stop_token_ids)},
    }
    for field, token in named.items():
        if token >= vocabulary:
            raise ManifestError(
                f"the model has no token {token}: its vocabulary ends at {vocabulary - 1}",
                where=f"spec.rollout.sampling.{field}",
                fix="write the token's number in the model's vocabulary",
            )
