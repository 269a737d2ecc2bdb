"""Addresses on a Hugging Face hub: `hf://org/name@revision`, `hf://datasets/org/name@revision/file`."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODEL_FORM = "hf://org/name@revision, or hf://org/name for its main branch"
PROMPTS_FORM = "hf://datasets/org/name@revision/file"
REPOSITORY, REVISION = r"[\w.-]+/[\w.-]+", r"[^/?#]+"
"""Expressions, in the syntax that Python's `re` (with ASCII) and RE2 share."""
# `datasets/org/name` is a data set, never the file `name` of `datasets/org`.
_ADDRESS = re.compile(rf"(datasets/|(?!datasets/[^/]*/))({REPOSITORY})(?:@({REVISION}))?(?:/(.+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Example: `HubAddress("datasets", "org/name", "main", "train.jsonl")` of `hf://datasets/org/name@main/train.jsonl`"""

    kind: str
    repository: str
    revision: str
    path: str | None


def parse_address(uri: str) -> HubAddress | None:
    """The address in a URI; `None` if it is not one."""
    found = _ADDRESS.fullmatch(uri.removeprefix("hf://"))
    if found is None or ".." in uri.split("/"):
        return None
    return HubAddress("datasets" if found[1] else "models", found[2], found[3] or "main", found[4])


def is_model_address(uri: str) -> bool:
    """Whether it names a whole repository of a model, such as `hf://org/name@main`."""
    address = parse_address(uri)
    return address is not None and address.kind == "models" and address.path is None
