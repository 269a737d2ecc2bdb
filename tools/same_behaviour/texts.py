"""What the product says without training: help, manifests, plans, messages.

Belongs here: groups that no processor rounds. Does not belong here: runs (`runs`).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from tests.cluster.corpus import hand_written
from tools.same_behaviour.product import Ended, Product

MACHINES = {
    "B200": ["spec.placement.gpuProduct=B200"],
    "H100": ["spec.placement.gpuProduct=H100"],
    "CPU": ["spec.placement.gpus=0"],
}
LINE = 120
GOLDEN = ("tests/unit_operator/golden", "charts/orbit/files", "tests/unit_runtime/api/public_names.txt")
"""Files that tests or `make check` hold the product to: the same file, the same product."""
SERVERS = """
import json, tempfile, sys
from pathlib import Path
from tests.engines.test_pretended_gpus import CASES, command_line
hub = {path.stem: () for path in sorted(Path("examples").glob("*.yaml")) if "  uri: hf://" in path.read_text()}
for name, overrides in {**hub, **CASES}.items():
    for gpu in ("B200", "H100"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = command_line(name.split()[0], overrides, gpu, Path(folder))
            except Exception as error:
                said = {"refused": f"{type(error).__name__}: {error}"}
            print(json.dumps([name, gpu, said], default=str).replace(folder, "FOLDER"))
"""


def told(ended: Ended) -> Iterator[str]:
    yield f"  exit {ended.code}"
    for stream, text in (("", ended.out), ("! ", ended.error)):
        yield from (f"  {stream}{line}".rstrip() for line in text.splitlines())


def spread(name: str, value: object, indent: str = "  ") -> Iterator[str]:
    """`name: JSON`; what would be long has a line for each part of it, and what differs is seen."""
    line = f"{indent}{name}: {json.dumps(value)}"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if len(line) <= LINE or not parts:
        yield line
        return
    yield f"{indent}{name}:"
    for key, part in parts:
        yield from spread(str(key), part, indent + "  ")


def sets(overrides: list[str]) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def help_texts(product: Product) -> Iterator[str]:
    """Of every command."""
    left: list[list[str]] = [[]]
    while left:
        command = left.pop(0)
        ended = product.orbit(*command, "--help")
        yield shlex.join(["orbit", *command, "--help"])
        yield from told(ended)
        _, found, names = ended.out.partition("\nCommands:\n")
        if found:
            left += [[*command, line.split()[0]] for line in names.splitlines() if re.match(r"  \w", line)]


def fields(product: Product) -> Iterator[str]:
    """What a manifest can hold: every field of the API's schema without description, and what `orbit init` writes."""
    for path in sorted((product.root / "crds").glob("*.yaml")):
        for version in yaml.safe_load(path.read_text())["spec"]["versions"]:
            yield f"{path.name} {version['name']}"
            yield from _schema(version["schema"]["openAPIV3Schema"], "")
            yield f"  columns {json.dumps(version.get('additionalPrinterColumns'))}"
    for arguments in (["init"], ["init", "--full"]):
        yield shlex.join(["orbit", *arguments])
        folder = product.scratch / "-".join(arguments)
        folder.mkdir(exist_ok=True)
        ended = product.orbit(*arguments, folder=folder)
        for line in told(ended):
            if not line.strip().startswith("#"):
                yield line
        for written in sorted(folder.rglob("*")):
            yield f"  {written.relative_to(folder)}"
            yield from (f"    {line}" for line in written.read_text().splitlines() if not line.strip().startswith("#"))


def _schema(schema: dict[str, Any], path: str) -> Iterator[str]:
    nested = ("properties", "items", "additionalProperties", "description", "x-kubernetes-validations")
    limits = {name: value for name, value in schema.items() if name not in nested}
    yield f"  {path or '.'} {json.dumps(limits, sort_keys=True)}"
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"    {json.dumps(rule, sort_keys=True)}"
    for name, inner in schema.get("properties", {}).items():
        yield from _schema(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from _schema(schema[name], f"{path}[]")


def validated(product: Product) -> Iterator[str]:
    """`orbit validate` of each example."""
    for example in product.examples:
        before: list[str] = []
        for machine, overrides in MACHINES.items():
            yield f"orbit validate {example} on {machine}"
            now = list(told(product.orbit("validate", example, *sets(overrides))))
            yield from ["  the same"] if now == before else now
            before = now


def planned(product: Product) -> Iterator[str]:
    """`orbit plan --json` of each example."""
    for example in product.examples:
        for machine, overrides in MACHINES.items():
            yield f"orbit plan {example} --json on {machine}"
            ended = product.orbit("plan", example, "--json", *sets(overrides))
            try:
                for name, value in json.loads(ended.out).items():
                    yield from spread(name, value)
                yield from told(Ended(ended.code, "", ended.error))
            except json.JSONDecodeError:
                yield from told(ended)


def dry_runs(product: Product) -> Iterator[str]:
    """`orbit run --dry-run` of each example. The number of workers follows the machine's cores."""
    for example in product.examples:
        yield f"orbit run {example} --dry-run"
        ended = product.orbit("run", example, "--dry-run")
        for line in told(ended):
            yield re.sub(r"(worker|template) x \d+", r"\1 x #", line)


def servers(product: Product) -> Iterator[str]:
    """Arguments and variables of the servers that examples start on GPUs, as this checkout's own test finds them."""
    for line in product.python(SERVERS).splitlines():
        name, gpu, said = json.loads(line)
        yield f"{name} on {gpu}"
        if "refused" in said:
            yield f"  refused: {said['refused']}"
            continue
        yield from (f"  {flag}" for flag in _flags(said["arguments"]))
        yield from (f"  {variable}={value}" for variable, value in said["variables"].items())


def _flags(arguments: list[str]) -> list[str]:
    """Each flag with its values, in the order given."""
    found: list[str] = []
    for each in map(str, arguments):
        if each.startswith("--") or not found:
            found.append(each)
        else:
            found[-1] += f" {each}"
    return found


def messages(product: Product) -> Iterator[str]:
    """What `orbit validate` says of every bad manifest that is written by hand."""
    folder = product.scratch / "messages"
    folder.mkdir(exist_ok=True)
    for case in hand_written():
        if case.refused:
            (folder / "run.yaml").write_text(case.text, encoding="utf-8")
            yield case.name
            yield from told(product.orbit("validate", "run.yaml", folder=folder))


def golden(product: Product) -> Iterator[str]:
    """Digests of the files that tests compare with."""
    for place in GOLDEN:
        path = product.root / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]} {file.relative_to(product.root)}"
