"""The manifests that `orbit init` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from orbit_runtime.spec.fields import Schema, is_block, is_left_out, schema_tree
from orbit_runtime.spec.training import usual_rate

_WIDTH = 100

TEMPLATE_HEAD = """\
# An OrbitRun. A line such as `#name: value` shows a field and its default: to change it, remove its `#` and that of
# its block.
# Check it with `orbit validate {file}`, start it with `orbit run {file}`.
# Every field: docs/reference/manifest.md
"""

START = """\
# Check it with `orbit validate {file}`, start it with `orbit run {file}`. Every field: `orbit init --full`.
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata:
  name: my-run
spec:
  model:
    uri: {uri}
    precision: {precision}
{length}  adapter:
    type: LoRA
  data:
    prompts:
      - uri: builtin://two-digit-addition  # or a file of lines such as {{"prompt": "12+34=", "answer": "46"}}
  environment:
    rewards:
      - {{name: correct, type: {reward}, arguments: {{field: answer}}}}
  rollout:
    sampling:
      maxNewTokens: {tokens}
  training:
    steps: {steps}
    promptsPerStep: {prompts}
    learningRate: {rate}
"""


def render_start(file: str) -> str:
    """A short manifest that runs as it is, on any machine."""
    return START.format(
        file=file, uri="builtin://tiny-adder  # or a folder, hf://org/name, s3://bucket/prefix", precision="INT4",
        length="", reward="ExactMatch", tokens=4, steps=60, prompts=32, rate="2e-3",
    )  # fmt: skip


def render_start_of(file: str, uri: str, precision: str, num_parameters: int) -> str:
    """Likewise for a model that others made, which answers in sentences: a few answers of some length to a step."""
    return START.format(
        file=file, uri=format_value(uri), precision=precision, length="    maxSequenceLength: 256\n", reward="Math",
        tokens=32, steps=30, prompts=8, rate=f"{usual_rate('LoRA', num_parameters):g}",
    )  # fmt: skip


def render_template(file: str) -> str:
    """A manifest with every field: those that are needed filled in, the others as comments with their defaults."""
    return TEMPLATE_HEAD.format(file=file) + "".join(_template(schema_tree(), 0, live=True, values={}))


def _template(schema: Schema, depth: int, *, live: bool, values: dict[str, Any]) -> Iterator[str]:
    """Lines of a block. `live`: the block is no comment. `values`: fields to write out besides the needed ones."""
    # What only some kinds of run can do without is written out as well.
    shown = {name for name, child in schema["properties"].items() if child.get("orbitShown")}
    required = {*schema.get("required", ()), *shown}
    indent = "  " * depth
    for name, child in schema["properties"].items():
        on = live and (name in required or name in values)
        mark = "" if on else "#"
        yield from _comment(child, indent)
        if is_block(child) and not is_left_out(child):
            yield f"{indent}{mark}{name}:\n"
            yield from _template(child, depth + 1, live=on, values={})
        elif name in required and is_block(child.get("items", {})):
            yield f"{indent}{mark}{name}:\n"
            yield from _items(child, depth + 1, live=on)
        else:
            value = values[name] if name in values else _shown_value(child, needed=on)
            yield f"{indent}{mark}{name}: {format_value(value)}\n"


def _items(schema: Schema, depth: int, *, live: bool) -> Iterator[str]:
    """One item of a list of blocks, its first field on the line of the dash."""
    lines = list(_template(schema["items"], depth + 1, live=live, values=schema["examples"][0][0]))
    first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("# "))
    indent = "  " * depth
    for index, line in enumerate(lines):
        yield f"{indent}- {line[len(indent) + 2 :]}" if index == first else line


def _comment(schema: Schema, indent: str) -> Iterator[str]:
    words = schema["description"].split()
    if "enum" in schema and len(schema["enum"]) > 1:
        words += ["[" + ", ".join(map(str, schema["enum"])) + "]"]
    line = f"{indent}#"
    for word in words:
        if len(line) + len(word) >= _WIDTH:
            yield line + "\n"
            line = f"{indent}#"
        line += " " + word
    yield line + "\n"


def _shown_value(schema: Schema, *, needed: bool) -> Any:
    if needed:
        return schema["examples"][0]
    return schema.get("default", {} if schema.get("type") == "object" and not schema.get("optional") else None)


def format_value(value: Any) -> str:
    """A value in one line of YAML: words without quotes, the rest as in JSON."""
    if isinstance(value, str) and value and not set(value) & set("#{}[],&*!|>'\"%@`") and ": " not in value:
        return value
    if isinstance(value, list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
