"""A run's teacher: an adapter, or servers that score each rollout as it ends.

Belongs here: from the manifest to the adapter or the servers, and adding what servers answer to a rollout. Does not
belong here: asking a server (`rollout.teacher_servers`), whether a teacher is worth learning from (`loop.teacher`), the
divergence (`algorithms.distillation`).

What servers answer is part of the rollout: checkpoints keep it, and a replay asks nobody.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, open_adapter
from orbit_runtime.data.samples import spread, trained
from orbit_runtime.environments.episodes import Environment, Episode, FinishedEpisode
from orbit_runtime.planner.support.manifests import sampling_of
from orbit_runtime.sides.engines import PROBES, all_headers
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Prompt, Rollout, Tokenizer, TokenSource

if TYPE_CHECKING:
    from orbit_runtime.rollout.teacher_servers import ServedTeacher

FIELD = "spec.algorithm.teacher"
ENDPOINTS = f"{FIELD}.endpoints"
CONTENT = "content.teacher"
"""Name of the adapter's digest among the digests of what a run reads."""


def open_teacher(spec: RunSpec) -> AdapterFolder | None:
    """None: the manifest names no adapter that teaches.

    Raises:
        ModelError: (66) there is no adapter, or one that Orbit does not compute with.
    """
    teacher = spec.algorithm.teacher
    return None if teacher is None or teacher.uri is None else open_adapter(teacher.uri)


def teacher_digest(adapter: AdapterFolder | None) -> dict[str, str]:
    """Name → digest of its files, for the run's identity."""
    return {} if adapter is None else {CONTENT: files_digest(adapter.files)}


def check_base(adapter: AdapterFolder | None, weights: str) -> None:
    """Raises ModelError (66) for an adapter that is known to be another base's."""
    if adapter is not None:
        adapter.check_base(
            weights,
            who=f"the teacher {adapter.place}",
            ours="this run's is",
            where=f"{FIELD}.uri",
            fix="take an adapter of this model and precision, or write the model that it was trained on",
        )


def check_servers(spec: RunSpec) -> None:
    """Checks what is known about servers before anything heavy is loaded.

    Raises:
        CredentialsError: (77) a variable of an endpoint, the engine's or a teacher's, is not set.
        EngineDiedError: (82) nothing listens at a teacher's endpoint.
    """
    teacher = spec.algorithm.teacher
    all_headers("spec.rollout.endpoints", spec.rollout.endpoints, os.environ)
    headers = all_headers(ENDPOINTS, teacher.endpoints if teacher else (), os.environ)
    if teacher is None or not teacher.endpoints:
        return
    from orbit_runtime.rollout.attached import REFUSED_SECONDS, AttachedServer

    for index, (endpoint, own) in enumerate(zip(teacher.endpoints, headers, strict=True)):
        where = f"{ENDPOINTS}[{index}]"
        AttachedServer(endpoint.url, where, refused_seconds=REFUSED_SECONDS, headers=own).check_listens()


def attach_teacher(
    spec: RunSpec, tokenizer: Tokenizer, vocabulary: int, sequences: Sequence[Sequence[int]], closing: ExitStack
) -> ServedTeacher | None:
    """Attaches the teacher's servers; None if the manifest names none.

    Args:
        vocabulary: the policy's.
        sequences: token ids of prompts, whose text the servers' tokenizer must agree on.

    Raises:
        EngineDiedError: (82) one does not answer.
        UnsupportedError: (78) one is neither SGLang nor vLLM, takes no sequence of this length, or reports no likeliest
            tokens.
        ModelError: (66) one has another tokenizer.
        GateError: (84) one answers with what are no likeliest tokens.
    """
    teacher = spec.algorithm.decided_teacher
    if teacher is None or teacher.type != "Served":
        return None
    from orbit_runtime.rollout.attached import REFUSED_SECONDS, Endpoint, ServerRequirements, attach_engine
    from orbit_runtime.rollout.teacher_servers import ServedTeacher

    headers = all_headers(ENDPOINTS, teacher.endpoints, os.environ)
    endpoints = [Endpoint(each.url, "Folder", own) for each, own in zip(teacher.endpoints, headers, strict=True)]
    wanted = ServerRequirements(
        adapter=None,
        # A server that scores a sequence may want room for one token behind it.
        max_tokens=spec.model.max_sequence_length + 1,
        sampling=sampling_of(spec.rollout),
        probes=tuple(tuple(ids) for ids in sequences[:PROBES]),
        where=ENDPOINTS,
        who="teacher",
    )
    engine = attach_engine(
        endpoints, wanted, tokenizer, folder=Path(), max_running_requests=spec.rollout.max_running_requests,
        refused_seconds=REFUSED_SECONDS,
    )  # fmt: skip
    closing.callback(engine.close)
    longest = spec.model.max_sequence_length
    made = ServedTeacher(engine, ENDPOINTS, top_k=teacher.top_k, vocabulary=vocabulary, longest=longest)
    made.check(max(sequences, key=len))
    return made


@dataclass(frozen=True)
class TaughtEnvironment:
    """An `Environment` whose rollouts come with a teacher's report on their tokens.

    A rollout waits for the report with its rewards: the teacher computes beside sampling, and a cancelled episode costs
    it nothing more.
    """

    environment: Environment
    teacher: ServedTeacher

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        return self.environment.build_episodes(prompts_P, step)

    async def play(self, episode: Episode, tokens: TokenSource) -> FinishedEpisode:
        """A rollout that does not train is nobody's lesson."""
        played = await self.environment.play(episode, tokens)
        first, *others = await asyncio.gather(*(self._taught(each) for each in played.rollouts))
        return replace(played, rollout=first, others=tuple(others))

    async def _taught(self, rollout: Rollout) -> Rollout:
        if not rollout.trains:
            return rollout
        if self.teacher.top_k is not None:
            places_R = [place for place, flag in enumerate(rollout.loss_mask_T) if flag]
            return replace(rollout, teacher_top=await self.teacher.top_tokens(rollout.token_ids_T, places_R))
        told_T = await self.teacher.logprobs(rollout.token_ids_T)
        column_T = spread(trained(told_T, rollout.loss_mask_T), rollout.loss_mask_T)
        return replace(rollout, teacher_logprobs_T=column_T)
