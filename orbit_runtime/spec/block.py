"""What every block of the manifest shares: its base, the kinds of fields and of rules, and rules of several blocks or
that CEL cannot express.

The loader and the API server hold each rule against a manifest. A block's own rules stand below its fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel, to_snake

from orbit_runtime.spec.cel import Value, compile_cel, fields_of
from orbit_runtime.spec.engine_arguments import argument_problems
from orbit_runtime.spec.hub_address import MODEL_FORM, PROMPTS_FORM, REPOSITORY, REVISION

FieldSet = Literal["identity", "layout", "display"]

IDENTITY: Any = Field(json_schema_extra={"orbitSet": "identity"})
"""Changes the maths: a checkpoint of another identity is refused."""
LATER_IDENTITY: Any = Field(json_schema_extra={"orbitSet": "identity", "orbitLater": True})
"""The same, of a field that checkpoints of earlier versions do not know: at its default it is no part of the identity,
so that they can still be resumed."""


def later_identity(before: Any) -> Any:
    """`LATER_IDENTITY` of a field whose default depends on another: `before` is what earlier versions always did."""
    return Field(json_schema_extra={"orbitSet": "identity", "orbitLater": True, "orbitBefore": before})


LAYOUT: Any = Field(json_schema_extra={"orbitSet": "layout"})
"""Changes where and how it is computed, not what: may change on resume."""
DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display"})
"""Changes how long the run is, and what it keeps and shows: may change on resume."""
LATER_DISPLAY: Any = Field(json_schema_extra={"orbitSet": "display", "orbitLater": True})
"""Unknown to earlier versions, whose runs behaved like its default. All of `evaluation` is in this set: nothing in it
changes what is trained, what stands in its `environments` included."""

SHOWN: Any = Field(json_schema_extra={"orbitShown": True})
"""Not needed by every kind of run, but written into a new manifest."""

Uri = Annotated[str, Field(min_length=1, max_length=1024)]
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Name of a Kubernetes object."""
LabelName = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{_LABEL}$")]
"""Name of a Kubernetes object whose name is part of another name, such as a namespace."""
MAX_LABEL_VALUE = 63
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, Field(max_length=MAX_LABEL_VALUE, pattern=_LABEL_VALUE)]
"""Value of a Kubernetes label."""
LABEL_KEY = rf"^({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
MAX_LABEL_KEY = 317
Entrypoint = Annotated[
    str, Field(min_length=3, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$")
]
"""`module:function`."""
Quantity = Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$")]
"""Bytes as Kubernetes writes them."""
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of an environment variable's name."""
AsTuple = Strict(False)
"""A list in the file becomes a tuple here; its items stay strict."""


def _drop_none(value: Any) -> Any:
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


WithoutEmpty = BeforeValidator(_drop_none)
"""A key without a value is left out of a mapping, as the API server does."""


class Contradiction(NamedTuple):
    """Fields that are each allowed and impossible together. Paths are relative to the block that found it."""

    at: tuple[str | int, ...]
    """The field to blame, e.g. `("oft",)`."""
    involves: tuple[tuple[str | int, ...], ...]
    """All other fields that the finding rests on: if one of them is itself wrong, the finding is omitted."""
    message: str
    fix: str


def is_label_key(text: str) -> bool:
    """Whether Kubernetes takes it as the key of a label or an annotation."""
    return len(text) <= MAX_LABEL_KEY and re.fullmatch(LABEL_KEY, text) is not None


def is_label_value(text: str) -> bool:
    return len(text) <= MAX_LABEL_VALUE and re.fullmatch(_LABEL_VALUE, text) is not None


class Block(BaseModel):
    """Closed and frozen; camelCase outside, snake_case inside; no value is converted into another kind."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
    )

    rules: ClassVar[tuple[Callable[[Any], Iterable[Contradiction]], ...]] = ()
    """Rules within a block of this kind, without its children's; most are of the kind `Rule`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        """A field without a value (`lora:`) is one that is left out, as it is for the API server."""
        if not isinstance(value, Mapping) or None not in value.values():
            return value
        fields = cls.model_fields.items()
        needed = {name for key, field in fields if field.is_required() for name in (key, field.alias)}
        known = {name for key, field in fields for name in (key, field.alias)}
        return {name: each for name, each in value.items() if each is not None or name in needed or name not in known}


class Inner(NamedTuple):
    """A field that holds blocks."""

    name: str
    alias: str
    kind: type[Block]
    is_list: bool


@cache
def inner_blocks(kind: type[Block]) -> tuple[Inner, ...]:
    """The fields of a block that hold blocks, in order."""
    return tuple(
        Inner(name, str(field.alias), found, get_origin(field.annotation) is tuple)
        for name, field in kind.model_fields.items()
        if (found := _find_block(field.annotation))
    )


def _find_block(annotation: Any) -> type[Block] | None:
    """`Block` of `Block | None` or `tuple[Block, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    return next(filter(None, map(_find_block, get_args(annotation))), None)


MAX_ANNOTATION_BYTES = 1 << 18
LABEL_FIX = "write letters, digits, `-`, `_` and `.`, and a domain and `/` before them if need be"
LABEL_KEYS = "write keys of labels: letters, digits, '-', '_' and '.', with a domain and '/' before them if need be"


@dataclass(frozen=True)
class Rule:
    """One condition that every manifest fulfils.

    Example: `Rule("topK", "!has(self.topK) || self.over == 'TopK'", "`over: {self.over}` …", "remove `topK`")`.
    """

    field: str
    """The field to blame, relative to the block; empty: the block itself."""
    cel: str
    """True where nothing is wrong. On the API server it is silent where a field that it reads is out of bounds."""
    message: str
    """The error, with places such as `{self.top_k}` for values of the block."""
    fix: str
    _: KW_ONLY
    each_key: bool = False
    """`field` is a mapping, and `cel` must be true of every `key`."""
    more: Callable[[Any], Any] | None = None
    """Computes the value of `{more}` in message and fix from the block."""
    rests_on: tuple[str, ...] | None = None
    """The other fields that the finding rests on: where one of them is itself wrong, nothing is said. If unset, all
    that `cel` reads."""
    server: str | bool = True
    """What the API server says, which prints no message and no values beside it; `True` is the fix. `False`: it has
    another means, or cannot read the field."""
    _holds: Value = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_holds", compile_cel(self.cel))

    def __call__(self, block: Any) -> Iterable[Contradiction]:
        """Errors in a block."""
        if self.each_key:
            keys = getattr(block, to_snake(self.field))
            return [self._found(block, key) for key in keys if not self._holds({"self": block, "key": key})]
        return () if self._holds({"self": block}) else (self._found(block),)

    @property
    def whole(self) -> str:
        """The condition of the block, as the API server reads it."""
        here = f"self.{self.field}"
        return f"!has({here}) || {here}.all(key, {self.cel})" if self.each_key else self.cel

    @property
    def hint(self) -> str:
        """The API server's message."""
        return self.server if isinstance(self.server, str) else self.fix.format().replace("`", "")

    def _found(self, block: Any, key: str = "") -> Contradiction:
        values = {"self": block, "key": key, "more": self.more and self.more(block)}
        others = [path for path in fields_of(self.cel) if not f"{self.field}.".startswith(f"{path}.")]
        involved = others if self.rests_on is None else self.rests_on
        at = tuple(self.field.split(".")) if self.field else ()
        message, fix = self.message.format(**values), self.fix.format(**values)
        return Contradiction(at, tuple(tuple(path.split(".")) for path in involved), message, fix)


@dataclass(frozen=True)
class Unique:
    """No two items of a list are the same; the API server, which merges it as a set or as a map, sees to that itself.

    Example: `Unique("endpoints", "url")`.
    """

    field: str
    key: str = ""
    """Field that identifies an item; empty: the whole item."""
    owner: str = ""
    """The thing that needs a unique name, in the words of the fix; empty: an item has no name."""

    def __call__(self, block: Any) -> Iterator[Contradiction]:
        """Yields one error for an item, however often it is repeated."""
        items = getattr(block, to_snake(self.field)) or ()
        values = [getattr(item, self.key) if self.key else item for item in items]
        for index, value in enumerate(values):
            if values[:index].count(value) != 1:
                continue
            at, first = (self.field, index), values.index(value)
            if self.owner:
                message = f"`{value}` is already the name of {self.field}[{first}]"
                fix = f"give each {self.owner} its own name"
                yield Contradiction(at, ((self.field, first, "name"),), message, fix)
            else:
                yield Contradiction(at, (), f"`{value}` appears here twice", "name each once")


def uri_rule(schemes: tuple[str, ...], name: str = "uri", unless: str = "") -> Rule:
    """The address is one that Orbit opens. In a field `uri` the pod fills in variables, so that there the API server
    knows nothing of one that has any. Args: unless: CEL, true where there is no address."""
    here, others = f"self.{name}", [scheme for scheme in schemes if scheme != "file"]
    variables = f"{here}.contains('${{') || " if name == "uri" else ""
    known = f"!{here}.contains('://') || {here}.matches('^(file:///|({'|'.join(others)})://[/]*[^/])')"
    return Rule(
        name,
        f"{unless}{variables}(({known}) && !{here}.matches({'|'.join(_BROKEN)!r}))",
        "{more[0]}",
        "{more[1]}",
        server="allowed: a path, file:///path, " + ", ".join(f"{scheme}://name" for scheme in others),
        more=lambda block: _explain_uri(getattr(block, to_snake(name)), schemes),
    )


_BROKEN: Mapping[str, tuple[str, str]] = {
    "[\\x00-\\x1f\\x7f]": ("{shown} holds a control character", "write the address alone, in one line"),
    "^(file://)?/+$": ("`{uri}` is the whole file system", "name a folder or a file in it"),
    "^(builtin|file|hf|s3|gs|az|pvc|configmap|https?):/?[^/]": (
        "`{uri}` is neither a path nor an address", "write `{scheme}://` before a name, or a path alone"
    ),
    "^(s3|gs|az)://[^/]*@": (
        "`{uri}` holds a user or a password", "leave them out: they come from the environment, or a Secret"
    ),
    "^(s3|gs|az)://[/]*[^/]*[^/A-Za-z0-9._-]": (
        "`{uri}` names no bucket", "write a bucket's name: letters, digits, `-`, `_` and `.`"
    ),
}  # fmt: skip
"""Addresses that no store and no disk can open, or that hold a secret → the error and its fix."""


def _explain_uri(uri: str, schemes: tuple[str, ...]) -> tuple[str, str]:
    """The error and its fix."""
    scheme, _, rest = uri.partition("://")
    known = scheme in (*schemes, uri)
    if known and (broken := next((each for each in _BROKEN if re.search(each, uri)), None)):
        shown = {"uri": uri, "shown": repr(uri), "scheme": uri.partition(":")[0]}
        return _BROKEN[broken][0].format(**shown), _BROKEN[broken][1].format(**shown)
    if scheme == "file":
        return f"`{uri}` does not hold an absolute path", f"write the path alone: `{rest}`"
    if scheme in schemes:
        return f"`{uri}` names nothing after `{scheme}://`", "write its name"
    allowed = ", ".join(["a path", *(f"`{each}://`" for each in schemes)])
    near = "".join(f"did you mean `{each}://`? " for each in get_close_matches(scheme, schemes, n=1))
    return f"`{uri}` is not something Orbit can open here", f"{near}allowed: {allowed}"


def _hub_rule(is_address: str, what: str, form: str) -> Rule:
    """Args: is_address: CEL, true for an address on a hub of the kind that is needed."""
    # What is no name after `hf://` at all, `uri_rule` refuses.
    others = "!self.uri.matches('^hf://[/]*[^/]') || self.uri.contains('${')"
    cel = f"{others} || (({is_address}) && !self.uri.matches('/[.][.](/|$)'))"
    return Rule("uri", cel, f"`{{self.uri}}` is not the address of a {what} on a hub", f"write {form}")


_REVISED = f"{REPOSITORY}(@{REVISION})?"
MODEL_ON_HUB = _hub_rule(f"self.uri.matches({f'^hf://{_REVISED}$'!r})", "model", MODEL_FORM)
PROMPTS_ON_HUB = _hub_rule(
    f"self.uri.matches({f'^hf://datasets/{_REVISED}/.+$'!r})"
    f" || (self.uri.matches({f'^hf://{_REVISED}/.+$'!r}) && !self.uri.startsWith('hf://datasets/'))",
    "file",
    PROMPTS_FORM,
)


def scored_rule(unless: str) -> Rule:
    """The policy is scored in the block's `environment`. Args: unless: CEL, true where nobody is to be scored in it."""
    own = "self.environment"
    return Rule(
        "environment.rewards",
        f"{unless} || has({own}.entrypoint) || has({own}.name) || !({own}.type in ['SingleTurn', 'MultiTurn'])"
        f" || size({own}.rewards) > 0",
        "nothing scores the policy",
        "add `{{name: correct, type: ExactMatch}}`",
    )


def label_keys_rule(name: str, *, server: str | bool = LABEL_KEYS) -> Rule:
    """The mapping's keys are such as a Kubernetes label may have."""
    cel = f"size(key) <= {MAX_LABEL_KEY} && key.matches({LABEL_KEY!r})"
    return Rule(name, cel, "`{key}` cannot be the key of a label", LABEL_FIX, each_key=True, server=server)


def by_type(path: str, defaults: Mapping[str, str | float | None], block: str = "self") -> str:
    """CEL of a field: as it is written, or what its block's type has where it is left out. No default: 0."""
    types: dict[str, list[str]] = {}
    for name, value in defaults.items():
        types.setdefault(f"'{value}'" if isinstance(value, str) else f"{0.0 if value is None else value!r}", []).append(
            name
        )
    (*others, (usual, _)) = sorted(types.items(), key=lambda item: len(item[1]))
    cases = "".join(f"{block}.type in {names!r} ? {value} : " for value, names in others)
    return f"(has({block}.{path}) ? {block}.{path} : {cases}{usual})"


def check_annotations(metadata: Any) -> Iterator[Contradiction]:
    """In Python, because a rule of the API server can read a name and nothing else of the metadata, and CEL counts no
    bytes."""
    for key in metadata.annotations:
        if not is_label_key(key.lower()):
            yield Contradiction(("annotations",), (), f"`{key.lower()}` cannot be the key of a label", LABEL_FIX)
    size = sum(len(f"{key}{value}".encode(errors="surrogatepass")) for key, value in metadata.annotations.items())
    if size > MAX_ANNOTATION_BYTES:
        message = f"{size} bytes in all, and Kubernetes takes {MAX_ANNOTATION_BYTES}"
        yield Contradiction(("annotations",), (), message, "keep long texts elsewhere")


def check_engine_arguments(rollout: Any) -> Iterator[Contradiction]:
    """In Python, because CEL cannot read a mapping whose values are of any type, and has no table of arguments."""
    for name, message, fix in argument_problems(rollout.engine_arguments):
        yield Contradiction(("engineArguments", name), (), message, fix)
