"""`spec.rollout`: how completions are sampled.

Belongs here: the engine and the distribution. Does not belong here: generation (`rollout`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from orbit_runtime.spec.block import (
    IDENTITY,
    LATER_IDENTITY,
    LAYOUT,
    VARIABLE_PATTERN,
    AsTuple,
    Block,
    Rule,
    Unique,
    WithoutEmpty,
    check_engine_arguments,
)

HEADER_PATTERN = r"^[A-Za-z0-9-]+$"
VALUE_PATTERN = r"^[!-~]+$"
TOKEN_ID_PATTERN = r"^(0|[1-9][0-9]{0,6})$"
MAX_TOKEN_ID = 9_999_999
URL_PATTERN = r"^https?://[A-Za-z0-9.:\[\]_-]+$"


class Sampling(Block):
    """The distribution that tokens are drawn from."""

    temperature: Annotated[float, IDENTITY, Field(gt=0, le=100)] = 1.0
    """Divides the logits; training uses the same distribution."""
    top_p: Annotated[float, IDENTITY, Field(gt=0, le=1)] = 1.0
    """Draw only from the most likely tokens that together reach this probability, among those that `topK` leaves."""
    top_k: Annotated[int | None, LATER_IDENTITY, Field(ge=2, le=1_000_000)] = None
    """Draw only from this many most likely tokens. With a single token nothing would be learned."""
    min_p: Annotated[float, LATER_IDENTITY, Field(ge=0, lt=1)] = 0.0
    """Draw only from tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: Annotated[float, LATER_IDENTITY, Field(gt=0, le=2)] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that occur in the prompt or in the completion so
    far; training uses the same distribution."""
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        LATER_IDENTITY,
        Field(max_length=300, examples=[{"198": -5.0}]),
        WithoutEmpty,
    ] = Field(default_factory=dict)
    """Token id → value added to its logit, before everything else; training uses the same distribution."""
    max_new_tokens: Annotated[int | None, IDENTITY, Field(ge=1, le=1_048_576)] = None
    """Maximum length of a completion; a longer one is cut. If unset, the first start takes what `maxSequenceLength`
    leaves beside the longest prompt, halved down to 256 while the memory of the KV cache is short; `run.json` keeps it.
    An evaluation without a run takes 256."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        AsTuple,
        IDENTITY,
        Field(max_length=16, examples=[["</answer>"]]),
    ] = ()
    """Strings that end a completion, in addition to the model's own end tokens."""
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)], ...],
        AsTuple,
        LATER_IDENTITY,
        Field(max_length=16, examples=[[198]]),
    ] = ()
    """Tokens that end a completion, in addition to the model's own end tokens."""
    ignore_eos: Annotated[bool, LATER_IDENTITY] = False
    """Ignore the model's own end tokens: a completion runs to `maxNewTokens`, or to one of `stop` and `stopTokenIds`.
    """

    rules = (
        Rule(
            "logitBias",
            f"key.matches('{TOKEN_ID_PATTERN}')",
            "`{key}` is not the id of a token",
            "write the token's number in the model's vocabulary, such as '198'",
            each_key=True,
        ),
    )


class Header(Block):
    """One header of every request to a server."""

    name: Annotated[str, LAYOUT, Field(min_length=1, max_length=128, pattern=HEADER_PATTERN, examples=["X-Route"])]
    """Name of the header."""
    value: Annotated[str | None, LAYOUT, Field(min_length=1, max_length=1024, pattern=VALUE_PATTERN)] = None
    """Value of the header, which is also written to `run.json`; use `valueEnv` for a secret."""
    value_env: Annotated[str | None, LAYOUT, Field(max_length=256, pattern=VARIABLE_PATTERN)] = None
    """Environment variable that holds the value."""

    rules = (
        Rule(
            "name",
            "has(self.value) != has(self.valueEnv)",
            "a header has either a text or a variable that holds it",
            "write `value` or `valueEnv`, and not both",
        ),
        Rule(
            "value",
            "!has(self.value) || has(self.valueEnv) || self.name.lowerAscii() != 'authorization'",
            "the key would be visible in the manifest and in run.json",
            "name the variable that holds it in `valueEnv`",
            rests_on=("name",),
        ),
    )


class Server(Block):
    """A server that somebody else runs."""

    url: Annotated[
        str, LAYOUT, Field(min_length=1, max_length=1024, pattern=URL_PATTERN, examples=["http://engine:30000"])
    ]
    """Address of SGLang, or of vLLM's OpenAI server, without a path."""
    api_key_env: Annotated[
        str | None, LAYOUT, Field(max_length=256, pattern=VARIABLE_PATTERN, examples=["ENGINE_API_KEY"])
    ] = None
    """Environment variable that holds the server's key, sent as `Authorization: Bearer …`. On a cluster it comes from a
    Secret in `placement.envFromSecrets`."""
    headers: Annotated[
        tuple[Header, ...], AsTuple, Field(max_length=16, examples=[[{"name": "X-Route", "value": "blue"}]])
    ] = ()
    """Additional headers of every request."""

    rules = (
        Rule(
            "apiKeyEnv",
            "!has(self.apiKeyEnv) || !has(self.headers)"
            " || !self.headers.exists(h, h.name.lowerAscii() == 'authorization')",
            "`Authorization` is set by `apiKeyEnv` already",
            "remove one of the two",
            server="remove apiKeyEnv, or the header Authorization",
        ),
        Rule(
            "headers",
            "!has(self.headers)"
            " || self.headers.all(h, self.headers.exists_one(o, o.name.lowerAscii() == h.name.lowerAscii()))",
            "a header appears here twice",
            "name each once",
            server="name each header once",
        ),
    )


class Endpoint(Server):
    """A server that samples for this run."""

    adapter_method: Annotated[Literal["Auto", "Folder", "Upload"], LAYOUT] = "Auto"
    """How adapters reach the server: `Folder`, as a path that the server sees too, or `Upload`, LoRA's tensors in the
    request, which only SGLang accepts. `Auto` is `Folder` on this machine and if `adapterFolder` is set, otherwise
    `Upload`."""


class Rollout(Block):
    """How completions are sampled."""

    engine: Annotated[Literal["Auto", "Torch", "SGLang", "OpenAI"], LAYOUT] = "Auto"
    """The engine that samples: `Torch` runs in the trainer's process on the same weights; `SGLang` is a server that
    Orbit starts beside it, for LoRA and OFT; `OpenAI` uses the servers of `endpoints`."""
    replicas: Annotated[int, LAYOUT, Field(ge=1, le=64)] = 1
    """With `engine: SGLang`: number of servers that Orbit starts. One that dies is replaced; meanwhile the others do
    its work."""
    tensor_parallel: Annotated[int | None, LAYOUT, Field(ge=1, le=64)] = None
    """GPUs of each of these servers, over which matrices and heads are split. If unset, the machine's GPUs divided by
    `replicas`, as far as the model can be split. On a CPU it counts processes; if unset, 1. Not run on hardware."""
    endpoints: Annotated[
        tuple[Endpoint, ...], AsTuple, Field(max_length=64, examples=[[{"url": "http://engine:30000"}]])
    ] = ()
    """With `engine: OpenAI`: servers that somebody else runs, all of one version, serving the model of `model.uri`."""
    adapter_folder: Annotated[str | None, LAYOUT, Field(min_length=1, max_length=1024, pattern="^/")] = None
    """With `engine: OpenAI`: a folder for published adapters that Orbit and the endpoints see under this path."""
    adapter_transport: Annotated[Literal["Auto", "File", "SharedMemory"], LAYOUT] = "Auto"
    """How published adapters reach servers that Orbit starts: as files, or in the host's memory. A server that cannot
    be reached that way gets files. `Auto` is `SharedMemory`, or `File` in a `Split` pod, whose containers share no
    memory; `endpoints` use `adapterMethod` instead."""
    sleep: Annotated[Literal["None", "Cache", "All"], LAYOUT] = "None"
    """What servers that Orbit starts release while the trainer works, on a GPU that both use: nothing, the key-value
    cache, or also the weights, which meanwhile wait in the host's memory. On a CPU nothing is freed."""
    deterministic: Annotated[bool, LAYOUT] = False
    """The same `data.seed`, policy and prompt give the same completions, whatever else is in the batch, in any order,
    on any server and after a restart. `SGLang` does this with slower kernels, on GPUs, for BF16 bases; not run on
    hardware. `Torch` always draws by that seed: nothing changes, and another batch may still round differently."""
    max_staleness: Annotated[int, LATER_IDENTITY, Field(ge=0, le=64)] = 0
    """How many policy versions a token may be behind when it is trained on. 0: a step is sampled, then trained, and
    equal runs have equal bits. With k, up to k later steps are sampled meanwhile; a publish moves completions in
    progress to the new version, and checkpoints keep them: docs/guides/asynchrony.md."""
    over_sampling: Annotated[int, LATER_IDENTITY, Field(ge=0, le=1_000_000)] = 0
    """Prompts that a step draws in addition to `training.promptsPerStep`. The groups that finish first are trained on;
    the rest is cancelled and discarded, so prompts with long completions train less often: docs/guides/asynchrony.md.
    """
    router_replay: Annotated[Literal["None", "Record", "Replay"], IDENTITY] = "None"
    """`Replay`: the trainer sends each token to the experts that sampling chose for it, weighted by its own router, so
    that rounding cannot send it elsewhere. `Record` only stores the choice with the rollouts. Both measure parity with
    and without replay. Refused for a model without routed experts, for DeepSeek-V4 and with `endpoints`."""
    engine_version: Annotated[Literal["Pinned", "Any"], LAYOUT] = "Pinned"
    """`Pinned`: servers with Orbit's plug-in must run the SGLang version that it was made for (exit 78, naming both
    versions). `Any` accepts another version, in which nothing was tested."""
    sampling: Sampling = Sampling()
    """The distribution that tokens are drawn from."""
    max_running_requests: Annotated[int, LAYOUT, Field(ge=1, le=1_000_000)] = 512
    """Completions that each server samples at the same time; lower it to save memory."""
    engine_arguments: Annotated[
        dict[str, JsonValue], LAYOUT, Field(max_length=32, examples=[{"chunked-prefill-size": 4096}])
    ] = Field(default_factory=dict)
    """Additional arguments of SGLang's servers, by their own names without dashes; `true` sets a flag without a value.
    Arguments that Orbit sets itself or that contradict the plan are refused: docs/guides/sglang.md. Not run on
    hardware."""

    rules = (
        Rule(
            "replicas",
            "self.replicas == 1 || self.engine == 'SGLang'",
            "{self.replicas} servers are not started with `engine: {self.engine}`",
            "remove `replicas`, or write `engine: SGLang`",
        ),
        Rule(
            "tensorParallel",
            "!has(self.tensorParallel) || self.tensorParallel == 1 || self.engine == 'SGLang'",
            "with `engine: {self.engine}` Orbit starts no server that could be divided among GPUs",
            "remove `tensorParallel`, or write `engine: SGLang`",
        ),
        Rule(
            "adapterTransport",
            "self.adapterTransport in ['Auto', 'File'] || self.engine == 'SGLang'",
            "with `engine: {self.engine}` Orbit starts no server that could take adapters that way",
            "remove `adapterTransport`, or write `engine: SGLang`",
        ),
        Rule(
            "sleep",
            "self.sleep == 'None' || self.engine == 'SGLang'",
            "with `engine: {self.engine}` Orbit starts no server that could sleep",
            "remove `sleep`, or write `engine: SGLang`",
        ),
        Rule(
            "maxStaleness",
            "self.sleep == 'None' || self.maxStaleness == 0",
            "an engine that sleeps while the trainer works samples nothing meanwhile",
            "remove one of the two",
            server="remove sleep or maxStaleness",
        ),
        Rule(
            "engineVersion",
            "self.engineVersion == 'Pinned' || self.engine != 'Torch'",
            "`engine: Torch` does not use SGLang",
            "remove `engineVersion`",
        ),
        Rule(
            "deterministic",
            "!self.deterministic || self.engine != 'OpenAI'",
            "the flags of attached servers decide whether they are deterministic; Orbit does not set them",
            "remove `deterministic`, or write `engine: SGLang`",
        ),
        Rule(
            "routerReplay",
            "self.routerReplay == 'None' || self.engine != 'OpenAI'",
            "the flags of attached servers decide whether they report experts; Orbit does not set them",
            "remove `routerReplay`, or write `engine: SGLang`",
        ),
        Rule(
            "engine",
            "self.engine != 'OpenAI' || (has(self.endpoints) && size(self.endpoints) > 0)",
            "`engine: OpenAI` starts no server",
            "add `endpoints` with the address of each server",
        ),
        *(
            Rule(
                name,
                f"self.engine == 'OpenAI' || {absent}",
                "`engine: {self.engine}` uses no endpoints",
                f"remove `{name}`, or write `engine: OpenAI`",
            )
            for name, absent in (
                ("endpoints", "!has(self.endpoints) || size(self.endpoints) == 0"),
                ("adapterFolder", "!has(self.adapterFolder)"),
            )
        ),
        Rule(
            "engineArguments",
            "size(self.engineArguments) == 0 || self.engine == 'SGLang'",
            "with `engine: {self.engine}` Orbit starts no server that could take them",
            "remove `engineArguments`, or write `engine: SGLang`",
            server=False,
        ),
        check_engine_arguments,
        Unique("endpoints", "url"),
    )
