"""Shipped model cards: what the planner knows about a published model before any of it is downloaded.

The cards are JSON beside this file, each with its source.

A card's `repositories` give each published variant's formats: `linear` covers every linear of the layers except the
router, `experts` also the routed experts of the MTP layers, a role only that role; everything else is BF16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.weights import EXPERT, STORED, ModelFacts, StoredFormat, StoredWeight, Weight

FOLDER = Path(__file__).resolve().parent / "cards"
NOT_QUANTISED = ("head", "embedding", "router", "vision")


@cache
def card_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def load_card(name: str) -> Mapping[str, Any]:
    """The card as shipped; KeyError for an unknown name."""
    if name not in card_names():
        raise KeyError(name)
    card: Mapping[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return card


@cache
def repositories() -> Mapping[str, str]:
    """Repository on a hub → card name."""
    return {repository: name for name in card_names() for repository in load_card(name)["repositories"]}


def find_card_facts(uri: str) -> ModelFacts | None:
    """Facts of `hf://org/name@revision` from a shipped card; None if there is none."""
    scheme, separator, rest = uri.partition("://")
    if scheme != "hf" or not separator:
        return None
    repository = rest.partition("@")[0].strip("/")
    known = {each.lower(): each for each in repositories()}
    return card_facts(known[repository.lower()]) if repository.lower() in known else None


@cache
def card_facts(repository: str) -> ModelFacts:
    """Facts of a published variant, by its repository."""
    card = load_card(repositories()[repository])
    formats: Mapping[str, str] = card["repositories"][repository]
    architecture = describe(card["config"], where=f"card {card['name']}")
    stored = tuple(_stored(weight, stored_format(weight, formats)) for weight in architecture.weights)
    return ModelFacts(
        name=repository,
        source=f"shipped card {card['name']}",
        precision=STORED[formats.get("routed_expert", formats.get("linear", "BF16"))].name,
        architecture=architecture,
        weights=stored,
        checkpoint_bytes=sum(each.num_bytes for each in stored),
    )


def stored_format(weight: Weight, formats: Mapping[str, str]) -> StoredFormat:
    """The format in which a variant stores a weight."""
    plain = STORED[weight.dtype]
    if not weight.is_linear or weight.role in NOT_QUANTISED:
        return plain
    if weight.role == "mtp" and EXPERT in weight.name and "experts" in formats:
        return STORED[formats["experts"]]
    name = formats.get(weight.role, formats.get("linear"))
    return STORED[name] if name else plain


def _stored(weight: Weight, stored: StoredFormat) -> StoredWeight:
    block = stored.block if stored.block and stored.block[1] else None
    return StoredWeight(weight, stored.num_bytes(weight.shape) * weight.count, stored.name, block)
