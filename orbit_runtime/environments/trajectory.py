"""An episode's tokens while it is played: those that the policy sampled, and those in between.

Belongs here: columns that are consistent by construction. Does not belong here: whose turn it is (`multi_turn`).

Legend: `_T` tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from orbit_runtime.types import FLAGS, FLOATS, TOKENS, Completion, FinishReason, RoutedExperts, Turn

_NO_TOKENS: array[int] = array(TOKENS)
_NO_FLAGS: array[int] = array(FLAGS)
_NO_FLOATS: array[float] = array(FLOATS)
_NO_LOGPROB: array[float] = array(FLOATS, [0.0])
_NO_VERSION: array[int] = array(TOKENS, [-1])
"""Copied and repeated: in a run, audit hooks of imported packages make each new `array` several times as slow."""


class Trajectory:
    """Grows by completions, which train, and by other tokens, which do not. Nothing in it is ever encoded again.

    Example: after `add_given("user", "hi", [5, 6])` and a completion of `[7]`, `loss_mask_T` is `[0, 0, 1]`.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.finish_reason: FinishReason = "stop"
        self.routed_experts: RoutedExperts | None = None
        self.token_ids_T: array[int] = _NO_TOKENS[:]
        self.loss_mask_T: array[int] = _NO_FLAGS[:]
        self.logprobs_T: array[float] = _NO_FLOATS[:]
        self.versions_T: array[int] = _NO_TOKENS[:]

    def add_given(self, role: str, text: str, ids_T: Sequence[int]) -> None:
        """Adds tokens of the prompt, the environment or the template."""
        start, count = len(self.token_ids_T), len(ids_T)
        self.token_ids_T.extend(ids_T)
        self.loss_mask_T.frombytes(bytes(count))
        self.logprobs_T.extend(_NO_LOGPROB * count)
        self.versions_T.extend(_NO_VERSION * count)
        self.turns.append(Turn(role, start, start + count, text))

    def add_answer(self, completion: Completion) -> None:
        """Adds the policy's completion of everything before it."""
        start, count = len(self.token_ids_T), len(completion.token_ids_T)
        self.token_ids_T.extend(completion.token_ids_T)
        self.loss_mask_T.frombytes(b"\1" * count)
        self.logprobs_T.extend(completion.logprobs_T)
        self.versions_T.extend(completion.versions_T)
        self.turns.append(Turn("assistant", start, start + count, completion.text))
        self._end_with(completion)

    def add_repeated(self, completion: Completion) -> None:
        """Adds a completion that another rollout of the episode trains: here it is given, like a prompt."""
        self.add_given("assistant", completion.text, completion.token_ids_T)
        self._end_with(completion)

    def _end_with(self, completion: Completion) -> None:
        self.finish_reason = completion.finish_reason
        # Covers everything before it as well.
        self.routed_experts = completion.routed_experts

    @property
    def sampled(self) -> int:
        """Tokens that the policy chose."""
        return self.loss_mask_T.tobytes().count(1)
