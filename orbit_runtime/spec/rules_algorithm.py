"""The rules of `spec.algorithm` and its blocks, which read an algorithm's defaults from its row."""

from __future__ import annotations

from orbit_runtime.spec.algorithm import BUFFER_SHARE, IDLE_WITHOUT_REWARD, TRUNCATION_CAP, UNREWARDED
from orbit_runtime.spec.objectives import CORRECTIONS, OBJECTIVES
from orbit_runtime.spec.rule import Rule, by_type, uri_rule
from orbit_runtime.spec.storage import STORAGE_SCHEMES
from orbit_runtime.spec.teacher import OWNERS, SERVED_TOP_K


def algorithm_rules() -> tuple[Rule, ...]:
    def effective(path: str, attribute: str) -> str:
        return by_type(path, {name: getattr(row, attribute) for name, row in OBJECTIVES.items()})

    unbounded = [name for name, row in OBJECTIVES.items() if row.clip_low is None]
    low, high = effective("clip.low", "clip_low"), effective("clip.high", "clip_high")
    baseline, normalize = (effective(f"advantage.{name}", name) for name in ("baseline", "normalize"))
    placement, estimator = (effective(f"kl.{name}", f"kl_{name}") for name in ("placement", "estimator"))
    penalty = effective("overlong.penalty", "overlong_penalty")
    return (
        Rule("self.type != 'Custom' || has(self.entrypoint)", "add entrypoint: module:function", ".type"),
        Rule("self.type == 'Custom' || !has(self.entrypoint)", "remove it, or write type: Custom", ".entrypoint"),
        *(
            Rule(
                f"!has(self.advantage.entrypoint) || !has(self.advantage.{name})",
                f"remove {name} or entrypoint",
                f".advantage.{name}",
            )
            for name in ("baseline", "normalize")
        ),
        Rule(
            f"!(self.type in {unbounded!r}) || !has(self.clip.low)",
            "remove it: this type has no lower bound",
            ".clip.low",
        ),
        Rule(
            f"self.type in {unbounded!r} || {high} < 0.0 || {low} <= {high}",
            "write low no higher than high, or raise high",
            ".clip.low",
        ),
        Rule(
            f"has(self.advantage.entrypoint) || !({baseline} in ['None', 'Critic']) || {normalize} != 'Group'",
            "write normalize: Batch or normalize: None, or another baseline",
            ".advantage.normalize",
        ),
        Rule(
            f"!has(self.critic) || (!has(self.advantage.entrypoint) && {baseline} == 'Critic')",
            "remove it, or write type: PPO",
            ".critic",
        ),
        Rule("self.type != 'SFT' || !has(self.teacher)", "remove it, or write type: Distillation", ".teacher"),
        Rule("self.type != 'Distillation' || has(self.teacher)", "add teacher: {type: Adapter, uri: …}", ".type"),
        *(
            Rule(
                f"!(self.type in {list(UNREWARDED)!r}) || !has(self.{block}.{name})",
                f"remove {name}, or write another type",
                f".{block}.{name}",
            )
            for block, name in IDLE_WITHOUT_REWARD
        ),
        Rule(
            f"!self.kl.importanceWeighted || ({placement} == 'Loss' && {estimator} != 'K2')",
            "remove it, or write placement: Loss and estimator: K1 or K3",
            ".kl.importanceWeighted",
        ),
        Rule(
            f"{penalty} != 0.0 || self.overlong.bufferShare == {BUFFER_SHARE}",
            "remove it, or write penalty: 1",
            ".overlong.bufferShare",
        ),
        Rule(
            f"self.groupSize != 1 || {dynamic_rounds('self')} <= 0",
            "write groupSize: 2 or more, or maxRounds: 0",
            ".dynamicSampling.maxRounds",
        ),
    )


def teacher_rules() -> tuple[Rule, ...]:
    address = uri_rule(STORAGE_SCHEMES)
    return (
        address._replace(cel=f"!has(self.uri) || {address.cel}"),
        Rule("self.type != 'Adapter' || has(self.uri)", "add uri: runs/<run>/adapters/policy-v…", ".type"),
        Rule(
            "self.type != 'Served' || (has(self.endpoints) && size(self.endpoints) > 0)",
            "add endpoints with the address of each server",
            ".type",
        ),
        Rule("self.type != 'Served' || self.over != 'Full'", "write over: TopK or over: Sampled", ".over"),
        Rule(
            f"self.type != 'Served' || !has(self.topK) || self.topK <= {SERVED_TOP_K}",
            f"write topK: {SERVED_TOP_K} or less",
            ".topK",
        ),
        *(
            Rule(
                f"!has(self.{name})"
                f"{' || size(self.endpoints) == 0' if name == 'endpoints' else ''} || self.type == '{owner}'",
                f"remove {name}, or write type: {owner}",
                f".{name}",
            )
            for name, owner in OWNERS.items()
        ),
        Rule("!has(self.topK) || self.over == 'TopK'", "remove topK, or write over: TopK", ".topK"),
        Rule(
            "self.over != 'Sampled' || self.beta <= 0.0 || self.beta >= 1.0",
            "write beta: 0 or beta: 1, or over: Full",
            ".beta",
        ),
    )


def correction_rules() -> tuple[Rule, ...]:
    cap = by_type("cap", {name: row.cap for name, row in CORRECTIONS.items()})
    floor = by_type("floor", {name: row.floor for name, row in CORRECTIONS.items()})
    return (
        Rule(
            f"self.type != 'None' || !has(self.cap) || self.cap == {TRUNCATION_CAP:.1f}",
            "remove cap, or write type: TokenTruncated",
            ".cap",
        ),
        Rule("!has(self.floor) || self.type.endsWith('Masked')", "remove floor, or write type: TokenMasked", ".floor"),
        Rule(
            f"!self.type.endsWith('Masked') || {cap} <= 0.0 || {floor} <= {cap}",
            "write floor no higher than cap, or raise cap",
            ".floor",
        ),
        Rule("self.type != 'None' || !has(self.veto)", "remove veto, or write type: TokenTruncated", ".veto"),
    )


def dynamic_rounds(block: str) -> str:
    """CEL of `dynamicSampling.maxRounds`, a whole number; `block` is the algorithm's."""
    rounds = by_type("dynamicSampling.maxRounds", {name: row.max_rounds for name, row in OBJECTIVES.items()})
    return rounds.replace(".0", "").replace("self.", f"{block}.")
