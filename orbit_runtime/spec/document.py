"""YAML text → plain values, each with its line.

Belongs here: the YAML that Orbit accepts: 1.2, one document, no scalar that YAML 1.1 reads differently.
Does not belong here: what the values mean.

`kubectl` reads YAML 1.1 and most others 1.2. A file that both must understand in the same way cannot hold `010` (eight
or ten), `on` (true or text) or `1_000`: such a scalar is a problem here, with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.errors import ManifestError

Path = tuple[str | int, ...]

MAX_NODES = 50_000
MAX_DEPTH = 64
_STR = "tag:yaml.org,2002:str"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 3500
"""Python refuses to write more than 4300 digits, which are fewer in base 16."""
_WIDE = re.compile(r"\\U(?!000|0010)[0-9A-Fa-f]{8}")
"""An escape of more than the last character that there is."""
_EXACT = 2**53
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

_WORDS = re.compile(r"y|Y|yes|Yes|YES|on|On|ON|n|N|no|No|NO|off|Off|OFF")
_TRUE_WORDS = ("y", "yes", "on")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0o[0-7_]+")
_SIGNED_HEX = re.compile(r"[-+]0x[0-9a-fA-F_]+|0x[0-9a-fA-F]*_[0-9a-fA-F_]*")
_BINARY = re.compile(r"[-+]?0b[01_]+")
_UNDERSCORES = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_SIXTY = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a manifest, and the place of each part of it."""

    value: Any
    lines: dict[Path, int]
    """Line (from 1) of every mapping entry and list item."""
    problems: list[ManifestError] = field(default_factory=list)
    """Errors of single scalars and keys: the rest of the file can still be checked."""
    broken: set[Path] = field(default_factory=set)
    """Paths of those scalars, for which no further errors are needed."""


def parse_document(text: str, name: str) -> Document:
    """Read one YAML document. `name` is the file's, for messages.

    Raises:
        ManifestError: the text is not YAML, empty, several documents, or not a mapping.
    """
    # Imported here: half of the time that `import orbit_runtime.spec` may take.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    reader = _Reader(name)
    try:
        document = reader.read(iter(YAML(typ="safe", pure=True).parse(text)))
    except YAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise _too_large(name) from None
    except (OverflowError, ValueError):
        place = next(_WIDE.finditer(text), None)
        line = text.count("\n", 0, place.start()) + 1 if place else 1
        raise ManifestError(
            "an escape that names no character", where=f"{name}:{line}", fix="write the character itself"
        ) from None
    if document.value is None:
        raise ManifestError("the file is empty", where=name, fix="`orbit init` writes one to start from")
    if not isinstance(document.value, dict):
        raise ManifestError(
            f"the file holds a {_kind(document.value)}, not a manifest",
            where=f"{name}:1",
            fix="start with `apiVersion: orbitrl.dev/v1alpha1` and `kind: OrbitRun`",
        )
    return document


def parse_value(text: str, name: str) -> Any:
    """The value of one `--set`: a YAML scalar, or a list or mapping in brackets.

    Raises:
        ManifestError: it is not YAML, or ambiguous.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        document = _Reader(name, with_lines=False).read(iter(YAML(typ="safe", pure=True).parse(text or "null")))
    except (YAMLError, RecursionError, OverflowError, ValueError):
        raise ManifestError(
            f"`{text}` is not a YAML value", where=name, fix="put text with `:`, `#` or brackets in quotes"
        ) from None
    if document.problems:
        raise document.problems[0]
    return document.value


def find_ambiguity(text: str) -> tuple[str, str] | None:
    """The readings of a plain scalar by YAML 1.1 and 1.2, if they differ, and what to write instead; `None` if they
    agree.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    as_text = f'`"{text}"` for the text'
    if _WORDS.fullmatch(text):
        meant = "true" if text.lower() in _TRUE_WORDS else "false"
        return f"YAML 1.1 reads {meant}, YAML 1.2 text", f"write `{meant}`, or {as_text}"
    for pattern, kinds, base in (
        (_SIXTY, "a number in base 60, YAML 1.2 text", None),
        (_DATE, "a date, YAML 1.2 text", None),
        (_BINARY, "a binary number, YAML 1.2 text", 2),
        (_OCTAL, "text, YAML 1.2 an octal number", 8),
        (_SIGNED_HEX, "a number, YAML 1.2 text", 16),
    ):
        if pattern.fullmatch(text):
            digits = re.sub("^([-+]?)0[box]", r"\1", text.replace("_", ""))
            is_number = base is not None and digits not in ("", "-", "+")
            number = f"`{int(digits, base or 10)}` for the number, or " if is_number else ""
            return f"YAML 1.1 reads {kinds}", f"write {number}{as_text}"
    if _LEADING_ZERO.fullmatch(text):
        plain = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", text.replace("_", ""))
        return "YAML 1.1 reads an octal number, YAML 1.2 a decimal one", f"write `{plain}` for the number, or {as_text}"
    if _UNDERSCORES.fullmatch(text):
        return "YAML 1.1 reads a number, YAML 1.2 text", f"write `{text.replace('_', '')}` for the number, or {as_text}"
    if text == "=":
        return "YAML 1.1 reads a default value, YAML 1.2 text", f"write {as_text}"
    return None


def read_scalar(text: str) -> Any:
    """A plain scalar under the core schema of YAML 1.2."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text, 0 if text.startswith("0") and not text.isdigit() else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    if special:
        return float("nan") if special[3] else float(f"{special[1]}inf")
    return text


class _Reader:
    """Builds values from parser events; lives for one document."""

    def __init__(self, name: str, *, with_lines: bool = True) -> None:
        self._name = name
        self._with_lines = with_lines
        self._document = Document(None, {})
        self._anchors: dict[str, Any] = {}
        self._nodes = 0

    def read(self, events: Iterator[Any]) -> Document:
        value, found = None, 0
        for event in events:
            kind = type(event).__name__
            if kind in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"):
                continue
            if kind == "DocumentStartEvent":
                found += 1
                if found > 1:
                    raise ManifestError(
                        "a second document starts here",
                        where=f"{self._name}:{event.start_mark.line + 1}",
                        fix="keep one run per file, and remove the `---`",
                    )
                continue
            value = self._value(event, events, (), 0)
        document = self._document
        return Document(value, document.lines, document.problems, document.broken)

    def _value(self, event: Any, events: Iterator[Any], path: Path, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _too_large(self._name)
        kind = type(event).__name__
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise ManifestError(
                    f"`*{event.anchor}` refers to nothing before it",
                    where=self._where(event, ()),
                    fix=f"define it above with `&{event.anchor}`, or write the value out",
                )
            self._nodes += _size(self._anchors[event.anchor])
            return self._anchors[event.anchor]
        value: Any
        if kind == "ScalarEvent":
            value = self._scalar(event, path)
        elif kind == "SequenceStartEvent":
            self._check_tag(event, path)
            value = []
            for child in events:
                if type(child).__name__ == "SequenceEndEvent":
                    break
                here = (*path, len(value))
                self._document.lines[here] = child.start_mark.line + 1
                value.append(self._value(child, events, here, depth + 1))
        else:
            self._check_tag(event, path)
            value = self._mapping(events, path, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _mapping(self, events: Iterator[Any], path: Path, depth: int) -> dict[Any, Any]:
        value: dict[Any, Any] = {}
        for event in events:
            if type(event).__name__ == "MappingEndEvent":
                break
            key = self._value(event, events, (*path, str(getattr(event, "value", "?"))), depth + 1)
            raw = str(getattr(event, "value", "?"))
            here = (*path, raw)
            child = self._value(next(events), events, here, depth + 1)
            self._document.lines.setdefault(here, event.start_mark.line + 1)
            if raw == "<<" and event.style is None:
                self._report(event, here, "merge keys are YAML 1.1 and not 1.2", "write the fields out")
            elif raw in value:
                first = self._document.lines[here]
                self._report(event, here, f"`{raw}` appears here twice, first on line {first}", "keep one of the two")
            elif not isinstance(key, str) and here not in self._document.broken:
                self._report(event, here, f"`{raw}` is not a field name", f'write it in quotes if it is one: `"{raw}"`')
            else:
                value[raw] = child
        return value

    def _scalar(self, event: Any, path: Path) -> Any:
        event.value = self._whole(event, path)
        if not event.implicit[0] or event.style is not None:
            if event.tag not in (None, "!", _STR):
                self._check_tag(event, path)
            return event.value
        ambiguity = find_ambiguity(event.value)
        if ambiguity is None:
            return _as_json(read_scalar(event.value))
        reading, fix = ambiguity
        self._report(event, path, f"`{event.value}` is ambiguous: {reading}", fix)
        return event.value

    def _whole(self, event: Any, path: Path) -> str:
        """The text, with each pair of surrogates, as JSON escapes a character, as that character."""
        try:
            return str(event.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._report(event, path, "half of a surrogate pair, which is not a character", "write the character")
            return ""

    def _check_tag(self, event: Any, path: Path) -> None:
        if event.tag not in (None, "!"):
            self._report(event, path, f"the tag `{event.tag}` has no meaning here", "remove it")

    def _report(self, event: Any, path: Path, message: str, fix: str) -> None:
        self._document.problems.append(ManifestError(message, where=self._where(event, path), fix=fix))
        self._document.broken.add(path)

    def _where(self, event: Any, path: Path) -> str:
        from orbit_runtime.spec.fields import format_path

        line = f":{event.start_mark.line + 1}" if self._with_lines else ""
        return f"{self._name}{line}" + (f": {format_path(path)}" if path else "")


def _as_json(value: Any) -> Any:
    """JSON has one kind of number: `1e3` reaches the API server as 1000, so it is a whole number here too."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(_size(child) for child in value.values())
    return 1 + sum(_size(child) for child in value) if isinstance(value, list) else 1


def _too_large(name: str) -> ManifestError:
    return ManifestError(
        f"the file is nested more than {MAX_DEPTH} deep or holds more than {MAX_NODES} values",
        where=name,
        fix="a manifest has a few dozen fields; is this the right file?",
    )


def _kind(value: Any) -> str:
    return {list: "list", str: "text", bool: "truth value", int: "number", float: "number"}.get(type(value), "value")


def _syntax_error(error: Exception, text: str, name: str) -> ManifestError:
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read")
    if mark is None:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        return ManifestError(
            f"not YAML: {problem}", where=f"{name}:{line}", fix="is this a text file? a manifest is plain UTF-8 text"
        )
    line, column = mark.line + 1, mark.column + 1
    source = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in source[: mark.column + 1] or problem.startswith("found character '\\t'"):
        return ManifestError(
            "there is a tab where YAML requires spaces", where=f"{name}:{line}:{column}", fix="indent with spaces"
        )
    context = getattr(error, "context", None)
    return ManifestError(
        f"not YAML: {problem}" + (f" ({context})" if context else ""),
        where=f"{name}:{line}:{column}",
        fix="check here and the line before: the indentation, a space after each colon of a field, and quotes around "
        "text with `: `, `#`, `@` or brackets",
    )
