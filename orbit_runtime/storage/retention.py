"""Retention of bundles. Belongs here: choosing and removing. Does not belong here: cadence (`loop`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.storage.bundles import MANIFEST, bundle_order
from orbit_runtime.storage.store import Store


@dataclass(frozen=True, slots=True)
class Pruning:
    """Objects to delete, in order: without its manifest a bundle no longer exists, whatever parts remain."""

    manifests: tuple[str, ...]
    parts: tuple[str, ...]


def prune_bundles(store: Store, prefix: str, keep: int, *, newest: str | None = None) -> Pruning:
    """Remove all but the newest `keep` complete bundles (0 keeps all), and parts of older unfinished ones.

    Args:
        newest: the bundle just written. Higher ones are left alone and not counted: after a fall-back, a corrupt
        checkpoint still has a higher number than the good ones, which must not be removed in its favour.
    """
    choice = choose_pruning(store.list(prefix), keep, newest=newest)
    store.delete(choice.manifests)
    store.delete(choice.parts)
    return choice


def choose_pruning(keys: Sequence[str], keep: int, *, newest: str | None = None) -> Pruning:
    """The keys below a prefix to delete: never the newest complete bundle, nor anything above it. Pure."""
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
