"""Every environment variable that Orbit or a library under it reads on purpose.

Belongs here: the table from which `docs/reference/environment.md` is made; a test holds the source code against it.
Does not belong here: reading them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the page."""

    name: str
    default: str
    meaning: str
    read_by: str


VARIABLES: tuple[Variable, ...] = (
    Variable("ORBIT_BIND_ADDRESS", "127.0.0.1", "Address that the status port listens on; `0.0.0.0` inside a pod.",
             "orbit run"),
    Variable("ORBIT_STORE_DEADLINE_SECONDS", "120", "How long one call to an object store is retried before exit 74.",
             "everything that reads or writes a run folder"),
    Variable("ORBIT_SERVE_TOKEN", "", "Token that clients must bring, where `--token-file` is not given; unset, the "
             "server listens on the loopback device only.", "orbit serve"),
    Variable("ORBIT_SERVICE_TOKEN", "", "Token that orchestrator, trainer and inference share, where `--token-file` is "
             "not given; `orbit rl` makes one for its children.",
             "orbit orchestrator, orbit trainer, orbit inference"),
    Variable("ORBIT_SGLANG_PYTHON", "Orbit's own", "Interpreter of the environment that SGLang is installed in.",
             "orbit run with `engine: SGLang`"),
    Variable("ORBIT_ENGINE_URL", "", "Where the agent of the engine's container listens (`orbit agent`): it starts "
             "SGLang then. The operator sets it in a `Split` pod.", "orbit run with `engine: SGLang`"),
    Variable("ORBIT_TOKEN_FILE", "", "File with the token that the agent of the engine's container, and its servers, "
             "must be asked with; whoever comes first makes it. The operator sets it in a `Split` pod. Unset, a run "
             "makes a token of its own and writes it nowhere.", "orbit run, orbit agent"),
    Variable("ORBIT_SGLANG_TOKEN_FD", "", "Set by Orbit for the SGLang servers it starts: where they read their "
             "token.", "the SGLang launcher"),
    Variable("RAY_ADDRESS", "", "HOST:PORT of the head of a Ray cluster, where `placement.nodes` is more than one: the "
             "trainer's ranks are there. The operator sets it. Unset, this machine is taken as it is.", "orbit run"),
    Variable("RANK", "", "Set by Orbit for the trainer's ranks: the number of this one.",
             "the Megatron trainer's ranks"),
    Variable("MASTER_ADDR", "", "Set by Orbit for the trainer's ranks: where they meet.",
             "the Megatron trainer's ranks"),
    Variable("MASTER_PORT", "", "Set by Orbit for the trainer's ranks: at which port.",
             "the Megatron trainer's ranks"),
    Variable("ORBIT_SGLANG", "", "Set by Orbit for the SGLang servers it starts: its plug-in acts only then.",
             "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_OFT_BLOCK_SIZE", "0", "Set by Orbit for a server that serves OFT: the size of R's blocks.",
             "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_EXPERTS", "", "Set by Orbit for the SGLang servers it starts: how the adapters of routed "
             "experts are laid out.", "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_VERSION", "Pinned", "Set by Orbit for the SGLang servers it starts: `Any` starts whatever "
             "version of SGLang is installed (`rollout.engineVersion`).", "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_PARENT", "", "Set by Orbit for the SGLang servers it starts: the process they end with.",
             "the SGLang plug-in"),
    Variable("ORBIT_ATTEMPT", "", "Name of the attempt, set by the operator. Such a start takes over the run folder.",
             "orbit run"),
    Variable("ORBIT_TERMINATION_FILE", "", "File for how it ended, one line of JSON; set by the operator.",
             "orbit run"),
    Variable("ORBIT_CACHE", "~/.cache/orbit-rl", "Where downloads are kept; any number of processes may share it. The "
             "operator sets it to the volume of `placement.modelCache`.", "orbit run"),
    Variable("WANDB_API_KEY", "", "Key of Weights & Biases; without one, and without what the next four say, a run "
             "with such a tracker is refused.", "orbit run with a tracker `WandB`"),
    Variable("WANDB_MODE", "online", "`offline` keeps everything on this machine and needs no key.",
             "orbit run with a tracker `WandB`"),
    Variable("WANDB_IDENTITY_TOKEN_FILE", "", "File with a token of an identity provider, in place of a key.",
             "orbit run with a tracker `WandB`"),
    Variable("WANDB_BASE_URL", "", "The server, where it is one's own and the tracker has no `uri`.",
             "orbit run with a tracker `WandB`"),
    Variable("NETRC", "~/.netrc", "Where `wandb login` keeps the key.", "orbit run with a tracker `WandB`"),
    Variable("MLFLOW_TRACKING_URI", "", "MLflow's server, where the tracker has no `uri`; its own variables hold user "
             "and password or a token.", "orbit run with a tracker `MLflow`"),
    Variable("XDG_CACHE_HOME", "~/.cache", "Where `orbit-rl` lies, unless `ORBIT_CACHE` is set.", "orbit run"),
    Variable("HF_ENDPOINT", "https://huggingface.co", "The hub that `hf://` asks, or a mirror of it.",
             "orbit run, orbit plan"),
    Variable("HF_TOKEN", "", "Token for private and gated repositories; it is sent to `HF_ENDPOINT` alone.",
             "orbit run, orbit plan"),
    Variable("HF_TOKEN_PATH", "$HF_HOME/token", "File with the token, where `HF_TOKEN` is not set; `hf auth login` "
             "writes it.", "orbit run, orbit plan"),
    Variable("HF_HOME", "~/.cache/huggingface", "Where that file lies.", "orbit run, orbit plan"),
    Variable("HF_HUB_OFFLINE", "", "`1`: never ask the hub; what the cache does not hold is an error.",
             "orbit run, orbit plan"),
    Variable("AWS_ACCESS_KEY_ID", "", "S3 key.", "the object store client"),
    Variable("AWS_SECRET_ACCESS_KEY", "", "S3 secret.", "the object store client"),
    Variable("AWS_SESSION_TOKEN", "", "S3 session token of temporary credentials.", "the object store client"),
    Variable("AWS_ENDPOINT_URL", "", "S3 server that is not Amazon's, such as `http://127.0.0.1:7070`.",
             "the object store client"),
    Variable("AWS_ENDPOINT_URL_S3", "", "The same for S3 only; it goes before `AWS_ENDPOINT_URL`.",
             "the object store client"),
    Variable("AWS_REGION", "us-east-1", "S3 region.", "the object store client"),
    Variable("NO_COLOR", "", "Any value: no colours on the terminal.", "orbit run"),
    Variable("TERM", "", "`dumb` or unset: one plain line per step instead of a live display.", "orbit run"),
    Variable("COLUMNS", "", "Width of the terminal, where it cannot be asked.", "orbit run"),
    Variable("PYTHONPATH", "", "Where modules are looked for; reward workers get it with Orbit's own place added.",
             "reward workers"),
    Variable("ORBIT_KERNELS", "Auto", "How a CUDA device multiplies by packed weights: `Torch` (no kernels of ours), "
             "`Dequantize` (a kernel, then a torch matmul), `Fused` (one kernel), or by shape.", "training, rollout"),
    Variable("OMP_NUM_THREADS", "all cores", "Threads of the torch trainer and engine on a CPU.", "torch"),
    Variable("OMP_WAIT_POLICY", "PASSIVE beside SGLang", "How threads of trainer and server wait for each other on a "
             "CPU; `ACTIVE` turns cores in circles, which costs both where they share them.", "torch"),
)  # fmt: skip
