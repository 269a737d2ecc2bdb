"""The nouns of a run and the small Protocols between its parts.

Belongs here: frozen, torch-free records that travel between packages, in memory, over HTTP and in files. Does not
belong here: behaviour, configuration (`spec`), or imports from outside the standard library and `digests`.

Suffixes: `_P` prompts, `_G` the rollouts of one prompt, `_T` tokens, `_D` samples.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Buffer, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from orbit_runtime.digests import Pieces, tree_digest

FinishReason = Literal["stop", "length", "abort", "deadline"]
"""`abort` and `deadline` end a completion before its time: it can be continued."""
Outcome = Literal["value", "wrong", "timeout", "crash"]
Probe = Literal["identity", "random"]
"""An adapter that nobody trained, for measuring the two sides with."""
ColumnName = Literal["sampled", "advantage", "reference", "stale", "value", "return", "teacher"]
"""What a sample says of each token. `sampled`: its log-prob on the sampling side; `reference`: under the bare base;
`stale`: 1 where an older policy than the one that is trained sampled it; `value`: what the critic expected before it;
`return`: what the critic is to expect; `teacher`: its log-prob under the teacher."""

BASE_VERSION = -1
"""Stands for the bare base where a policy version is told."""
TEACHER_SLOT = "teacher"
"""An adapter that teaches: averaged masters, or what was loaded. All other slots of an engine hold published bytes."""
TOKENS, FLAGS, FLOATS = "i", "b", "f"
"""Type codes of columns: int32, int8, fp32: 13 bytes a token instead of 88 as Python objects, and no copy for numpy."""


def _hold_arrays(record: object, **codes: str) -> None:
    """Fields of a frozen record become arrays of these types; one that is one already is not copied."""
    for name, code in codes.items():
        value = getattr(record, name)
        if value is not None and not (isinstance(value, array) and value.typecode == code):
            object.__setattr__(record, name, array(code, value))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data.

    Example: `Prompt("addition/17", 0, ({"role": "user", "content": "12+34="},), {"answer": "46"})`
    """

    prompt_id: str
    """Stable over runs: the source's name and the row's number in it."""
    visit: int
    """How often this prompt was drawn before (the epoch, from 0): the second visit samples other tokens."""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages: `role`, `content` (text or a list of parts), and what else the chat template reads."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; rewards receive it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from, and what ends a completion."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    top_k: int = 0
    """0: not cut by it."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Of tokens of the prompt, and of the completion so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token id and what is added to its logit; ids are distinct."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens besides the model's own."""
    ignore_eos: bool = False
    """The model's own end tokens are tokens like any other."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. `key` names it in every random draw, so a batch's composition changes nothing."""

    request_id: int
    """The caller's handle; comes back in the completion. No two requests under way share one."""
    key: int
    """64-bit stream key of (seed, purpose, prompt, visit, sample, turn); position is the counter."""
    prompt_ids_T: tuple[int, ...]
    sampling: Sampling
    adapter: str | None
    """Slot name such as `policy-v3`; `None` is the bare base."""
    so_far: Completion | None = None
    """An unfinished completion to continue, under any adapter: its tokens count, and come back with the new ones."""
    deadline_seconds: float | None = None
    """From `submit` on. A completion that is not done by then comes back as far as it got, as `deadline`."""
    alternatives: int = 0
    """Most probable tokens told for each place."""
    is_streamed: bool = False
    """Its tokens are told as they come, by an engine that can (`rollout.news`)."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that sampling sent tokens to, of every token but the last, which was nobody's input."""

    shape: tuple[int, int, int]
    """Tokens, layers with routed experts, experts that a token goes to in each."""
    data: bytes
    """See `data.routing`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine answers: sampled tokens only, each with its log-prob and the policy version that sampled it."""

    request_id: int
    token_ids_T: array[int]
    logprobs_T: array[float]
    """Under the distribution they were drawn from (`algorithms.distribution`); at temperature 0 the model's own."""
    versions_T: array[int]
    """Read from the slot that the forward pass applied, not from the request; `BASE_VERSION` without one."""
    finish_reason: FinishReason
    text: str
    """Decoded, without the stop string or the token that ended it."""
    routed_experts: RoutedExperts | None = None
    """Of the prompt's tokens and the sampled ones; None: nobody asked for them."""
    alternatives: tuple[array[int], array[float]] | None = None
    """`Request.alternatives` of each token, one token's after another's: ids and log-probs; -1 where there is none."""

    def __post_init__(self) -> None:
        _hold_arrays(self, token_ids_T=TOKENS, logprobs_T=FLOATS, versions_T=TOKENS)


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `[start, end)` of a rollout that one speaker wrote."""

    role: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, scored: the record that is trained on and kept in `rollouts/*.jsonl.zst`."""

    run: str
    step: int
    prompt_id: str
    sample_index: int
    turns: tuple[Turn, ...]
    token_ids_T: array[int]
    loss_mask_T: array[int]
    """1 where the policy chose the token, 0 elsewhere."""
    logprobs_T: array[float]
    """Sampling side; 0.0 where the mask is 0."""
    versions_T: array[int]
    """Policy version of each sampled token; -1 where the mask is 0."""
    reward: float | None
    """`None` where the outcome is `timeout` or `crash`: a failure is never scored as 0."""
    outcome: Outcome
    reward_parts: Mapping[str, float | None]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    """What its environment counted, such as `tool_calls` and `tool_errors`."""
    teacher_logprobs_T: array[float] | None = None
    """Of a teacher behind endpoints, in fp32; 0.0 where the mask is 0. None: no such teacher was asked."""

    def __post_init__(self) -> None:
        numbers = {"logprobs_T": FLOATS, "teacher_logprobs_T": FLOATS}
        _hold_arrays(self, token_ids_T=TOKENS, loss_mask_T=FLAGS, versions_T=TOKENS, **numbers)

    @property
    def trains(self) -> bool:
        """It was scored, and the policy chose a token of it."""
        return self.reward is not None and 1 in self.loss_mask_T


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: Prompt
    rollouts_G: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What trains: a rollout's tokens with their mask, and columns that say something of each token.

    Samples with equal `prefix_id` start with the same `prefix_length` unmasked tokens: a batch computes them once.

    Example: `Sample([5, 6, 7], [0, 1, 1], {"sampled": [0, -0.5, -0.1], "advantage": [0, 1.0, 1.0]}, 0, 1)`
    """

    token_ids_T: array[int]
    loss_mask_T: array[int]
    columns: Mapping[ColumnName, array[float]]
    """fp32, one number per token, 0.0 where the mask is 0."""
    prefix_id: int
    prefix_length: int
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        _hold_arrays(self, token_ids_T=TOKENS, loss_mask_T=FLAGS)
        if not all(isinstance(column, array) and column.typecode == FLOATS for column in self.columns.values()):
            object.__setattr__(self, "columns", {name: array(FLOATS, each) for name, each in self.columns.items()})


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """What a publish wrote: every file of the adapter by the digests of its pieces."""

    files: Mapping[str, Pieces]
    """By name: `adapter_config.json`, `adapter_model.safetensors` and, for OFT, `rotations.safetensors`."""

    @property
    def digest(self) -> str:
        """Of the adapter: the root over all of them."""
        return tree_digest(self.files)


class AdapterMemory(Protocol):
    """Memory that other processes of this machine can map, as long as this object lives."""

    @property
    def descriptor(self) -> int: ...

    @property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """First byte and number of bytes of each file."""
        ...


class AdapterSink(Protocol):
    """Takes the files of one adapter while they are made, so that they are never held twice."""

    def write(self, name: str, size: int, pieces: Iterable[Buffer]) -> Pieces:
        """One file of `size` bytes, whole; returns the digest of each piece.

        The pieces are those of `digests`, in their order. Each is taken before the next is asked for.
        """
        ...


class StateWriter(Protocol):
    """Takes a trainer's state, and reads it beside the next step."""

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        """One part of `size` bytes. Its pieces may be asked for more than once, by another thread, until `wait`."""
        ...

    def wait(self) -> None:
        """Returns once nothing is read any more, whether it was written or could not be."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A published adapter: exact file bytes under their PEFT names, and the digest of them all."""

    version: int
    files: Mapping[str, Buffer]
    """`adapter_config.json`, `adapter_model.safetensors` and, for OFT, `rotations.safetensors`."""
    digest: str
    """`AdapterManifest.digest`."""
    pieces: Mapping[str, Pieces] | None = None
    """`AdapterManifest.files`; None: not known, and made anew by whoever needs them."""
    memory: AdapterMemory | None = None
    """What `files` are views of; None: they are ordinary bytes of this process."""


@dataclass(frozen=True, slots=True)
class Cached:
    """Log-probs of the end of given tokens after a prefix that the engine may have had in its cache."""

    logprobs_T: tuple[float, ...]
    tokens: int
    """How many of the first tokens came from the cache; 0: the reading says nothing."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of given tokens, and proof of what computed them."""

    logprobs_T: tuple[float, ...]
    """Entry t is log p(token t | tokens before t) at temperature 1; entry 0 is 0.0."""
    applied_digest: str | None
    """Digest of the adapter tensors that the layers multiplied by in these very passes; `None`: none was applied."""
    cached: Cached | None = None
    """The tokens after `prefix_length` once more, behind a prefix from the cache; None: not asked for, or no such."""
    top_T: tuple[int, ...] | None = None
    """Entry t is the most probable token given those before t; entry 0 is -1. None: it was not told."""
    routed_experts: RoutedExperts | None = None
    """Of every token but the last; None: not noted."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Numbers of one step's training, already reduced over its samples."""

    metrics: Mapping[str, float]
    """`loss kl entropy grad_norm clip_fraction learning_rate` and the `parity_*` statistics."""
    optimizer_updates: int
    tokens: int


class Tokenizer(Protocol):
    """Text to ids and back, as the model was trained."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode_many(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int]]:
        """Ids of each conversation up to where the assistant's answer starts. `tools`: schemas for the template."""
        ...

    def encode_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        answered: int,
        last_id: int | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of what follows the sampled message `answered`, which ended with `last_id`, up to the next answer."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Copy(Protocol):
    """One place that samples: a publish is proven on each that an engine has."""

    @property
    def name(self) -> str: ...

    @property
    def reads_back(self) -> bool:
        """It can tell what stands in its slots; else a proof rests on log-probs alone, and says so."""
        ...

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        """One reading of the same tokens per adapter, all in one batch, by the passes that sampling uses.

        Args:
            prefix_length: the tokens after this many are scored once more, with the first ones from the prefix cache,
                where it holds them since an earlier call.
            standing: other adapters whose digests will be asked for: a server tells them with these readings.
        """
        ...

    def adapter_digest(self, name: str) -> str | None:
        """Digest recomputed from what stands in the slot now; None where it cannot be read back."""
        ...

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        """How what stands in the slot differs from what was published, in words; empty where it does not."""
        ...


@dataclass(frozen=True, slots=True)
class ServerReading:
    """How one of an engine's servers stands."""

    replica: str
    is_up: bool
    restarts: int
    missed: int
    """Adapters that did not reach it as they were meant to, and came as files."""
    exposition: str
    """Its own metrics in Prometheus' text format; empty where it does not answer."""
    memory_bytes: int | None
    """What its device holds, or on a CPU its processes; None: another machine's, or not known here."""


class Engine(Protocol):
    """Answers prompts. Slots hold published adapters under their names; a name once retired cannot come back.

    Requests belong to one thread: `submit`, `completions` and `abort`. Another may load, score and unload meanwhile.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Puts requests into the queue and returns at once; what is submitted together may share its prefill.

        Raises:
            GateError: an adapter is not loaded, an id is under way already, or `so_far` is a finished completion.
            DataError: a prompt is empty.
        """
        ...

    def completions(self) -> AsyncGenerator[Completion]:
        """What was submitted, each completion as it ends, in no promised order; also what is submitted meanwhile.

        Stops when nothing is under way. For one consumer, which may change threads only between two calls.

        Raises:
            GateError: an answer does not fit its request.
            EngineDiedError: servers died again and again.
        """
        ...

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Ends these requests, or all, where they are: each comes back through `completions` with the tokens it has.

        One that has ended by itself meanwhile comes back as that; an id that is not under way is ignored.
        """
        ...

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """On every copy."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Raises GateError where a request under way still samples from it."""
        ...

    def adapters(self) -> tuple[str, ...]: ...

    def copies(self) -> Sequence[Copy]:
        """At least one, always in the same order."""
        ...

    def sleep(self) -> None:
        """Gives memory back, as the engine was made to. Until `wake` nothing else may be asked of it."""
        ...

    def wake(self) -> None:
        """Holds again what it held: every adapter that can be read back was."""
        ...

    def read_servers(self) -> Sequence[ServerReading]:
        """What its servers tell of themselves, none for an engine without servers. May be called from any thread."""
        ...

    def close(self) -> None: ...


class TokenSource(Protocol):
    """Where an episode of an environment gets its tokens from: the engine, under the policy of the step."""

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        """One completion of these tokens. `key` as in `Request`.

        A policy that is published meanwhile samples what is left of it: each token carries its own version. An episode
        that is played again after a kill gets the completions that it had, as long as it asks the same.
        """
        ...


class Trainer(Protocol):
    """Changes the adapter. Owns masters, optimiser and schedule; never touches the base."""

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult: ...

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        """Writes the adapter as it is now into the sink, one file after the other."""
        ...

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        """The same tokens with the adapter and with the bare base."""
        ...

    def logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        """Of each sample's trained tokens under the policy as it is now, 0.0 elsewhere."""
        ...

    def reference_logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        """The column `reference` of each sample: log-probs under the base with its adapter off."""
        ...

    def values(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        """The column `value` of each sample, by the critic as it is now. Only where the algorithm has one."""
        ...

    def teacher_logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        """The column `teacher` of each sample, by the teacher as it is now. Only where the algorithm has one."""
        ...

    def save_state(self, writer: StateWriter) -> None:
        """Hands over checkpoint parts (safetensors) from which `load_state` continues bit for bit.

        They are read after this returned: whatever changes the trainer's state waits for `writer` first.
        """
        ...

    def load_state(self, parts: Mapping[str, Buffer]) -> None: ...
