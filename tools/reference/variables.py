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
    Variable("ORBIT_BIND_ADDRESS", "127.0.0.1",
             "Address on which the status port listens; `::`, every address, inside a pod.", "orbit run"),
    Variable("ORBIT_STORE_DEADLINE_SECONDS", "120", "How long one call to an object store is retried before exit 74.",
             "everything that reads or writes a run folder"),
    Variable("ORBIT_SERVE_TOKEN", "", "Token that clients must present, without `--token-file`; if unset, the "
             "server listens on the loopback interface only.", "orbit serve"),
    Variable("ORBIT_SERVE_UPDATE_TOKEN", "", "Token that alone may change weights, without `--update-token-file`; if "
             "unset, clients that may sample may change them.", "orbit serve"),
    Variable("ORBIT_SERVICE_TOKEN", "", "Token that orchestrator, trainer and inference share, without "
             "`--token-file`; `orbit rl` creates one for its children.",
             "orbit orchestrator, orbit trainer, orbit inference"),
    Variable("ORBIT_SGLANG_PYTHON", "Orbit's own", "Interpreter of the environment in which SGLang is installed.",
             "orbit run with `engine: SGLang`"),
    Variable("ORBIT_ENGINE_URL", "", "Address of the agent in the engine's container (`orbit agent`), which then "
             "starts SGLang. The operator sets it in a `Split` pod.", "orbit run with `engine: SGLang`"),
    Variable("ORBIT_TOKEN_FILE", "", "File with the token that the agent in the engine's container, and its servers, "
             "require; the first process to need it creates it. The operator sets it in a `Split` pod. If unset, a run "
             "creates a token of its own and writes it nowhere.", "orbit run, orbit agent"),
    Variable("ORBIT_SGLANG_TOKEN_FD", "", "Set by Orbit for the SGLang servers it starts: where they read their "
             "token.", "the SGLang launcher"),
    Variable("RAY_ADDRESS", "", "HOST:PORT of the head of a Ray cluster, which holds the trainer's ranks if "
             "`placement.nodes` is more than one. The operator sets it. If unset, a run uses this machine alone.",
             "orbit run"),
    Variable("RANK", "", "Set by Orbit for the trainer's ranks: the number of this rank.",
             "the Megatron trainer's ranks"),
    Variable("MASTER_ADDR", "", "Set by Orbit for the trainer's ranks: the address where they meet.",
             "the Megatron trainer's ranks"),
    Variable("MASTER_PORT", "", "Set by Orbit for the trainer's ranks: the port where they meet.",
             "the Megatron trainer's ranks"),
    Variable("ORBIT_SGLANG", "", "Set by Orbit for the SGLang servers it starts: the plug-in is active only then.",
             "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_OFT_BLOCK_SIZE", "0", "Set by Orbit for a server that serves OFT: the size of R's blocks.",
             "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_EXPERTS", "", "Set by Orbit for the SGLang servers it starts: how the adapters of routed "
             "experts are laid out.", "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_VERSION", "Pinned", "Set by Orbit for the SGLang servers it starts: `Any` starts any "
             "installed version of SGLang (`rollout.engineVersion`).", "the SGLang plug-in"),
    Variable("ORBIT_SGLANG_PARENT", "", "Set by Orbit for the SGLang servers it starts: the process they end with.",
             "the SGLang plug-in"),
    Variable("ORBIT_ATTEMPT", "", "Name of the attempt, set by the operator. A run with it takes over the run folder.",
             "orbit run"),
    Variable("ORBIT_TERMINATION_FILE", "", "File for the run's ending, as one line of JSON; set by the operator.",
             "orbit run"),
    Variable("ORBIT_CACHE", "~/.cache/orbit-rl", "Where downloads are stored; any number of processes may share it. "
             "The operator sets it to the volume of `placement.modelCache`.", "orbit run"),
    Variable("WANDB_API_KEY", "", "Key of Weights & Biases; without one, and without the settings of the next four, a "
             "run with such a tracker is refused.", "orbit run with a tracker `WandB`"),
    Variable("WANDB_MODE", "online", "`offline` keeps everything on this machine and needs no key.",
             "orbit run with a tracker `WandB`"),
    Variable("WANDB_IDENTITY_TOKEN_FILE", "", "File with a token of an identity provider, instead of a key.",
             "orbit run with a tracker `WandB`"),
    Variable("WANDB_BASE_URL", "", "Address of your own server, if the tracker has no `uri`.",
             "orbit run with a tracker `WandB`"),
    Variable("NETRC", "~/.netrc", "Where `wandb login` stores the key.", "orbit run with a tracker `WandB`"),
    Variable("MLFLOW_TRACKING_URI", "", "Address of MLflow's server, if the tracker has no `uri`; MLflow's own "
             "variables hold user and password or a token.", "orbit run with a tracker `MLflow`"),
    Variable("MLFLOW_ALLOW_FILE_STORE", "true", "Whether MLflow may write to a folder, if the tracker's `uri` is one.",
             "orbit run with a tracker `MLflow`"),
    Variable("XDG_CACHE_HOME", "~/.cache", "Folder of `orbit-rl`, unless `ORBIT_CACHE` is set.", "orbit run"),
    Variable("HF_ENDPOINT", "https://huggingface.co", "The hub that `hf://` uses, or a mirror of it.",
             "orbit run, orbit plan"),
    Variable("HF_TOKEN", "", "Token for private and gated repositories; it is sent only to `HF_ENDPOINT`.",
             "orbit run, orbit plan"),
    Variable("HF_TOKEN_PATH", "$HF_HOME/token", "File with the token, if `HF_TOKEN` is not set; `hf auth login` "
             "writes it.", "orbit run, orbit plan"),
    Variable("HF_HOME", "~/.cache/huggingface", "Folder of that file.", "orbit run, orbit plan"),
    Variable("HF_HUB_OFFLINE", "", "`1`: never contact the hub; what is not in the cache is an error.",
             "orbit run, orbit plan"),
    Variable("AWS_ACCESS_KEY_ID", "", "S3 key.", "the object store client"),
    Variable("AWS_SECRET_ACCESS_KEY", "", "S3 secret.", "the object store client"),
    Variable("AWS_SESSION_TOKEN", "", "S3 session token of temporary credentials.", "the object store client"),
    Variable("AWS_ENDPOINT_URL", "", "Address of an S3 server other than Amazon's, such as `http://127.0.0.1:7070`.",
             "the object store client"),
    Variable("AWS_ENDPOINT_URL_S3", "", "The same for S3 only; it takes precedence over `AWS_ENDPOINT_URL`.",
             "the object store client"),
    Variable("AWS_REGION", "us-east-1", "S3 region.", "the object store client"),
    Variable("NO_COLOR", "", "Any value: no colours on the terminal.", "orbit run"),
    Variable("TERM", "", "`dumb` or unset: one plain line per step instead of a live display.", "orbit run"),
    Variable("COLUMNS", "", "Width of the terminal, if it cannot be determined.", "orbit run"),
    Variable("PYTHONPATH", "", "Where modules are searched; reward workers get it with Orbit's own folder added.",
             "reward workers"),
    Variable("ORBIT_KERNELS", "Auto", "How a CUDA device multiplies by packed weights: `Torch` (none of Orbit's "
             "kernels), `Dequantize` (a kernel, then a torch matmul), `Fused` (one kernel), or by shape.",
             "training, rollout"),
    Variable("CC", "gcc", "C compiler of kernels: Orbit's own on a CPU (`cc` if unset), Triton's on a GPU.",
             "training, rollout, Triton"),
    Variable("CXX", "c++", "C++ compiler that SGLang and FlashInfer use.", "SGLang"),
    Variable("CUDA_HOME", "/usr/local/cuda", "CUDA's toolkit, with `nvcc`.", "SGLang"),
    Variable("CUDA_PATH", "", "The same, if `CUDA_HOME` is not set.", "SGLang"),
    Variable("OMP_NUM_THREADS", "all cores", "Threads of the torch trainer and engine on a CPU. Where other "
             "work takes the cores, set the number of free ones: threads wait for each other. With "
             "`GOMP_SPINCOUNT=10000` they wait asleep sooner: beside another process of two threads, a pretrained "
             "model of 135 M started in 28 s in place of 41; on free cores a step took 4 to 8 % longer.", "torch"),
    Variable("OMP_WAIT_POLICY", "PASSIVE beside SGLang", "How threads of trainer and server wait for each other on a "
             "CPU; `ACTIVE` keeps cores spinning, which slows both down if they share cores.", "torch"),
)  # fmt: skip
