"""Which bundles stay. Belongs here: choosing and removing. Does not belong here: cadence (`loop`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.storage.bundles import MANIFEST, bundle_order
from orbit_runtime.storage.store import Store


@dataclass(frozen=True, slots=True)
class Pruning:
    """What goes, in the order in which it must go: without its manifest a bundle is none, whatever parts remain."""

    manifests: tuple[str, ...]
    parts: tuple[str, ...]


def prune_bundles(store: Store, prefix: str, keep: int, *, newest: str | None = None) -> Pruning:
    """Remove all but the newest `keep` complete bundles (0 keeps all), and parts that older unfinished ones left.

    Args:
        newest: the bundle just written. Higher ones are left alone and not counted: after a fall-back over a corrupt
            checkpoint it still stands above the good ones, which must not make room for it.
    """
    choice = choose_pruning(store.list(prefix), keep, newest=newest)
    store.delete(choice.manifests)
    store.delete(choice.parts)
    return choice


def choose_pruning(keys: Sequence[str], keep: int, *, newest: str | None = None) -> Pruning:
    """Pure: from the keys below a prefix to those that go. Never the newest complete bundle, nor what is above it."""
    bundles: dict[str, list[str]] = {}
    for key in keys:
        bundles.setdefault(key.rpartition("/")[0], []).append(key)
    order = sorted((folder for folder in bundles if folder), key=bundle_order, reverse=True)
    if newest is not None:
        limit = bundle_order(newest.rstrip("/"))
        order = [folder for folder in order if bundle_order(folder) <= limit]
    complete = [folder for folder in order if f"{folder}/{MANIFEST}" in bundles[folder]]
    if not complete:
        return Pruning((), ())
    kept = set(complete if keep == 0 else complete[: max(keep, 1)])
    gone = [folder for folder in order[order.index(complete[0]) :] if folder not in kept]
    gone_keys = [key for folder in gone for key in bundles[folder]]
    return Pruning(
        tuple(key for key in gone_keys if key.endswith(f"/{MANIFEST}")),
        tuple(key for key in gone_keys if not key.endswith(f"/{MANIFEST}")),
    )
