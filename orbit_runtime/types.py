"""The records of a run and the small Protocols between its parts.

Belongs here: frozen, torch-free records that travel between packages, in memory, over HTTP and in files. Does not
belong here: behaviour, configuration (`spec`), or imports from outside the standard library and `digests`.

Suffixes: `_P` prompts, `_G` the rollouts of one prompt, `_T` tokens, `_D` samples.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Buffer, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from orbit_runtime.digests import Pieces, tree_digest

FinishReason = Literal["stop", "length", "abort", "deadline"]
"""`abort` and `deadline` end a completion early: it can be continued."""
Outcome = Literal["value", "wrong", "timeout", "crash"]
Probe = Literal["identity", "random"]
"""An untrained adapter for comparing the two sides."""
ColumnName = Literal["sampled", "advantage", "reference", "stale", "value", "return", "teacher"]
"""What a sample's column holds for each token. `sampled`: its log-prob on the sampling side; `reference`: its log-prob
under the bare base; `stale`: 1 if a policy older than the trained one sampled it; `value`: the critic's prediction
before it; `return`: the critic's target; `teacher`: its log-prob under the teacher."""
Computed = Literal["policy", "reference", "base", "value", "teacher"]
"""A column that a trainer computes; `policy`: each token's log-prob under the current policy; `base`: like
`reference`, in the fastest way: its last bits may differ."""

BASE_VERSION = -1
"""Stands for the bare base in place of a policy version."""
TEACHER_SLOT = "teacher"
"""Slot of an adapter that teaches: averaged masters, or what was loaded. All other slots hold published bytes."""
TOKENS, FLAGS, FLOATS = "i", "b", "f"
"""Type codes of columns: int32, int8, fp32: 13 bytes a token instead of 88 as Python objects, and no copy for numpy."""
TopTokens = tuple[array[int], array[float]]
"""A teacher's k likeliest tokens in the place of each token that trains, the likeliest first: ids and log-probs."""


def _hold_arrays(record: object, **codes: str) -> None:
    """Turns fields of a frozen record into arrays of these types; a field that is one already is not copied."""
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
    """Stable across runs: the source's name and the row's number in it."""
    visit: int
    """Number of earlier draws of this prompt (the epoch, from 0): each visit samples other tokens."""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages: `role`, `content` (text or a list of parts), and any other fields that the chat template reads."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; passed to rewards."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from, and what ends a completion."""

    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to tokens of the prompt, and of the completion so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias added to its logit; ids are distinct."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to the model's own."""
    ignore_eos: bool = False
    """Treat the model's own end tokens like any other token."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. `key` identifies it in every random draw, so a batch's composition has no effect."""

    request_id: int
    """The caller's handle, returned in the completion. No two requests in flight share one."""
    key: int
    """64-bit stream key of (seed, purpose, prompt, visit, sample, turn); the position is the counter."""
    prompt_ids_T: tuple[int, ...]
    sampling: Sampling
    adapter: str | None
    """Slot name such as `policy-v3`; `None` is the bare base."""
    so_far: Completion | None = None
    """An unfinished completion to continue, under any adapter; its tokens count, and are returned with the new ones."""
    deadline_seconds: float | None = None
    """Seconds since `submit`. A completion that is not done by then is returned as it is, as `deadline`."""
    alternatives: int = 0
    """Most probable tokens to report for each position."""
    is_streamed: bool = False
    """Report its tokens as they come, if the engine supports it (`rollout.streaming`)."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of each token during sampling; the last token is missing, because it was never an input."""

    shape: tuple[int, int, int]
    """Tokens, layers with routed experts, experts per token in each layer."""
    data: bytes
    """See `data.routing`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's result: sampled tokens only, each with its log-prob and the policy version that sampled it."""

    request_id: int
    token_ids_T: array[int]
    logprobs_T: array[float]
    """Log-probs under the distribution they were drawn from (`algorithms.distribution`); at temperature 0 the model's
    own.
    """
    versions_T: array[int]
    """Read from the slot that the forward pass applied, not from the request; `BASE_VERSION` for the base."""
    finish_reason: FinishReason
    text: str
    """Decoded text, without the stop string or the token that ended it."""
    routed_experts: RoutedExperts | None = None
    """Experts of the prompt's tokens and the sampled ones; None if not requested."""
    alternatives: tuple[array[int], array[float]] | None = None
    """`Request.alternatives` for each token, flattened: ids and log-probs; id -1 for a missing one."""

    def __post_init__(self) -> None:
        _hold_arrays(self, token_ids_T=TOKENS, logprobs_T=FLOATS, versions_T=TOKENS)


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `[start, end)` of a rollout that one speaker wrote; none for a system's message, whose tokens are those of
    the turn after it."""

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
    """1 where the policy chose the token, 0 elsewhere, and where another rollout of the episode trains the token."""
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
    """The environment's counts, such as `tool_calls` and `tool_errors`."""
    teacher_logprobs_T: array[float] | None = None
    """Log-probs of a teacher behind endpoints, in fp32; 0.0 where the mask is 0. None without such a teacher."""
    teacher_top: TopTokens | None = None
    cohort: str = ""
    """Advantages compare a prompt's rollouts of equal cohort: the sides of a game, or the depths of a tree."""

    def __post_init__(self) -> None:
        numbers = {"logprobs_T": FLOATS, "teacher_logprobs_T": FLOATS}
        _hold_arrays(self, token_ids_T=TOKENS, loss_mask_T=FLAGS, versions_T=TOKENS, **numbers)

    @property
    def trains(self) -> bool:
        """Whether it was scored, and the policy chose a token of it."""
        return self.reward is not None and 1 in self.loss_mask_T.tobytes()


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: Prompt
    rollouts_G: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sample: a rollout's tokens with their mask, and columns with one number for each token.

    Samples with equal `prefix_id` start with the same `prefix_length` unmasked tokens, which a batch computes once.

    Example: `Sample([5, 6, 7], [0, 1, 1], {"sampled": [0, -0.5, -0.1], "advantage": [0, 1.0, 1.0]}, 0, 1)`
    """

    token_ids_T: array[int]
    loss_mask_T: array[int]
    columns: Mapping[ColumnName, array[float]]
    """fp32, one number per token, 0.0 where the mask is 0."""
    prefix_id: int
    prefix_length: int
    routed_experts: RoutedExperts | None = None
    prompt_number: int | None = None
    """Number of its prompt in the batch, whose samples train in one mini-batch; None: `prefix_id`."""
    teacher_top: TopTokens | None = None
    is_shown: bool = False
    """Whether a report shows its tokens; the update returns their entropies."""

    def __post_init__(self) -> None:
        _hold_arrays(self, token_ids_T=TOKENS, loss_mask_T=FLAGS)
        if not all(isinstance(column, array) and column.typecode == FLOATS for column in self.columns.values()):
            object.__setattr__(self, "columns", {name: array(FLOATS, each) for name, each in self.columns.items()})


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """The files of a published adapter, with the digests of their pieces."""

    files: Mapping[str, Pieces]
    """File name → pieces: `adapter_config.json`, `adapter_model.safetensors` and, for OFT, `rotations.safetensors`."""

    @property
    def digest(self) -> str:
        """Digest of the adapter: the root over all files."""
        return tree_digest(self.files)


class AdapterMemory(Protocol):
    """Memory that other processes of this machine can map, as long as this object lives."""

    @property
    def descriptor(self) -> int: ...

    @property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """First byte and number of bytes of each file."""


class AdapterSink(AdapterMemory, Protocol):
    """Receives the files of one adapter while they are made, so that they are never held twice."""

    def write(self, name: str, size: int, pieces: Iterable[Buffer]) -> Pieces:
        """Writes one whole file of `size` bytes; returns the digest of each piece (those of `digests`, in order)."""

    def fill(self, name: str, sizes: Sequence[int], write: Iterable[int]) -> Pieces:
        """Reserves a file of these parts. `write` fills it at `places[name]`, and yields the number of bytes there."""


class StateWriter(Protocol):
    """Receives a trainer's state, and reads it while the next step runs."""

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        """Adds a part of `size` bytes. Another thread may request its pieces, more than once, until `wait` returns."""

    def wait(self) -> None:
        """Returns once the state is not being read, whether writing succeeded or failed."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A published adapter: exact file bytes under their PEFT names, and the digest over all of them."""

    version: int
    files: Mapping[str, Buffer]
    """`adapter_config.json`, `adapter_model.safetensors` and, for OFT, `rotations.safetensors`."""
    digest: str
    """`AdapterManifest.digest`."""
    pieces: Mapping[str, Pieces] | None = None
    """`AdapterManifest.files`; None if not known, and then recomputed on demand."""
    memory: AdapterMemory | None = None
    """The memory that `files` are views of; None if they are ordinary bytes of this process."""


@dataclass(frozen=True, slots=True)
class Cached:
    """Log-probs of the last of the given tokens, after a prefix that the engine may have had in its cache."""

    logprobs_T: tuple[float, ...]
    tokens: int
    """Number of leading tokens that came from the cache; 0: the reading says nothing."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of given tokens, and proof of what computed them."""

    logprobs_T: tuple[float, ...]
    """Entry t is log p(token t | tokens before t) at temperature 1; entry 0 is 0.0."""
    applied_digest: str | None
    """Digest of the adapter tensors that the layers multiplied by in these very passes; `None` if none was applied."""
    cached: Cached | None = None
    """The tokens after `prefix_length` again, after a cached prefix; None if not requested or not supported."""
    top_T: tuple[int, ...] | None = None
    """Entry t is the most probable token given those before t; entry 0 is -1. None if not reported."""
    routed_experts: RoutedExperts | None = None
    """Experts of every token but the last; None if not recorded."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of one step's training, already reduced over its samples."""

    metrics: Mapping[str, float]
    """`loss kl entropy grad_norm clip_fraction learning_rate` and the `parity_*` statistics."""
    optimizer_updates: int
    tokens: int
    entropies_T: tuple[float, ...] = ()
    """Nats, of the trained tokens of the sample that is shown: of what each was drawn from, in the step's first pass
    over it."""


class Tokenizer(Protocol):
    """Text to ids and back, as the model was trained."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def marker_ids(self) -> tuple[int, ...]:
        """Special tokens that `decode` writes out, because calls of tools consist of them."""

    @property
    def call_format(self) -> str:
        """Name of the format in which the chat template writes calls of tools; empty if it is none that is known."""

    def encode_many(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int]]:
        """Ids of each conversation up to the start of the assistant's message. `tools`: schemas for the template."""

    def encode_continuation(
        self, messages: Sequence[Mapping[str, Any]], answered: int, last_id: int | None, *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:  # fmt: skip
        """Ids from the end of the sampled message `answered`, which ended with `last_id`, to the start of the next."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Copy(Protocol):
    """One place that samples: a publish is proven on each copy of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def reads_back(self) -> bool:
        """Whether it can report its slots' contents; if not, a proof rests on log-probs alone, and says so."""

    def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:  # fmt: skip
        """One reading of the same tokens per adapter, all in one batch, by the same passes as sampling.

        Args:
            prefix_length: score the tokens after this many again, with the leading ones from the prefix cache if it
                holds them from an earlier call.
            standing: other adapters whose digests will be requested: a server reports them with these readings.
        """

    def adapter_digest(self, name: str) -> str | None:
        """Digest recomputed from the slot's present contents; None if it cannot be read back."""

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        """Describes how the slot's contents differ from what was published; empty if they do not."""


@runtime_checkable
class BatchCopy(Protocol):
    """A `Copy` that can score several sequences in one batch."""

    def score_together(self, sequences: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> list[list[Scored]]:
        """`score` of each sequence."""


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The state of one of an engine's servers."""

    replica: str
    is_up: bool
    restarts: int
    missed: int
    """Adapters that did not arrive by the intended transport, and were loaded from files."""
    exposition: str
    """The server's own metrics in Prometheus' text format; empty if it does not respond."""
    memory_bytes: int | None
    """Memory in use on its device, or on a CPU by its processes; None if it is on another machine or unknown."""


class Engine(Protocol):
    """Completes prompts. Slots hold published adapters under their names; a retired name cannot come back.

    `submit`, `completions` and `abort` belong to one thread. Another may load, score and unload meanwhile.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests and returns at once; requests submitted together may share their prefill.

        Raises:
            GateError: an adapter is not loaded, an id is already in flight, or `so_far` is a finished completion.
            DataError: a prompt is empty.
        """

    def completions(self) -> AsyncGenerator[Completion]:
        """Yields each completion as it ends, in no guaranteed order, including requests submitted meanwhile.

        Stops when nothing is in flight. For one consumer, which may change threads only between two calls.

        Raises:
            GateError: a result does not fit its request.
            EngineDiedError: servers died too many times.
        """

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Aborts these requests, or all: each is returned through `completions` with the tokens it has.

        A request that ended by itself meanwhile keeps its finish reason; an id that is not in flight is ignored.
        """

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Loads it on every copy."""

    def unload_adapter(self, name: str) -> None:
        """Raises GateError if a request in flight still samples from it."""

    def adapters(self) -> tuple[str, ...]: ...

    def copies(self) -> Sequence[Copy]:
        """At least one, always in the same order."""

    def sleep(self) -> None:
        """Releases memory, as the engine was configured to. Until `wake`, no other method may be called."""

    def wake(self) -> None:
        """Restores what it held; every adapter that can be read back was checked."""

    def read_servers(self) -> Sequence[ServerReading]:
        """Its servers' own readings; empty for an engine without servers. May be called from any thread."""

    def close(self) -> None: ...


class TokenSource(Protocol):
    """The source of an episode's tokens: the engine, under the step's policy."""

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        """Samples one completion of these tokens. `key` as in `Request`.

        If a policy is published meanwhile, it samples the rest: each token carries its own version. An episode replayed
        after a kill gets its earlier completions, as long as it asks for the same.
        """


class Trainer(Protocol):
    """Changes the adapter. Owns masters, optimiser and schedule; never touches the base."""

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult: ...

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        """Writes the current adapter to the sink, one file after the other."""

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        """Scores the same tokens with the adapter and with the bare base."""

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> list[array[float]]:
        """This column of each sample, 0.0 at tokens that do not train.

        Only an algorithm with a critic has the column `value`, and only one with a teacher has `teacher`.
        """

    def save_state(self, writer: StateWriter) -> None:
        """Hands over checkpoint parts (safetensors) from which `load_state` continues bit for bit.

        They are read after this returns: anything that changes the trainer's state must wait for `writer` first.
        """

    def load_state(self, parts: Mapping[str, Buffer]) -> None: ...


@runtime_checkable
class BatchTrainer(Protocol):
    """A `Trainer` that can score several sequences in one pass."""

    def score_together(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Scored, Scored]]:
        """`score` of each sequence."""
