"""A good and a bad value for each kind of limit of every field of the spec, made from the schema itself.

Belongs here: what follows from one field's type, bounds, enum and pattern. Does not belong here: what fields say
together, or what a file can get wrong as a text (`corpus`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from orbit_runtime.spec.fields import Schema, all_fields
from tests.cluster.corpus import Case

LEAST: dict[str, Any] = {
    "apiVersion": "orbitrl.dev/v1alpha1",
    "kind": "OrbitRun",
    "metadata": {"name": "corpus"},
    "spec": {
        "model": {"uri": "builtin://tiny-adder"},
        "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
        "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
        "training": {"steps": 5},
    },
}
AROUND: dict[str, dict[str, Any]] = {
    "spec.adapter.oft": {"adapter": {"type": "OFT", "oft": {}}},
    "spec.adapter.lora": {"adapter": {"lora": {}}},
    "spec.algorithm.type": {"algorithm": {}},
    "spec.algorithm.entrypoint": {"algorithm": {"type": "Custom"}},
    "spec.algorithm.teacher": {"algorithm": {"teacher": {}}},
    "spec.algorithm.teacher.uri": {"algorithm": {"teacher": {"type": "Adapter"}}},
    "spec.algorithm.teacher.decay": {"algorithm": {"teacher": {"type": "Average"}}},
    "spec.algorithm.teacher.everySteps": {"algorithm": {"teacher": {"type": "Lagged"}}},
    "spec.algorithm.teacher.topK": {"algorithm": {"teacher": {"over": "TopK"}}},
    "spec.algorithm.teacher.endpoints": {
        "algorithm": {"teacher": {"type": "Served", "over": "Sampled", "endpoints": [{"url": "http://teacher:30000"}]}}
    },
    "spec.algorithm.critic": {"algorithm": {"type": "PPO", "critic": {}}},
    "spec.algorithm.importanceSampling": {"algorithm": {"importanceSampling": {"type": "TokenMasked"}}},
    "spec.algorithm.overlong.bufferShare": {"algorithm": {"overlong": {"penalty": 1.0}}},
    "spec.rollout.replicas": {"rollout": {"engine": "SGLang"}},
    "spec.rollout.tensorParallel": {"rollout": {"engine": "SGLang"}},
    "spec.rollout.adapterTransport": {"rollout": {"engine": "SGLang"}},
    "spec.rollout.sleep": {"rollout": {"engine": "SGLang"}},
    "spec.rollout.engineArguments": {"rollout": {"engine": "SGLang"}},
    "spec.rollout.endpoints": {"rollout": {"engine": "OpenAI", "endpoints": [{"url": "http://engine:30000"}]}},
    **{
        f"spec.rollout.endpoints[].headers[].{field}": {
            "rollout": {"engine": "OpenAI", "endpoints": [{"url": "http://engine:30000", "headers": [around]}]}
        }
        for field, around in (("name", {"value": "a"}), ("value", {"name": "X-Route"}), ("valueEnv", {"name": "X-Key"}))
    },
    **{
        f"spec.algorithm.teacher.endpoints[].headers[].{field}": {
            "algorithm": {
                "teacher": {
                    "type": "Served",
                    "over": "Sampled",
                    "endpoints": [{"url": "http://teacher:30000", "headers": [around]}],
                }
            }
        }
        for field, around in (("name", {"value": "a"}), ("value", {"name": "X-Route"}), ("valueEnv", {"name": "X-Key"}))
    },
    **{
        f"spec.observability.notify[].{field}": {"observability": {"notify": [around]}}
        for field, around in (("url", {}), ("urlEnv", {}), ("events", {"urlEnv": "HOOK"}))
    },
    **{
        f"spec.observability.trackers[].{field}": {"observability": {"trackers": [{"type": "WandB"}]}}
        for field in ("project", "uri")
    },
    "spec.observability.notify": {"observability": {"notify": [{"urlEnv": "HOOK"}]}},
    "spec.rollout.adapterFolder": {"rollout": {"engine": "OpenAI", "endpoints": [{"url": "http://engine:30000"}]}},
    "spec.training.schedule.warmupSteps": {"training": {"steps": 5}},
    "spec.training.schedule": {"training": {"steps": 100_000_000, "schedule": {"type": "Cosine", "decaySteps": 10**8}}},
    **{
        f"spec.training.stopWhen.{field}": {
            "training": {"steps": 5, "stopWhen": around},
            "evaluation": {"everySteps": 2, "environments": [{"name": "a", "prompts": [{"uri": "a"}]}]},
        }
        for field, around in (
            ("evaluation", {"atLeast": 1}), ("metric", {"atLeast": 1}), ("atLeast", {}), ("withoutGainSteps", {})
        )
    },
    "spec.environment.code": {"environment": {"code": {}, "rewards": [{"name": "a", "type": "Math"}]}},
    "spec.environment.entrypoint": {"environment": {"type": "MultiTurn", "rewards": []}},
    "spec.environment.name": {"environment": {"type": "Gymnasium", "rewards": []}},
    "spec.environment.tools": {"environment": {"type": "MultiTurn", "rewards": [{"name": "a", "type": "Math"}]}},
    "spec.environment.arguments": {"environment": {"type": "MultiTurn", "entrypoint": "a:B", "rewards": []}},
    "spec.environment.rewards[].entrypoint": {"environment": {"rewards": [{"name": "a"}]}},
    "spec.placement.egress[].namespace": {"placement": {"egress": [{}]}},
    "spec.placement.egress[].cidr": {"placement": {"egress": [{}]}},
    "spec.placement.egress": {"placement": {"egress": [{"cidr": "10.0.0.0/8"}]}},
    "spec.placement.tolerations[].tolerationSeconds": {
        "placement": {"tolerations": [{"key": "a", "effect": "NoExecute"}]}
    },
    "spec.placement.tolerations": {"placement": {"tolerations": [{"key": "a"}]}},
    "spec.placement.gpus": {"placement": {}},
    "spec.placement.trainerGpus": {"rollout": {"engine": "SGLang"}, "placement": {"layout": "Split", "gpus": 16}},
}  # fmt: skip
MEASURED = "spec.evaluation.environments[]"
AROUND |= {
    f"{MEASURED}{path.removeprefix('spec')}": {
        "evaluation": {"environments": [{"name": "a", "prompts": [{"uri": "a"}], **around}]}
    }
    for path, around in {
        "spec": {},
        "spec.environment": {"environment": {"rewards": [{"name": "a", "type": "Math"}]}},
        **{path: around for path, around in AROUND.items() if path.startswith("spec.environment.")},
    }.items()
}
"""What must stand around a field for it to mean something: the longest prefix counts."""


def field_cases() -> Iterator[Case]:
    """Cases of every field below `spec` that holds a value."""
    for field in all_fields():
        if not field.path.startswith("spec."):
            continue
        place = field.path.replace("[]", "[0]")
        for bad in bad_values(field.schema):
            yield _case(field.path, place, bad, bad)
        for bad in bad_items(field.schema.get("items", {})):
            yield _case(field.path, f"{place}[0]", bad, [bad])


def _case(path: str, place: str, bad: Any, value: Any) -> Case:
    text = json.dumps(_with(path, value), ensure_ascii=False)
    name = f"{path}: {_show(value)}"
    if isinstance(bad, dict) and set(bad) == {"a"}:
        return Case(name, text, (place,), (f"{place}.a",), "the server looks for unknown fields first")
    return Case(name, text, (place,))


def bad_values(schema: Schema) -> Iterator[Any]:
    """Just outside each limit, and of each other kind."""
    kind = schema["type"]
    others: dict[str, list[Any]] = {
        "string": [5, True, ["a"], {"a": 1}],
        "integer": ["5", True, 1.5, [5], {"a": 1}],
        "number": ["5", True, [5], {"a": 1}],
        "boolean": ["true", 1, [True], {"a": 1}],
        "array": ["a", 5, True, {"a": 1}],
        "object": ["a", 5, True, ["a"]],
    }
    yield from others[kind]
    step = 1 if kind == "integer" else None
    if "minimum" in schema:
        yield schema["minimum"] - 1 if step else math.nextafter(schema["minimum"], -math.inf)
    if "maximum" in schema:
        yield schema["maximum"] + 1 if step else math.nextafter(schema["maximum"], math.inf)
    yield from (schema[bound] for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in schema)
    if "enum" in schema:
        yield "Nonsense"
        yield schema["enum"][0].lower() if schema["enum"][0].lower() not in schema["enum"] else schema["enum"][0] + " "
    if schema.get("minLength"):
        yield ""
    if "maxLength" in schema and "enum" not in schema:
        yield "a" * (schema["maxLength"] + 1)
    if "pattern" in schema:
        yield "a b!"
        yield "a\n"
    if schema.get("minItems"):
        yield []
    if "maxItems" in schema:
        yield [_item(schema["items"], index) for index in range(schema["maxItems"] + 1)]
    if "maxProperties" in schema:
        yield {str(index): _value_of(schema) for index in range(schema["maxProperties"] + 1)}


def bad_items(schema: Schema) -> Iterator[Any]:
    """The same for the items of a list."""
    if schema:
        yield from bad_values(schema)


def _value_of(schema: Schema) -> Any:
    """A value of a mapping, such that only their number is wrong."""
    values = schema.get("additionalProperties")
    return 1.0 if isinstance(values, dict) and values.get("type") == "number" else "b"


def _item(schema: Schema, index: int) -> Any:
    if ":" in schema.get("pattern", ""):
        return f"a:b{index}"
    if "enum" in schema:
        return schema["enum"][index % len(schema["enum"])]
    return index + 1 if schema["type"] == "integer" else f"a{index}"


def _with(path: str, value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(LEAST)
    around = [name for name in AROUND if path.startswith(name)]
    if around:
        whole["spec"].update(copy.deepcopy(AROUND[max(around, key=len)]))
    here: Any = whole
    parts = path.replace("[]", ".0").split(".")
    for part, following in pairwise(parts):
        here = here[0] if part == "0" else here.setdefault(part, {} if following != "0" else [{}])
    here[parts[-1]] = value
    return whole


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 30 else f"{text[:27]}..."
