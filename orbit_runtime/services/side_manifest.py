"""Shared by the processes of a run: the manifest as each reads it, its restrictions, and the facts
that each reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.planner.support.manifests import check_apart
from orbit_runtime.sides.inputs import Inputs, resolve_names
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.teacher import CONTENT, open_teacher, teacher_digest
from orbit_runtime.sides.trainers import decide_by_size
from orbit_runtime.spec import OrbitRun, Resolved, identity_fields, resolve
from orbit_runtime.spec.resolve import with_trainer
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage.cache import RetryPolicy
from orbit_runtime.version import __version__


@dataclass(frozen=True)
class SideManifest:
    """A manifest as one side reads it."""

    resolved: Resolved
    inputs: Inputs
    folder: Path
    """The model's folder."""
    teacher: AdapterFolder | None
    """The teacher's adapter; None if there is none."""

    @property
    def model(self) -> str:
        """The model's name in published files."""
        return resolve_names(self.resolved.run, None).model


def kinds_of(spec: RunSpec) -> tuple[str, ...]:
    """The processes of such a run besides its orchestrator: a run on demonstrations samples nothing, and endpoints are
    processes already."""
    is_alone = spec.algorithm.type == "SFT" or spec.rollout.engine == "OpenAI"
    return ("trainer",) if is_alone else ("trainer", "inference")


def open_manifest(manifest: OrbitRun, folder: Path, patience: RetryPolicy) -> SideManifest:
    """
    Args:
        folder: base of the manifest's relative paths.

    Raises:
        OrbitError: it cannot be resolved here, the model is unavailable, or it is supported in one process only.
    """
    check_apart(manifest.spec)
    # Whatever GPUs and processors a machine has: all three must decide alike, and none knows the others'.
    machine = replace(machine_facts(), multiplies_bf16=False)
    resolved = with_trainer(resolve(manifest, machine, folder=folder), "Torch")
    search_path = [str(each) for each in (folder, Path.cwd())]
    inputs = Inputs(resolved.run.spec, {}, patience, search_path)
    teacher = open_teacher(resolved.run.spec)
    model = inputs.model()
    return SideManifest(decide_by_size(resolved, model), inputs, model, teacher)


def common_facts(kind: str, asked: SideManifest, base_digest: str, rounding: Mapping[str, str]) -> dict[str, Any]:
    """Facts that an orchestrator compares with its own manifest and with the other side.

    Args:
        base_digest: of the base in memory; where servers hold it, of the model's files.
        rounding: see `machine.rounding_facts`; empty where servers compute.
    """
    machine = machine_facts()
    return {
        "kind": kind,
        "version": __version__,
        "identity": identity_fields(asked.resolved.run),
        "decides_rate": asked.resolved.asked.spec.training.learning_rate is None
        and asked.resolved.run.spec.training.trainer == "Torch",
        "model": asked.model,
        "engine": asked.resolved.engine,
        "base_digest": base_digest,
        "teacher": teacher_digest(asked.teacher).get(CONTENT),
        "rounding": dict(rounding),
        "has_cuda": machine.has_cuda,
        "num_gpus": machine.num_gpus,
    }
