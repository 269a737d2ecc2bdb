"""The engine from the front's view: jobs go out, and their results come back, one record per batch step.

Belongs here: the front's end of the stream. Does not belong here: HTTP (`app`), the engine's end (`sampler`).

Everything here belongs to the front's one event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence

from orbit_runtime.ports.guard import APIError
from orbit_runtime.rollout.streaming import Alternatives, TokenDeltas, with_more
from orbit_runtime.serve.answers import ChoicePart
from orbit_runtime.serve.channel import Abort, BatchStep, ChangeResult, Choice, NameChange, Refusal, Submit
from orbit_runtime.serve.names import ServedModel
from orbit_runtime.types import FinishReason


class ServedRequest:
    """The choices of one HTTP request."""

    def __init__(
        self, request_ids: Sequence[int], *, is_streamed: bool, abort: Callable[[Sequence[int]], None]
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.is_streamed = is_streamed
        self.parts = [ChoicePart(index) for index in range(len(request_ids))]
        self.left = len(request_ids)
        self.error: APIError | None = None
        self.is_told = asyncio.Event()
        self.fresh: dict[int, None] = {}
        """Choices with new tokens since they were last taken, in order of arrival."""
        self._abort = abort

    async def take(self) -> AsyncIterator[ChoicePart]:
        """Yields parts with new tokens until every one has ended. Those of several steps may be joined.

        Raises:
            APIError: the engine refused or lost them.
        """
        while self.left or self.fresh:
            await self.is_told.wait()
            self.is_told.clear()
            fresh, self.fresh = self.fresh, {}
            for index in fresh:
                yield self.parts[index]
            if self.error is not None:
                raise self.error

    def tell(self, part: ChoicePart) -> None:
        """Reports new tokens of this part."""
        self.fresh[part.index] = None
        self.is_told.set()

    async def results(self) -> list[ChoicePart]:
        async for _ in self.take():
            pass
        return self.parts

    def abort(self) -> None:
        """Safe to call twice, and after the end."""
        if self.left and self.error is None:
            self._abort(self.request_ids)


class EngineClient:
    """The engine's process."""

    def __init__(
        self,
        send: Callable[[object], None],
        models: Sequence[ServedModel],
        base: str,
        *,
        concurrent: int,
        ended: Callable[[str, ChoicePart], None],
    ) -> None:
        """
        Args:
            send: sends a record to the engine's process.
            base: the base's name.
            concurrent: maximum completions in flight or waiting.
            ended: called with the model's name and each finished choice.
        """
        self.failure = ""
        """Why requests are refused; empty while they are accepted."""
        self._models = {served.name: served for served in models}
        self.base = base
        self._send = send
        self._concurrent = concurrent
        self._ended = ended
        self._next_id = 0
        self._jobs: dict[int, tuple[ServedRequest, ChoicePart, str]] = {}
        self._calls: dict[int, asyncio.Future[dict[str, object]]] = {}

    @property
    def under_way(self) -> int:
        return len(self._jobs)

    def all(self) -> list[ServedModel]:
        return [*self._models.values()]

    def find(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def default_name(self, otherwise: str) -> str:
        """The name of the only adapter; `otherwise` if there is none."""
        names = [name for name in self._models if name != self.base]
        if len(names) > 1:
            raise APIError(400, f"several adapters are served: {', '.join(names)}; name one of them", param="model")
        return names[0] if names else otherwise

    def submit(self, model: str, choices: Sequence[Choice], *, is_streamed: bool) -> ServedRequest:
        """Raises APIError if too many completions are in flight (429), or the engine failed (503)."""
        if self.failure:
            raise APIError(503, "the engine has failed; the server must be restarted", code="engine_failed")
        if self.under_way + len(choices) > self._concurrent:
            raise APIError(
                429,
                f"{self.under_way} completions are in flight, and at most {self._concurrent} may be",
                code="overloaded",
            )
        first, self._next_id = self._next_id, self._next_id + len(choices)
        job = ServedRequest(range(first, self._next_id), is_streamed=is_streamed, abort=self._request_abort)
        self._jobs.update(zip(job.request_ids, ((job, part, model) for part in job.parts), strict=True))
        self._send(Submit(first, model, tuple(choices), is_streamed))
        return job

    def name_to_reload(self) -> str:
        """The name of the only adapter; the base's if none is served."""
        names = [served.name for served in self._models.values() if served.slot is not None]
        if len(names) > 1:
            raise APIError(400, f"several adapters are served: {', '.join(names)}; name one of them", param="model")
        return names[0] if names else self.base

    async def change(
        self, name: str, *, adapter: str | None = None, checkpoint: str | None = None
    ) -> dict[str, object]:
        """Puts an adapter or a whole model under a name; with neither, the base again.

        Raises APIError if it was refused; the name then keeps its model.
        """
        call, self._next_id = self._next_id, self._next_id + 1
        self._calls[call] = asyncio.get_running_loop().create_future()
        self._send(NameChange(call, name, adapter, checkpoint))
        try:
            return await self._calls[call]
        finally:
            del self._calls[call]

    def hear(self, record: object) -> None:
        match record:
            case BatchStep():
                # First those that ended: their clients may request the next completion, for which the batch has room.
                for ended in record.ended:
                    self._end(*ended)
                if record.deltas is not None:
                    self._tell(record.deltas)
            case ChangeResult():
                self._models = {served.name: served for served in record.models}
                if (call := self._calls.get(record.call)) is not None and not call.done():
                    call.set_result(record.result)
            case Refusal():
                self._refuse(record)

    def _tell(self, deltas: TokenDeltas) -> None:
        at, alternatives = 0, dict(deltas.alternatives)
        for request_id, count in zip(deltas.request_ids_D, deltas.counts_D, strict=True):
            start, at = at, at + count
            if (found := self._jobs.get(request_id)) is None:
                # It ended with the same record, which told all of its tokens.
                continue
            job, part, _ = found
            part.token_ids_T += deltas.token_ids_T[start:at]
            part.logprobs_T += deltas.logprobs_T[start:at]
            # A request may appear several times, but its alternatives only once, for all of its tokens.
            if (top := alternatives.pop(request_id, None)) is not None:
                part.alternatives = with_more(part.alternatives, top)
            job.tell(part)

    def _end(
        self,
        request_id: int,
        tokens_T: array[int],
        logprobs_T: array[float],
        reason: FinishReason,
        text: str,
        alternatives: Alternatives | None,
    ) -> None:
        job, part, model = self._jobs.pop(request_id)
        part.token_ids_T, part.logprobs_T, part.alternatives = tokens_T, logprobs_T, alternatives
        part.finish_reason, part.text = reason, text
        job.left -= 1
        self._ended(model, part)
        if job.is_streamed or not job.left:
            job.tell(part)

    def _refuse(self, refusal: Refusal) -> None:
        error = APIError(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
        if refusal.is_fatal:
            self.failure = refusal.message
        for request_id in refusal.request_ids:
            found = self._jobs.pop(request_id, None)
            if found is not None:
                found[0].error = error
                found[0].is_told.set()
        if refusal.call is not None and (call := self._calls.get(refusal.call)) is not None and not call.done():
            call.set_exception(error)

    def _request_abort(self, request_ids: Sequence[int]) -> None:
        self._send(Abort(tuple(request_ids)))
