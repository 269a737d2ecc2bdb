"""The code of a run: the user's files behind its entry points, kept in the run folder.

Belongs here: finding these files, recording them, comparing them at each start, and giving them to a replay. Does not
belong here: importing them (`workers`), fetching `environment.code` (`sides.inputs`).

The files are found by following import statements from each entry point; nothing is imported. So one process knows the
code of all others, whichever of them imports it and when. A module whose name is computed is not found.

`code/000003.json` is the code that execution 3 began with, written if it is not that of the record before. It is not
part of the identity that checkpoints carry, so a run that goes on with other code keeps its checkpoints.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orbit_runtime.algorithms.custom_loss import own_targets
from orbit_runtime.errors import DataError, OutputError, UsageError
from orbit_runtime.evaluation.tasks import EvalTask, environment_entrypoints
from orbit_runtime.sides.inputs import Inputs
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import Execution, Store
from orbit_runtime.storage.store import stays_inside
from orbit_runtime.workers.child.process import import_path
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON, is_borrowed

FOLDER = "code/"
LARGEST = 1 << 20
"""Bytes of all kept files together."""
DIFFERENCE_LINES, DIFFERENCE_WIDTH = 40, 160
"""Largest difference that an error shows."""
SECRET_NAME = re.compile("token|secret|passw|credential|key", re.IGNORECASE)
SHORTEST_SECRET = 8
"""Shorter values of variables occur in any text."""

Record = Mapping[str, Any]
RECORDED = ("step", "entrypoints", "files", "packages", "environment.code")


@dataclass(frozen=True)
class CodeSource:
    """Entry points that are imported from the same folders."""

    targets: Sequence[str]
    search_path: Sequence[str]
    prefix: str = ""
    """Put before the names of its files, if they are apart from the run's own."""


@dataclass(frozen=True)
class RunCode:
    """The code at the start of one execution."""

    record: Record
    """`entrypoints`: each one's files; `files`: their digests and texts; `packages`: the versions of others;
    `environment.code`: digest of the whole folder."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Name of a file → where it was read."""

    def changed(self) -> list[str]:
        """Names of the files that are not the same any more. Deleted ones, and archives, do not count."""
        found = []
        for name, place in self.places.items():
            with suppress(OSError):
                if _digest(Path(place).read_bytes()) != self.record["files"][name]["digest"]:
                    found.append(name)
        return found


NO_CODE = RunCode({})


def code_sources(
    spec: RunSpec, held_out: Sequence[EvalTask], given: Mapping[str, object], inputs: Inputs
) -> list[CodeSource]:
    """What a run imports by name. Args: given: rewards given from Python, by name; held_out: its evaluations."""
    targets = list(own_targets(spec.algorithm).values())
    if spec.algorithm.type != "SFT":
        targets += environment_entrypoints(spec.environment, given)
    sources = [CodeSource(targets, inputs.search_path())] if targets else []
    for task in held_out:
        environment = task.spec.environment
        prefix = "" if environment.code in (None, spec.environment.code) else f"evaluation/{task.name}/"
        sources.append(CodeSource(environment_entrypoints(environment, given), task.search_path, prefix))
    return sources


def find_code(sources: Sequence[CodeSource], folder_digest: str | None, environ: Mapping[str, str]) -> RunCode:
    """Reads all files that the entry points import. Args: folder_digest: of `environment.code`."""
    entrypoints: dict[str, list[str]] = {}
    found: dict[str, tuple[str, bytes]] = {}
    others: set[str] = set()
    for source in sources:
        for target in sorted({*source.targets} - {FROM_PYTHON}):
            files, foreign = imported_files(target.partition(":")[0], source.search_path)
            entrypoints[source.prefix + target] = sorted(source.prefix + name for name in files)
            found |= {source.prefix + name: each for name, each in files.items()}
            others |= foreign
    named = {
        name: value.encode(errors="surrogateescape") for name, value in environ.items() if SECRET_NAME.search(name)
    }
    secrets = {name: value for name, value in named.items() if len(value) >= SHORTEST_SECRET}
    kept: dict[str, dict[str, str]] = {}
    room = LARGEST
    for name, (_, data) in sorted(found.items()):
        withheld = _withheld(data, secrets, room)
        text = {"withheld": withheld} if withheld else {"text": data.decode()}
        kept[name] = {"digest": _digest(data), **text}
        room -= 0 if withheld else len(data)
    record = {
        "entrypoints": entrypoints,
        "files": kept,
        "packages": _versions(others),
        "environment.code": folder_digest,
    }
    return RunCode(record, {name: place for name, (place, _) in found.items()})


def imported_files(
    module: str, search_path: Sequence[str]
) -> tuple[dict[str, tuple[str, bytes]], set[str]]:  # fmt: skip
    """The user's files behind a module and all that it imports: name → place and content; and the first names of the
    modules that are others'. A module counts as the user's if it is below one of these folders, not in a hidden one.
    """
    importlib.invalidate_caches()
    roots = [os.path.join(os.path.abspath(each), "") for each in search_path]
    places = import_path([*map(os.path.abspath, search_path)])

    @cache
    def find(name: str) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        above = find(parent) if parent else None
        inside = places if not parent else list(above.submodule_search_locations or ()) if above else []
        with suppress(ImportError, OSError, ValueError):
            # By its last name: of a whole one, Python would look at the modules that this process has imported.
            return PathFinder.find_spec(last, inside)
        return None

    def is_own(spec: ModuleSpec | None) -> bool:
        found = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return any(
            each.startswith(root) and "/." not in each[len(root) - 1 :] and not is_borrowed(each)
            for each in found
            for root in roots
        )

    files: dict[str, tuple[str, bytes]] = {}
    foreign: set[str] = set()
    pending, seen = {module}, {""}
    while pending:
        name = pending.pop()
        first, spec = name.partition(".")[0], find(name)
        if not is_own(find(first)):
            foreign.add(first)
        elif spec is not None and is_own(spec):
            parent = name.rpartition(".")[0]
            package = parent if spec.submodule_search_locations is None else name
            more = {parent}
            with suppress(OSError, AttributeError):
                # A namespace has no file; one that cannot be read is reported by whoever imports it.
                data = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
                files["/".join([*filter(None, package.split(".")), Path(str(spec.origin)).name])] = (
                    str(spec.origin), data
                )  # fmt: skip
                more |= {*_imports(data, package)}
            pending |= more - seen
            seen |= more
    return files, foreign


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Names of the modules that a file may import: what `from x import y` takes may be one."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                with suppress(ImportError):
                    base = resolve_name("." * level + (module or ""), package)
                    yield from (base, *(f"{base}.{each.name}" for each in names))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                with suppress(ImportError):
                    yield resolve_name(name, package)


def _versions(modules: set[str]) -> dict[str, str | None]:
    """Package → version, of modules that are neither the user's nor Python's; None if no package has it."""
    found: dict[str, str | None] = {}
    for module in sorted(modules - sys.stdlib_module_names - {"orbit_runtime"}):
        name = module
        if not (distributions := [*metadata.distributions(name=name)]) and PathFinder.find_spec(name):
            # Takes seconds where many packages are installed.
            name = metadata.packages_distributions().get(module, [module])[0]
            distributions = [*metadata.distributions(name=name)]
        found[name] = distributions[0].version if distributions else None
    return found


def _withheld(data: bytes, secrets: Mapping[str, bytes], room: int) -> str:
    """Why only the digest of a file is kept; empty if its text is."""
    reasons = [f"it holds the value of {name}" for name, value in secrets.items() if value in data]
    reasons += [f"all files together are more than {LARGEST >> 20} MiB"] * (len(data) > room)
    reasons += ["it is not UTF-8 text"] * (data.decode(errors="replace").encode() != data)
    return next(iter(reasons), "")


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_records(store: Store) -> list[Record]:
    """All records of a run, the oldest first.

    Raises:
        OutputError: one is damaged.
    """
    keys = sorted(store.list(FOLDER))
    try:
        records: list[Record] = [
            {name: found[name] for name in RECORDED} for found in (json.loads(store.get(key)) for key in keys)
        ]
        # The folder may be others', and the files are written out again.
        files = [each for record in records for each in record["files"].items()]
        if not all(stays_inside(name) and isinstance(each["digest"], str) for name, each in files):
            raise ValueError
        return records
    except (ValueError, TypeError, LookupError, AttributeError):
        raise OutputError(
            f"a record of the run's code is damaged, one of {', '.join(keys)}",
            where=store.uri,
            fix="restore the file, or remove it: the code is then recorded anew",
        ) from None


def check_code(uri: str, then: Record | None, now: Record, *, accept: bool) -> list[str]:
    """Compares the code behind the entry points that both have; returns a sentence for each kind of change.

    Raises:
        OutputError: (73) it has changed, and is not accepted; the message shows the difference.
    """
    if then is None:
        return []
    changed = _changed_files(then, now)
    folders = then["environment.code"], now["environment.code"]
    lines = _difference(then, now, changed)
    if None not in folders and folders[0] != folders[1]:
        lines.append(f"environment.code: {folders[0][:19]}… then, {folders[1][:19]}… now")
        changed.append("environment.code")
    if lines and not accept:
        left = len(lines) - DIFFERENCE_LINES
        shown = [line[:DIFFERENCE_WIDTH] for line in lines[:DIFFERENCE_LINES]] + [f"… and {left} lines"] * (left > 0)
        raise OutputError(
            "the code of the run in this folder has changed:" + "".join(f"\n  {line}" for line in shown),
            where=uri,
            fix="restore it to continue the run, continue with the new code by `orbit run --accept-code` "
            "or `checkpoint.acceptCode: true`, or choose another --out for a new run",
        )
    packages = {name: (version, now["packages"].get(name, version)) for name, version in then["packages"].items()}
    return [f"the code, as accepted: {', '.join(changed)}"] * bool(changed) + [
        f"package {name}: {old} then, {new} now" for name, (old, new) in packages.items() if old != new
    ]


def _changed_files(then: Record, now: Record, targets: Sequence[str] | None = None) -> list[str]:
    """Names of the files that differ, of entry points that both have. Args: targets: only of these."""
    chosen = then["entrypoints"].keys() & now["entrypoints"].keys() & {*(targets or then["entrypoints"])}
    names = {name for each in (then, now) for target in chosen for name in each["entrypoints"][target]}
    old, new = ({name: file["digest"] for name, file in each["files"].items()} for each in (then, now))
    return sorted(name for name in names if old.get(name) != new.get(name))


def _difference(then: Record, now: Record, names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for name in names:
        old, new = (each["files"].get(name, {"text": "", "digest": "not there"}) for each in (then, now))
        if "text" in old and "text" in new:
            texts = old["text"].splitlines(), new["text"].splitlines()
            lines += unified_diff(*texts, f"{name}, then", f"{name}, now", lineterm="", n=2)
        else:
            lines.append(f"{name}: {old['digest'][:19]}… then, {new['digest'][:19]}… now")
    return lines


def keep_code(store: Store, execution: Execution, step: int, code: RunCode, then: Record | None) -> list[str]:
    """Records the code from this step on, unless it is the one in `then`, or there is none. Returns sentences for the
    user."""
    if not code.record["files"] or (then and all(then.get(name) == value for name, value in code.record.items())):
        return []
    content = json.dumps({"step": step, **code.record}, indent=1)
    store.put(f"{FOLDER}{execution.number:06d}.json", content.encode())
    unknown = f"the code is recorded from step {step + 1} on; what it was before is not known"
    return [unknown] * (then is None and step > 0) + [
        f"{name} is recorded by its digest only: {each['withheld']}"
        for name, each in code.record["files"].items()
        if "withheld" in each
    ]


def recorded_path(
    records: Sequence[Record],
    steps: Sequence[int],
    targets: Sequence[str],
    search_path: Callable[[], Sequence[str]],
    closing: ExitStack,
) -> Sequence[str]:
    """A folder with the recorded files behind these entry points, or `search_path()` if none is recorded for the steps.

    Raises:
        UsageError: other files count for a later one of the steps.
        DataError: only the digest of a file is recorded, and it is not that of the file in `search_path`.
    """
    begun = {step: [each for each in records if each["step"] < step] for step in steps}
    record = begun[steps[0]][-1] if begun[steps[0]] else {"entrypoints": {}}
    names = {name for target in targets for name in record["entrypoints"].get(target, ())}
    if not names:
        return search_path()
    for step in steps:
        if changed := _changed_files(record, begun[step][-1], targets):
            raise UsageError(
                f"from step {step} on the run has other code, in {', '.join(changed)}",
                where=FOLDER,
                fix=f"replay the steps before, with --steps {steps.index(step)}",
            )
    folder = closing.enter_context(TemporaryDirectory(prefix="orbit-code-"))
    path = () if all("text" in record["files"][name] for name in names) else search_path()
    modules = [target.partition(":")[0] for target in targets]
    here = {name: data for each in modules for name, (_, data) in imported_files(each, path)[0].items()}
    for name in sorted(names):
        kept = record["files"][name]
        data = kept["text"].encode() if "text" in kept else here.get(name, b"")
        if _digest(data) != kept["digest"]:
            raise DataError(
                f"{name} is recorded by its digest only ({kept.get('withheld')}), and the file here is another",
                where=FOLDER,
                fix="restore the file",
            )
        _write(folder, name, data)
    return [folder]


def newest_path(store: Store, closing: ExitStack) -> list[str]:
    """Folders with the files whose text a run recorded last: for who asks the run and has not its code."""
    record = next(reversed(read_records(store)), None)
    texts = {name: each["text"] for name, each in record["files"].items() if "text" in each} if record else {}
    if not texts:
        return []
    folder = closing.enter_context(TemporaryDirectory(prefix="orbit-code-"))
    for name, text in texts.items():
        _write(folder, name, text.encode())
    return [folder, *map(str, Path(folder).glob("evaluation/*/"))]


def _write(folder: str, name: str, data: bytes) -> None:
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
