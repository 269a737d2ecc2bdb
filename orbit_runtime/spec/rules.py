"""What the API server must check by CEL: contradictions between fields, and what may not change.

Belongs here: the rules by path, each the twin of a contradiction that the loader finds, with the same field to blame.
Does not belong here: what the schema says without them (`crd`).
"""

from __future__ import annotations

from collections.abc import Iterator

from orbit_runtime.spec.adapter import COFT_EPS, NEUMANN_TERMS
from orbit_runtime.spec.block import LABEL_KEY, MAX_LABEL_KEY
from orbit_runtime.spec.data import PROMPT_SCHEMES
from orbit_runtime.spec.environment import CODE_SCHEMES
from orbit_runtime.spec.lifecycle import Lifecycle
from orbit_runtime.spec.model import MODEL_SCHEMES
from orbit_runtime.spec.rollout import TOKEN_ID_PATTERN
from orbit_runtime.spec.rule import MODEL_ON_HUB, PROMPTS_ON_HUB, Rule, uri_rule
from orbit_runtime.spec.rules_algorithm import algorithm_rules, correction_rules, dynamic_rounds, teacher_rules
from orbit_runtime.spec.run import NAME_LENGTH, NAME_PATTERN, RunSpec
from orbit_runtime.spec.storage import STORAGE_SCHEMES

MUTABLE = ("suspend", "queueName", "ttlSecondsAfterFinished")
"""Of `spec.lifecycle`: what may change, `queueName` only while the run is suspended."""


def _keys_rule(name: str) -> Rule:
    return Rule(
        f"self.{name}.all(key, size(key) <= {MAX_LABEL_KEY} && key.matches({LABEL_KEY!r}))",
        "write keys of labels: letters, digits, '-', '_' and '.', with a domain and '/' before them if need be",
        f".{name}",
    )


def _scored_rule(is_free: str) -> Rule:
    """Of what holds an `environment`. Args: is_free: CEL, true where nobody is to be scored in it."""
    own = "self.environment"
    return Rule(
        f"{is_free} || has({own}.entrypoint) || has({own}.name) || !({own}.type in ['SingleTurn', 'MultiTurn'])"
        f" || size({own}.rewards) > 0",
        "add {name: correct, type: ExactMatch}",
        ".environment.rewards",
    )


SERVER = (
    Rule(
        "!has(self.apiKeyEnv) || !has(self.headers) || !self.headers.exists(h, h.name.lowerAscii() == 'authorization')",
        "remove apiKeyEnv, or the header Authorization",
        ".apiKeyEnv",
    ),
    Rule(
        "!has(self.headers)"
        " || self.headers.all(h, self.headers.exists_one(o, o.name.lowerAscii() == h.name.lowerAscii()))",
        "name each header once",
        ".headers",
    ),
)
HEADER = (
    Rule("has(self.value) != has(self.valueEnv)", "write value or valueEnv, and not both", ".name"),
    Rule(
        "!has(self.value) || has(self.valueEnv) || self.name.lowerAscii() != 'authorization'",
        "name the variable that holds it in valueEnv",
        ".value",
    ),
)
INITIAL = uri_rule(STORAGE_SCHEMES, "initFrom")

CHECKS: dict[str, tuple[Rule, ...]] = {
    "": (
        Rule(
            f"size(self.metadata.name) <= {NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
            f"write at most {NAME_LENGTH} lower-case letters, digits and '-', with a letter or digit at both ends",
            ".metadata.name",
        ),
        Rule(
            "!has(self.metadata.generateName)",
            "write name instead: the run folder is called like it",
            ".metadata.generateName",
        ),
    ),
    "spec": (
        Rule(
            "self.model.maxSequenceLength < 2 || self.rollout.sampling.maxNewTokens < self.model.maxSequenceLength",
            "leave room for a prompt: lower it, or raise model.maxSequenceLength",
            ".rollout.sampling.maxNewTokens",
        ),
        Rule(
            f"self.rollout.maxStaleness <= 0 || {dynamic_rounds('self.algorithm')} <= 0",
            "write 0, or algorithm.dynamicSampling.maxRounds: 0",
            ".rollout.maxStaleness",
        ),
        Rule(
            "self.algorithm.type != 'SFT' || self.rollout.overSampling <= 0",
            "remove it: SFT samples nothing",
            ".rollout.overSampling",
        ),
        _scored_rule("self.algorithm.type == 'SFT'"),
        Rule(
            "!has(self.algorithm.critic) || !has(self.algorithm.critic.rank) || self.adapter.type == 'LoRA'",
            "remove it: an OFT adapter has no rank",
            ".algorithm.critic.rank",
        ),
        Rule(
            "!has(self.adapter.initFrom) || !has(self.checkpoint.resumeFrom)",
            "remove it, or checkpoint.resumeFrom",
            ".adapter.initFrom",
        ),
        Rule(
            "self.placement.layout != 'Split' || self.rollout.engine == 'SGLang'",
            "write rollout.engine: SGLang, or layout: Colocated",
            ".placement.layout",
        ),
        Rule(
            "self.placement.layout != 'Split' || self.algorithm.type != 'SFT' || self.rollout.engine != 'SGLang'",
            "write layout: Colocated",
            ".placement.layout",
        ),
        Rule(
            "self.placement.layout != 'Split' || self.rollout.adapterTransport != 'SharedMemory'",
            "write File, or leave it out",
            ".rollout.adapterTransport",
        ),
        Rule(
            "self.placement.nodes == 1 || self.training.trainer != 'Torch' && self.adapter.type != 'Full' && "
            "self.algorithm.type != 'SFT'",
            "write nodes: 1; several are for ranks of a trainer, and a first one for the engine",
            ".placement.nodes",
        ),
        Rule(
            "self.placement.nodes == 1 || !has(self.lifecycle.queueName)",
            "remove queueName, or write placement.nodes: 1",
            ".lifecycle.queueName",
        ),
    ),
    "spec.model": (uri_rule(MODEL_SCHEMES), MODEL_ON_HUB),
    "spec.adapter": (
        Rule("self.type == 'LoRA' || !has(self.lora)", "remove lora, or write type: LoRA", ".lora"),
        Rule("self.type == 'OFT' || !has(self.oft)", "remove oft, or write type: OFT", ".oft"),
        INITIAL._replace(cel=f"!has(self.initFrom) || {INITIAL.cel}"),
    ),
    "spec.adapter.oft": (
        Rule(
            f"self.parametrization != 'Cayley' || self.neumannTerms == {NEUMANN_TERMS}",
            "remove neumannTerms, or write parametrization: CayleyNeumann",
            ".neumannTerms",
        ),
        Rule(f"self.coft || self.coftEps == {COFT_EPS}", "remove coftEps, or write coft: true", ".coftEps"),
    ),
    "spec.algorithm": algorithm_rules(),
    "spec.algorithm.importanceSampling": correction_rules(),
    "spec.algorithm.teacher": teacher_rules(),
    "spec.algorithm.teacher.endpoints[]": SERVER,
    "spec.algorithm.teacher.endpoints[].headers[]": HEADER,
    "spec.data.prompts[]": (uri_rule(PROMPT_SCHEMES), PROMPTS_ON_HUB),
    "spec.environment": (
        Rule("!has(self.entrypoint) || self.type == 'MultiTurn'", "remove it, or write type: MultiTurn", ".entrypoint"),
        Rule(
            "!has(self.tools) || size(self.tools) == 0 || (self.type == 'MultiTurn' && !has(self.entrypoint))",
            "remove them, or write type: MultiTurn without entrypoint",
            ".tools",
        ),
        Rule(
            "self.type != 'MultiTurn' || has(self.entrypoint) || (has(self.tools) && size(self.tools) > 0)",
            "add tools, or entrypoint: module:Class",
            ".type",
        ),
        Rule("self.type in ['SingleTurn', 'MultiTurn'] || has(self.name)", "add name", ".type"),
        Rule(
            "!has(self.name) || !(self.type in ['SingleTurn', 'MultiTurn'])",
            "remove it, or write type: Gymnasium",
            ".name",
        ),
        Rule(
            "!(has(self.entrypoint) || has(self.name)) || self.rewards.all(r, r.name != 'environment')",
            "give the reward environment another name",
            ".rewards",
        ),
    ),
    "spec.environment.code": (uri_rule(CODE_SCHEMES),),
    "spec.environment.rewards[]": (
        Rule("has(self.type) || has(self.entrypoint)", "add type: ExactMatch, or entrypoint: module:function"),
        Rule("!has(self.type) || !has(self.entrypoint)", "remove type or entrypoint", ".entrypoint"),
    ),
    "spec.rollout": (
        Rule("self.replicas == 1 || self.engine == 'SGLang'", "remove replicas, or write engine: SGLang", ".replicas"),
        Rule(
            "!has(self.tensorParallel) || self.tensorParallel == 1 || self.engine == 'SGLang'",
            "remove tensorParallel, or write engine: SGLang",
            ".tensorParallel",
        ),
        Rule(
            "self.adapterTransport in ['Auto', 'File'] || self.engine == 'SGLang'",
            "remove adapterTransport, or write engine: SGLang",
            ".adapterTransport",
        ),
        Rule("self.sleep == 'None' || self.engine == 'SGLang'", "remove sleep, or write engine: SGLang", ".sleep"),
        Rule("self.sleep == 'None' || self.maxStaleness == 0", "remove sleep or maxStaleness", ".maxStaleness"),
        Rule("self.engineVersion == 'Pinned' || self.engine != 'Torch'", "remove engineVersion", ".engineVersion"),
        Rule(
            "self.routerReplay == 'None' || self.engine != 'OpenAI'",
            "remove routerReplay, or write engine: SGLang",
            ".routerReplay",
        ),
        Rule(
            "!self.deterministic || self.engine != 'OpenAI'",
            "remove deterministic, or write engine: SGLang",
            ".deterministic",
        ),
        Rule(
            "self.engine != 'OpenAI' || (has(self.endpoints) && size(self.endpoints) > 0)",
            "add endpoints with the address of each server",
            ".engine",
        ),
        Rule(
            "self.engine == 'OpenAI' || !has(self.endpoints) || size(self.endpoints) == 0",
            "remove endpoints, or write engine: OpenAI",
            ".endpoints",
        ),
        Rule(
            "self.engine == 'OpenAI' || !has(self.adapterFolder)",
            "remove adapterFolder, or write engine: OpenAI",
            ".adapterFolder",
        ),
    ),
    "spec.rollout.sampling": (
        Rule(
            f"!has(self.logitBias) || self.logitBias.all(key, key.matches('{TOKEN_ID_PATTERN}'))",
            "write the token's number in the model's vocabulary, such as '198'",
            ".logitBias",
        ),
    ),
    "spec.rollout.endpoints[]": SERVER,
    "spec.observability.notify[]": (
        Rule("has(self.url) != has(self.urlEnv)", "write url or urlEnv, and not both", ".url"),
    ),
    "spec.rollout.endpoints[].headers[]": HEADER,
    "spec.training": (
        Rule(
            "!has(self.miniBatchPrompts) || self.miniBatchPrompts < 1"
            " || self.promptsPerStep % self.miniBatchPrompts == 0",
            "write a divisor of promptsPerStep",
            ".miniBatchPrompts",
        ),
        Rule(
            "self.schedule.type == 'Constant' || has(self.schedule.decaySteps)"
            " || self.schedule.warmupSteps < self.steps",
            "write a shorter warm-up, more steps, or type: Constant",
            ".schedule.warmupSteps",
        ),
    ),
    "spec.training.schedule": (
        Rule(
            "self.type != 'Constant' || !has(self.decaySteps)",
            "remove decaySteps, or write type: Linear or type: Cosine",
            ".decaySteps",
        ),
        Rule(
            "self.type == 'Constant' || !has(self.decaySteps) || self.decaySteps > self.warmupSteps",
            "write a later step, or a shorter warm-up",
            ".decaySteps",
        ),
    ),
    "spec.storage": (
        uri_rule(STORAGE_SCHEMES),
        Rule(
            "!has(self.credentialsSecretName) || !has(self.serviceAccountName)",
            "remove serviceAccountName or credentialsSecretName",
            ".serviceAccountName",
        ),
    ),
    "spec.placement": (
        Rule(
            "self.nodes > 1 || self.layout != 'Split' || "
            "(self.gpus >= 2 && (has(self.trainerGpus) || self.gpus % 2 == 0))",
            "write an even number of at least 2, or add trainerGpus: 1, or write layout: Colocated",
            ".gpus",
        ),
        Rule(
            "!has(self.trainerGpus) || "
            "(self.nodes == 1 && self.layout == 'Split' && (self.gpus < 2 || self.trainerGpus < self.gpus))",
            "write layout: Split, and fewer than gpus; or remove it",
            ".trainerGpus",
        ),
        Rule("self.nodes == 1 || self.layout != 'Split'", "remove layout, or write nodes: 1", ".layout"),
        Rule("!has(self.nodeSelector) || " + _keys_rule("nodeSelector").cel, *_keys_rule("nodeSelector")[1:]),
    ),
    "spec.placement.modelCache": (
        Rule("!has(self.claimName) || !has(self.sizeLimit)", "remove sizeLimit or claimName", ".sizeLimit"),
    ),
    "spec.placement.egress[]": (
        Rule("has(self.cidr) || has(self.namespace)", "add cidr: 10.0.0.0/8, or namespace: minio"),
        Rule("!has(self.cidr) || !has(self.namespace)", "write one entry for each", ".namespace"),
        Rule("!has(self.cidr) || isCIDR(self.cidr)", "write a network such as 10.0.0.0/8", ".cidr"),
    ),
    "spec.placement.tolerations[]": (
        Rule("self.operator != 'Exists' || !has(self.value)", "remove value, or write operator: Equal", ".value"),
        Rule("has(self.key) || self.operator == 'Exists'", "add key, or write operator: Exists", ".key"),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "remove tolerationSeconds, or write effect: NoExecute",
            ".tolerationSeconds",
        ),
        Rule(
            f"!has(self.key) || self.key.matches({LABEL_KEY!r})",
            "write letters, digits, '-', '_' and '.', with a domain and '/' before them if need be",
            ".key",
        ),
    ),
}
"""By path: what a new object is held against. A rule is silent where a field that it rests on is itself out of bounds,
which the server has said already."""

MEASURED = "spec.evaluation.environments[]"
CHECKS |= {MEASURED: (_scored_rule("!has(self.environment)"),)}
CHECKS |= {f"{MEASURED}.prompts[]": CHECKS["spec.data.prompts[]"]} | {
    f"{MEASURED}{path.removeprefix('spec')}": rules
    for path, rules in CHECKS.items()
    if path.startswith("spec.environment")
}


_FIXED = "cannot change once the run exists: start a new run"


def _immutable_blocks() -> Iterator[tuple[str, tuple[Rule, ...]]]:
    for name, field in RunSpec.model_fields.items():
        if name != "lifecycle":
            yield f"spec.{field.alias}", (Rule("self == oldSelf", _FIXED),)


def _lifecycle_rules() -> Iterator[Rule]:
    for field in Lifecycle.model_fields.values():
        if field.alias not in MUTABLE:
            yield Rule(_same(str(field.alias)), _FIXED, f".{field.alias}")
    yield Rule(
        f"oldSelf.suspend || ({_same('queueName')})",
        "can change only while the run is suspended: set suspend: true first",
        ".queueName",
    )


def _same(name: str) -> str:
    """Spelled out: the cost of comparing two optional texts is estimated as unbounded."""
    return f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"


TRANSITIONS: dict[str, tuple[Rule, ...]] = {
    **dict(_immutable_blocks()),
    "spec.lifecycle": tuple(_lifecycle_rules()),
}
"""By path: what a change of an object is held against."""


def rules_at(path: str) -> tuple[Rule, ...]:
    """All rules of a place in the manifest."""
    return CHECKS.get(path, ()) + TRANSITIONS.get(path, ())
