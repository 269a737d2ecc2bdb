"""Good and bad manifests, written by hand: what a person gets right or wrong, one mistake each.

Belongs here: the texts, and which fields are to blame. Does not belong here: mistakes that follow from a field's
type and bounds alone (`field_cases`), or sending them anywhere (the tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.corpus_algorithm import BAD_ALGORITHM, GOOD_ALGORITHM

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
NEEDED = {
    "model": "{uri: builtin://tiny-adder}",
    "data": "{prompts: [{uri: builtin://two-digit-addition}]}",
    "environment": "{rewards: [{name: correct, type: ExactMatch}]}",
    "training": "{steps: 5}",
}
SERVER_NAMES_THE_MAP = "the server names the map, not the entry"
NO_TYPE, NO_YAML = "the server has no such type", "it is no YAML to the server"
UNSET = "only the pod knows its variables"
ANY = ("*",)
"""The server refuses it, and names whatever it likes."""
OWN_READING = "YAML 1.1 and 1.2 differ, and kubectl takes one of the two"


@dataclass(frozen=True, slots=True)
class Case:
    """A manifest, and what is to blame in it."""

    name: str
    text: str
    refused: tuple[str, ...] = ()
    """Fields that both doors name; empty where both accept it."""
    server: tuple[str, ...] | None = None
    """What the API server names instead, where the two cannot be alike."""
    why: str = ""
    """Why they cannot be alike."""

    @property
    def by_server(self) -> tuple[str, ...]:
        return self.refused if self.server is None else self.server


def manifest(*, metadata: str = "{name: corpus}", top: str = "", **blocks: str) -> str:
    """A whole manifest. Each block of the spec is YAML in one line; one that is empty is left out."""
    spec = "".join(f"  {name}: {text}\n" for name, text in {**NEEDED, **blocks}.items() if text)
    head = f"apiVersion: orbitrl.dev/v1alpha1\nkind: OrbitRun\nmetadata: {metadata}\n"
    return f"{head}{top}spec:\n{spec}"


GOOD_BLOCKS: dict[str, tuple[str, ...]] = {
    "model": (
        *(
            f"{{uri: '{uri}'}}"
            for uri in (
                "models/x", "/models/x", "~/x", "file:///models/x", "hf://org/name", "hf://org/name@main",
                "s3://bucket/x", "pvc://claim/x", "builtin://tiny-adder", "${ORBIT_UNSET:-models/x}",
                "hf://${ORBIT_UNSET:-org/name}", "hf://org/name@refs.pr.1", "hf://datasets/name", "hf://o.r-g_/n..m",
            )
        ),
        "&m {uri: builtin://tiny-adder}",
    ),
    "adapter": (
        "", "{}", " # empty", "~", "{type: LoRA, lora: {rank: 1, alpha: 0.5}}", "{lora: {rank: 1024}}", "{type: OFT}",
        "{type: OFT, oft: {blockSize: 2, parametrization: Cayley}}", "{type: LoRA, lora: , oft: null}",
        "{type: OFT, oft: {parametrization: CayleyNeumann, neumannTerms: 6}}",
        "{type: OFT, oft: {coft: true, coftEps: 0.001}}", "{initFrom: runs/sft}", "{initFrom: s3://bucket/runs/sft}",
    ),
    "algorithm": GOOD_ALGORITHM,
    "data": (
        "{prompts: [{uri: 'süß/数据.jsonl', promptField: 'вопрос'}], limit: }",
        "{prompts: [{uri: 'hf://datasets/org/name@main/train.jsonl'}, {uri: 'hf://datasets/org/name/a/b c.csv'}, "
        "{uri: 'hf://org/name/x'}]}",
        "{prompts: [{uri: a, completionField: answer, toolsField: tools}], validation: {patience: 3}}",
        "{prompts: [{uri: a}], chat: {answers: Last}, validation: {}}",
        "{prompts: [{uri: a, weight: 3}, {uri: b}], difficulty: {low: 0.1, revisitEpochs: 2}}",
    ),
    "environment": (
        "{rewards: [{name: a, type: Math}, {name: b, entrypoint: m:f, weight: -0.5}]}",
        "{rewards: [{name: a, entrypoint: a.b:f, arguments: {x: 1, k: [1.5, null, {z: true}], s: ü, e: {}, l: null}}]}",
        "{code: {uri: s3://bucket/code}, rewards: [{name: a, entrypoint: m:f}]}",
        "{code: {uri: configmap://code}, rewards: [{name: a, type: Math}]}",
        "{type: MultiTurn, tools: ['a.b:f', 'c:g'], rewards: [{name: a, type: Math}]}",
        "{type: MultiTurn, entrypoint: a:B, arguments: {x: 1}, limits: {turns: 2, tokens: 9, memory: 2Gi},"
        " rewards: []}",
        "{type: MultiTurn, entrypoint: a:B, tools: [], rewards: []}",
        "{type: Gymnasium, name: FrozenLake-v1, rewards: [{name: a, type: Math}]}",
        "{type: Verifiers, name: x, rewards: []}",
    ),
    "rollout": (
        "{sampling: {}}", "{sampling: {stop: []}}", "{sampling: {stop: ['終わり', '🛑']}}",
        "{sampling: {topK: 40, minP: 0.05, repetitionPenalty: 1.1, stopTokenIds: [0, 151645], ignoreEos: true}}",
        "{sampling: {logitBias: {'198': -5, '0': 0.5}}}", "{sampling: {logitBias: {}, stopTokenIds: [], topK: }}",
        "{sampling: {logitBias: {'1': }}}", "{sampling: {stop: [" + "🛑" * 256 + "]}}", "{engine: SGLang, replicas: 4}",
        "{engine: SGLang, replicas: 2, tensorParallel: 4}", "{tensorParallel: 1}", "{engine: Auto, endpoints: []}",
        "{engine: SGLang, adapterTransport: SharedMemory}",
        "{engine: SGLang, adapterTransport: File}", "{adapterTransport: Auto}", "{adapterTransport: File}",
        "{engine: OpenAI, endpoints: [{url: 'http://a'}], adapterTransport: Auto}",
        "{overSampling: 8}", "{maxStaleness: 0}", "{maxStaleness: 64}", "{engine: SGLang, sleep: All, maxStaleness: 0}",
        "{engine: SGLang, sleep: All}", "{sleep: None}", "{engine: SGLang, deterministic: true, replicas: 2}",
        "{engine: SGLang, engineVersion: Any}", "{engine: Torch, engineVersion: Pinned}",
        "{deterministic: true}", "{engine: Torch, deterministic: true}",
        "{routerReplay: Replay}", "{engine: SGLang, routerReplay: Record}",
        "{engine: OpenAI, endpoints: [{url: 'http://a'}], routerReplay: None}",
        "{engine: OpenAI, endpoints: [{url: 'http://a'}], deterministic: false}",
        "{engine: OpenAI, endpoints: [{url: 'http://engine:30000'}, {url: 'https://[::1]:1', adapterMethod: Upload}]}",
        "{engine: OpenAI, endpoints: [{url: 'http://a'}], adapterFolder: /adapters}",
        "{engine: OpenAI, endpoints: [{url: 'http://a', apiKeyEnv: KEY, headers: [{name: X-Route, value: a},"
        " {name: X-Key, valueEnv: B}]}]}",
        "{engine: OpenAI, endpoints: [{url: 'http://a', headers: [{name: authorization, valueEnv: B}]}]}",
    ),
    "training": (
        "{steps: 1e2, promptsPerStep: 16.0}", "{steps: 5, learningRate: 1}", "{steps: 5, learningRate: 1e-3}",
        "{steps: 5, schedule: }", "{steps: 5, schedule: {type: Cosine, warmupSteps: 3, decaySteps: 4}}",
        "{steps: 5, schedule: {warmupSteps: 50}}", "{steps: 5, promptsPerStep: 12, miniBatchPrompts: 4}",
        "{steps: 5} # five", '{"steps": 5}', "{steps: 5, stopWhen: }",
    ),
    "observability": (
        "{trackers: [{type: TensorBoard}, {type: WandB, project: a b}, {type: MLflow, uri: 'http://mlflow:5000'}]}",
        "{notify: [{url: 'https://hooks/x'}, {urlEnv: HOOK, events: [Gate, Stopped]}]}", "{trackers: [], notify: }",
    ),
    "storage": (
        *(
            f"{{uri: '{uri}'}}"
            for uri in ("/runs", "s3://bucket", "s3://bucket/a/b/", "gs://bucket", "az://container/x", "file:///runs")
        ),
        "{uri: s3://b, credentialsSecretName: s.t-1, deletionPolicy: Delete}", "{serviceAccountName: runs}",
    ),
    "placement": (
        "{egress: [], tolerations: [], envFromSecrets: [], nodeSelector: {}, resources: {}, modelCache: {}}",
        "{gpus: 0, modelCache: {sizeLimit: 10Gi}}", "{egress: [{cidr: 10.1.2.3/8}]}", "{nodeSelector: {a: }}",
        "{pod: {runtimeClassName: nvidia, labels: {kueue.x-k8s.io/priority-class: high}, env: [{name: A, value: b}]}}",
        "{gpus: 4, gpuProduct: NVIDIA-B200, image: 'registry:5000/a/b@sha256:00', "
        "resources: {cpu: 64, memory: 1Ti, ephemeralStorage: '1000', sharedMemory: 64Gi}, modelCache: {claimName: c}, "
        "envFromSecrets: [a, b.c], egress: [{cidr: 10.0.0.0/8, ports: [1, 65535]}, {cidr: '::/0'}, {namespace: m}], "
        "nodeSelector: {example.com/pool: b200, plain: ''}, tolerations: [{operator: Exists}, {key: c/d}, "
        "{key: a, value: b, effect: NoExecute, tolerationSeconds: 0}]}",
    ),
    "lifecycle": (
        "{suspend: true, queueName: team-a, managedBy: kueue.x-k8s.io/multikueue, ttlSecondsAfterFinished: 0, "
        "activeDeadlineSeconds: 1, startupDeadlineSeconds: 2147483647, terminationGracePeriodSeconds: 1, "
        "waitingDeadlineSeconds: 1, "
        "maxUserRetries: 3, maxInfraRestarts: 0}",
    ),
}  # fmt: skip
"""Block → texts that both doors accept in an otherwise good manifest."""

BAD_BLOCKS: dict[str, tuple[tuple[str, str], ...]] = {
    "model": (
        ("builtin://tiny-adder", ""), ("{uri: 5}", "uri"), ('{uri: ""}', "uri"),
        ("{uri: a, precision: int4}", "precision"),
        *(
            (f"{{uri: '{uri}'}}", "uri")
            for uri in (
                "bultin://x", "http://example.com/x", "az://x", "file://x", "hf://", "hf:///", "s3:///", "://x", "HF://x",
                "configmap://x", "hf://x", "hf://org/name/file", "hf://org/name@", "hf://org/na me", "hf://../name",
                "hf:///org/name", "hf://datasets/org/name", "hf://datasets/org/name@main", "hf://org/name@a/b",
                "hf://org/name?x", "hf://org/ñame",
            )
        ),
    ),
    "trainer": (("{}", ""),),
    "adapter": (
        ("[LoRA]", ""), ("{targets: []}", "targets"), ("{targets: [a, b, a]}", "targets[2]"),
        ("{type: LoRA, oft: {}}", "oft"), ("{type: OFT, lora: {}, oft: {}}", "lora"),
        ("{type: OFT, oft: {parametrization: Cayley, neumannTerms: 6}}", "oft.neumannTerms"),
        ("{type: OFT, oft: {coftEps: 0.001}}", "oft.coftEps"), ("{initFrom: ftp://a/b}", "initFrom"),
    ),
    "algorithm": BAD_ALGORITHM,
    "data": (
        ("{prompts: []}", "prompts"), ("{prompts: uri}", "prompts"), ("{prompts: [null]}", "prompts[0]"),
        ("{prompts: [{uri: a}, {uri: b, heft: 1}]}", "prompts[1].heft"),
        ("{prompts: [{uri: a}, {uri: 'http://example.com/x'}]}", "prompts[1].uri"),
        *(
            (f"{{prompts: [{{uri: '{uri}'}}]}}", "prompts[0].uri")
            for uri in (
                "hf://x", "hf://org/name", "hf://org/name@main", "hf://datasets/org/name", "hf://datasets/org/name@main",
                "hf://datasets/org/name/", "hf://datasets/org/name/../x.jsonl", "hf://datasets/org/name@/x.jsonl",
            )
        ),
        ("{prompts: [{uri: a}], validation: {share: 1}}", "validation.share"),
        ("{prompts: [{uri: a}], difficulty: {low: 0.6}}", "difficulty.low"),
        ("{prompts: [{uri: a}], shuffle: 'true'}", "shuffle"), ("{prompts: [{uri: a}], shuffle: 1}", "shuffle"),
        ("{prompts: [{uri: a, rows: [" + "x" * 990_000 + "]}]}", "prompts[0].rows"),
    ),
    "environment": (
        ("{rewards: []}", "rewards"), ("{rewards: [{name: a, type: Math}, {name: b}]}", "rewards[1]"),
        ("{rewards: [{name: a, type: Math, entrypoint: m:f}]}", "rewards[0].entrypoint"),
        ("{rewards: [{name: a, type: Math}, {name: a, entrypoint: m:f}]}", "rewards[1]"),
        ("{rewards: [{name: a, entrypoint: my.module}]}", "rewards[0].entrypoint"),
        ("{rewards: [{type: Math}]}", "rewards[0].name"), ("{rewards: [{name: a, type: }]}", "rewards[0]"),
        ("{code: {uri: 'hf://x'}, rewards: [{name: a, type: Math}]}", "code.uri"),
        ("{code: {}, rewards: [{name: a, type: Math}]}", "code.uri"), ("{}", "rewards"),
        ("{type: MultiTurn, rewards: [{name: a, type: Math}]}", "type"), ("{type: Gymnasium, rewards: []}", "type"),
        ("{type: MultiTurn, entrypoint: a:B, tools: [a:f], rewards: []}", "tools"),
        ("{type: SkyRLGym, name: a, tools: [a:f], rewards: []}", "tools"),
        ("{entrypoint: a:B, rewards: []}", "entrypoint"), ("{name: x, rewards: [{name: a, type: Math}]}", "name"),
        ("{type: MultiTurn, tools: [a:f], rewards: []}", "rewards"),
        ("{tools: [a:f], rewards: [{name: a, type: Math}]}", "tools"),
        ("{type: MultiTurn, entrypoint: a:B, rewards: [{name: environment, type: Math}]}", "rewards"),
        ("{type: Gymnasium, name: x, rewards: [{name: a, type: Math}, {name: environment, type: Math}]}", "rewards"),
    ),
    "rollout": (
        ("{sampling: {maxNewTokens: 2048}}", "sampling.maxNewTokens"),
        ("{sampling: {logitBias: {the: 1}}}", "sampling.logitBias"),
        ("{sampling: {logitBias: {'01': 1}}}", "sampling.logitBias"),
        ("{sampling: {logitBias: {'1': a}}}", "sampling.logitBias.1"),
        ("{sampling: {logitBias: {'1': 101}}}", "sampling.logitBias.1"),
        ("{sampling: {logitBias: [1]}}", "sampling.logitBias"),
        ("{sampling: {topK: 1}}", "sampling.topK"), ("{sampling: {minP: 1}}", "sampling.minP"),
        ("{replicas: 2}", "replicas"),
        ("{adapterTransport: SharedMemory}", "adapterTransport"),
        ("{engine: Torch, adapterTransport: SharedMemory}", "adapterTransport"),
        ("{engine: OpenAI, endpoints: [{url: 'http://a'}], adapterTransport: SharedMemory}", "adapterTransport"),
        ("{engine: SGLang, adapterTransport: Broadcast}", "adapterTransport"),
        ("{engine: SGLang, adapterTransport: Pigeon}", "adapterTransport"),
        ("{engine: Torch, engineVersion: Any}", "engineVersion"),
        ("{engine: SGLang, engineVersion: 0.5.22}", "engineVersion"),
        ("{maxStaleness: -1}", "maxStaleness"), ("{maxStaleness: 65}", "maxStaleness"),
        ("{maxStaleness: 0.5}", "maxStaleness"), ("{engine: SGLang, sleep: Cache, maxStaleness: 1}", "maxStaleness"),
        ("{overSampling: -1}", "overSampling"), ("{sleep: Cache}", "sleep"), ("{engine: Torch, sleep: All}", "sleep"),
        ("{engine: SGLang, sleep: Much}", "sleep"), ("{deterministic: 'true'}", "deterministic"),
        ("{engine: OpenAI, endpoints: [{url: 'http://a'}], deterministic: true}", "deterministic"),
        ("{routerReplay: true}", "routerReplay"), ("{routerReplay: Sometimes}", "routerReplay"),
        ("{engine: OpenAI, endpoints: [{url: 'http://a'}], routerReplay: Replay}", "routerReplay"),
        ("{engine: Torch, replicas: 2}", "replicas"), ("{engine: Torch, tensorParallel: 2}", "tensorParallel"),
        ("{tensorParallel: 2}", "tensorParallel"), ("{engine: SGLang, tensorParallel: 0}", "tensorParallel"),
        ("{engine: OpenAI}", "engine"),
        ("{engine: OpenAI, endpoints: []}", "engine"), ("{endpoints: [{url: 'http://a'}]}", "endpoints"),
        ("{engine: SGLang, adapterFolder: /a}", "adapterFolder"),
        ("{engine: OpenAI, endpoints: [{url: 'http://a'}, {url: 'http://a'}]}", "endpoints[1]"),
        ("{engine: OpenAI, endpoints: [{url: 'http://a'}], adapterFolder: a}", "adapterFolder"),
        *(
            (f"{{engine: OpenAI, endpoints: [{{url: 'http://a', {more}}}]}}", f"endpoints[0].{refused}")
            for more, refused in (
                ("headers: [{name: X}]", "headers[0].name"), ("headers: [{name: X, value: a, valueEnv: B}]",
                "headers[0].name"), ("headers: [{name: authorization, value: 'Bearer key'}]", "headers[0].value"),
                ("headers: [{name: X, value: a}, {name: x, value: b}]", "headers"),
                ("apiKeyEnv: KEY, headers: [{name: Authorization, valueEnv: KEY}]", "apiKeyEnv"),
                ("apiKeyEnv: sk-secret", "apiKeyEnv"), ("headers: [{name: 'X Y', value: a}]", "headers[0].name"),
            )
        ),
        *(
            (f"{{engine: OpenAI, endpoints: [{{url: '{url}'}}]}}", "endpoints[0].url")
            for url in ("engine:30000", "ftp://a", "http://", "http://a/v1", "http://me:word@a", "http://a b")
        ),
    ),
    "observability": (
        ("{trackers: [{}]}", "trackers[0].type"), ("{trackers: [{type: Comet}]}", "trackers[0].type"),
        ("{notify: [{events: [Done]}]}", "notify[0].url"), ("{notify: [{url: 'ftp://a'}]}", "notify[0].url"),
        ("{notify: [{url: 'https://a', urlEnv: HOOK}]}", "notify[0].url"),
        ("{notify: [{urlEnv: 'https://a'}]}", "notify[0].urlEnv"),
        ("{notify: [{urlEnv: HOOK, events: []}]}", "notify[0].events"),
    ),
    "training": (
        ("", ""), (" # empty", ""), ("{}", "steps"), ("{steps: }", "steps"), ("{steps: '5'}", "steps"),
        ("{steps: true}", "steps"), ("{steps: 5.5}", "steps"), ("{steps: 5, learningRate: '1e-3'}", "learningRate"),
        ("{steps: 5, learningrate: 1}", "learningrate"), ("{steps: 5, learning_rate: 1}", "learning_rate"),
        ("{steps: 5, promptsPerStep: 12, miniBatchPrompts: 5}", "miniBatchPrompts"),
        ("{steps: 5, promptsPerStep: 12, miniBatchPrompts: 24}", "miniBatchPrompts"),
        ("{steps: 5, schedule: {type: Linear, warmupSteps: 5}}", "schedule.warmupSteps"),
        ("{steps: 5, schedule: {decaySteps: 5}}", "schedule.decaySteps"),
        ("{steps: 5, schedule: {type: Linear, warmupSteps: 3, decaySteps: 3}}", "schedule.decaySteps"),
    ),
    "storage": (
        ("{uri: 'hf://x'}", "uri"), ("{credentialsSecretName: Secret}", "credentialsSecretName"),
        ("{credentialsSecretName: a, serviceAccountName: b}", "serviceAccountName"),
    ),
    "placement": (
        ("{layout: Split}", "layout"), ("{trainerGpus: 1}", "trainerGpus"), ("{trainerGpus: 0}", "trainerGpus"),
        ("{modelCache: {claimName: a, sizeLimit: 1Gi}}", "modelCache.sizeLimit"),
        ("{resources: {memory: 64 GB}}", "resources.memory"), ("{resources: {memory: 64}}", "resources.memory"),
        ("{resources: {cpu: 500m}}", "resources.cpu"), ("{envFromSecrets: [a, b, a]}", "envFromSecrets[2]"),
        ("{egress: [{ports: [1]}]}", "egress[0]"),
        ("{egress: [{cidr: 10.0.0.0/8, namespace: a}]}", "egress[0].namespace"),
        ("{egress: [{namespace: a, ports: [9000, 9000]}]}", "egress[0].ports[1]"),
        *(
            (f"{{egress: [{{cidr: '{cidr}'}}]}}", "egress[0].cidr")
            for cidr in (
                "10.0.0.0", "10.0.0.0/33", "10.0.0/8", "010.0.0.0/8", "10.0.0.0/08", "::/129", "fe80::%1/64",
                "example.com/8", "::ffff:10.0.0.0/104", "10.0.0.0/255.0.0.0", "1::2::3/8", "./8",
            )
        ),
        ("{nodeSelector: {a b: c}}", "nodeSelector"), ("{nodeSelector: {a: b c}}", "nodeSelector.a"),
        ("{nodeSelector: [a]}", "nodeSelector"),
        ("{tolerations: [{key: a, operator: Exists, value: b}]}", "tolerations[0].value"),
        ("{tolerations: [{value: b}]}", "tolerations[0].key"), ("{tolerations: [{key: a b}]}", "tolerations[0].key"),
        ("{tolerations: [{key: a, tolerationSeconds: 5}]}", "tolerations[0].tolerationSeconds"),
    ),
    "lifecycle": (("{queueName: team a}", "queueName"), ("{managedBy: kueue}", "managedBy")),
}  # fmt: skip
"""Block → texts that both doors refuse in an otherwise good manifest, each with the field to blame."""

GOOD_METADATA = (
    '{name: corpus, labels: {a: "010", b: "on", c: "1_000"}}',
    "{name: corpus, annotations: {note: übung 数}}",
    '{name: "1"}',
    "{name: corpus, labels: {a: }, annotations: }",
    "{name: " + "a" * 52 + "}",
    '{name: corpus, labels: {example.com/team: a.b_c-D, plain: ""}, annotations: {Example.com/X: any text}}',
    "{name: corpus, labels: {" + ", ".join(f"l{index}: x" for index in range(70)) + "}}",
    '{name: corpus, uid: 0f, generation: 2, creationTimestamp: "2026-01-01T00:00:00Z", managedFields: [], '
    "finalizers: [orbitrl.dev/artifact-cleanup], ownerReferences: []}",
)
BAD_METADATA = (
    ("{}", "name"),
    ("{name: corpus, owner: me}", "owner"),
    ('{name: ""}', "name"),
    ("{name: " + "a" * 53 + "}", "name"),
    ("{name: " + "a" * 64 + "}", "name"),
    *((f"{{name: {name}}}", "name") for name in ("Corpus", "a.b", "a_b", "übung", "a-", "-a")),
    ("{name: corpus, labels: {a b: c}}", "labels"),
    ("{name: corpus, annotations: {a/b/c: d}}", "annotations"),
    ("{name: corpus, annotations: {" + ", ".join(f"a{i}: {'x' * 65_000}" for i in range(5)) + "}}", "annotations"),
)
BAD_LABELS = {"b c": "metadata.labels", "b" * 64: "metadata.labels", "ü": "metadata.labels", "5": "", "true": ""}
"""Value → what the server blames: it cannot even read one that is no text."""
BAD_SCALARS = ("010", "0o17", "1_000", "0b11", "on", "1:30", "2026-01-01")
STATUS = """\
status:
  phase: Running
  step: 3
  conditions:
  - {type: Complete, status: "False", reason: Running, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
"""
HEAD = "apiVersion: orbitrl.dev/v1alpha1\nkind: OrbitRun\nmetadata: {name: corpus}\n"

OTHERS = (
    Case("with a status", manifest(top=STATUS)),
    Case("a mark and comments", f"# a comment\n---\n{manifest()}...\n"),
    Case("an alias", manifest(model="&m {uri: builtin://tiny-adder}", data="{prompts: [*m]}")),
    Case("an unknown field of the object", manifest(top="note: x\n"), ("note",)),
    Case("two unknown fields", manifest(a="1", adapter="{b: 1}"), ("spec.a", "spec.adapter.b")),
    Case("no spec", HEAD, ("spec",)),
    Case("a spec without a value", HEAD + "spec:\n", ("spec",)),
    Case("a list for the spec", HEAD + "spec: [1]\n", ("spec",)),
    Case(
        "a spec without blocks",
        HEAD + "spec: {}\n",
        ("spec.data", "spec.environment.rewards", "spec.model", "spec.training"),
        server=("spec.data", "spec.model", "spec.training"),
        why="the server holds nothing against its rules before every needed field is there",
    ),
    Case("a run that nothing scores", manifest(environment=""), ("spec.environment.rewards",)),
    Case("demonstrations need no environment", manifest(environment="", algorithm="{type: SFT}")),
    Case(
        "demonstrations need no room for an answer",
        manifest(environment="", algorithm="{type: SFT}", model="{uri: builtin://tiny-adder, maxSequenceLength: 128}"),
    ),
    Case(
        "demonstrations beside an engine's half of the GPUs",
        manifest(algorithm="{type: SFT}", rollout="{engine: SGLang}", placement="{layout: Split, gpus: 8}"),
        ("spec.placement.layout",),
    ),
    Case(
        "the best by an evaluation that is not there",
        manifest(
            checkpoint="{keepBest: {evaluation: other}}",
            evaluation="{everySteps: 2, environments: [{name: held-out, prompts: [{uri: held-out.jsonl}]}]}",
        ),
        ("spec.checkpoint.keepBest.evaluation",),
    ),
    Case(
        "the best by an evaluation",
        manifest(
            checkpoint="{keepBest: {evaluation: held-out, metric: PassAt, count: 2}}",
            evaluation="{everySteps: 2, environments: [{name: held-out, prompts: [{uri: held-out.jsonl}]}]}",
        ),
    ),
    *(
        Case(
            f"an end by {words}",
            manifest(
                training=f"{{steps: 9, stopWhen: {stop}}}",
                **{"evaluation": "{everySteps: 2, environments: [{name: held-out, prompts: [{uri: a}]}]}", **blocks},
            ),
            fields,
        )
        for words, stop, blocks, fields in (
            ("an evaluation", "{evaluation: held-out, metric: PassAt, atLeast: 0.9}", {}, ()),
            ("the first evaluation", "{withoutGainSteps: 4}", {}, ()),
            ("one that is not there", "{evaluation: a, atLeast: 1}", {}, ("spec.training.stopWhen.evaluation",)),
            ("nothing", "{evaluation: held-out}", {}, ("spec.training.stopWhen",)),
            ("both", "{atLeast: 1, withoutGainSteps: 4}", {}, ("spec.training.stopWhen",)),
            ("what is not measured", "{atLeast: 1}", {"evaluation": ""}, ("spec.training.stopWhen",)),
            *(
                (f"a loss, {each}", stop, {"algorithm": "{type: SFT}", "environment": "", "data": data}, fields)
                for each, stop, data, fields in (
                    ("held out", "{evaluation: held-out, atLeast: -0.4}", "{prompts: [{uri: a}], validation: {}}", ()),
                    ("not held out", "{atLeast: -0.4}", "{prompts: [{uri: a}]}", ("spec.training.stopWhen",)),
                    (
                        "of others",
                        "{evaluation: a, metric: PassAt, atLeast: 1}",
                        "{prompts: [{uri: a}], validation: {}}",
                        ("spec.training.stopWhen.evaluation", "spec.training.stopWhen.metric"),
                    ),
                )
            ),
        )
    ),
    Case("two adapters", manifest(adapter="{initFrom: a}", checkpoint="{resumeFrom: b}"), ("spec.adapter.initFrom",)),
    Case("a page to begin from", manifest(checkpoint="{resumeFrom: 'http://a/b'}"), ("spec.checkpoint.resumeFrom",)),
    Case("a password", manifest(storage="{uri: 's3://user:word@bucket'}"), ("spec.storage.uri",)),
    Case("the whole disk", manifest(storage="{uri: /}"), ("spec.storage.uri",)),
    Case("one slash", manifest(storage="{uri: 's3:/bucket'}"), ("spec.storage.uri",)),
    Case("an address of two lines", manifest(storage=r'{uri: "a\nb"}'), ("spec.storage.uri",)),
    Case("a webhook's password", manifest(observability="{notify: [{url: 'http://a:b@c'}]}"),
         ("spec.observability.notify[0].url",)),
    Case(
        "no stragglers", manifest(algorithm="{type: SFT}", rollout="{overSampling: 1}"), ("spec.rollout.overSampling",)
    ),
    Case(
        "dynamic sampling while later steps have begun",
        manifest(algorithm="{type: DAPO}", rollout="{maxStaleness: 1}"),
        ("spec.rollout.maxStaleness",),
    ),
    Case("later steps without it", manifest(algorithm="{type: OPO}", rollout="{maxStaleness: 1}")),
    Case("no YAML", manifest(training="{steps: 5"), ("",)),
    Case("a list", "[1]\n", ("",)),
    Case("nothing", "\n", ("",)),
    Case(
        "no room for a prompt",
        manifest(model="{uri: a, maxSequenceLength: 64}", rollout="{sampling: {maxNewTokens: 64}}"),
        ("spec.rollout.sampling.maxNewTokens",),
    ),
    *(
        Case(f"halves of {gpus} GPUs", manifest(placement=f"{{layout: Split, gpus: {gpus}}}", rollout=rollout), refused)
        for gpus, rollout, refused in (
            (2, "{engine: SGLang}", ()), (8, "{engine: SGLang, replicas: 2}", ()),
            (3, "{engine: SGLang}", ("spec.placement.gpus",)), (0, "{engine: SGLang}", ("spec.placement.gpus",)),
            (2, "{engine: SGLang, adapterTransport: File}", ()),
            (2, "{engine: SGLang, adapterTransport: SharedMemory}", ("spec.rollout.adapterTransport",)),
            (2, "{engine: Torch}", ("spec.placement.layout",)), (2, "{engine: Auto}", ("spec.placement.layout",)),
        )
    ),
    *(
        Case(f"a trainer on {name}", manifest(placement=f"{{layout: {name}}}", rollout="{engine: SGLang}"), refused)
        for name, refused in (
            ("Split, gpus: 8, trainerGpus: 1", ()), ("Split, gpus: 3, trainerGpus: 2", ()),
            ("Split, gpus: 4, trainerGpus: 4", ("spec.placement.trainerGpus",)),
            ("Colocated, gpus: 4, trainerGpus: 2", ("spec.placement.trainerGpus",)),
            ("Split, gpus: 1, trainerGpus: 1", ("spec.placement.gpus",)),
        )
    ),
    *(
        Case(f"two nodes, {name}", manifest(**{"placement": "{nodes: 2}", **blocks}), refused)
        for name, blocks, refused in (
            ("alone", {}, ()), ("on the CPU", {"placement": "{nodes: 2, gpus: 0}"}, ()),
            ("Split", {"placement": "{nodes: 2, layout: Split}"}, ("spec.placement.layout",)),
            ("trainerGpus", {"placement": "{nodes: 2, trainerGpus: 1}"}, ("spec.placement.trainerGpus",)),
            ("Torch", {"training": "{steps: 1, trainer: Torch}"}, ("spec.placement.nodes",)),
            ("Megatron", {"training": "{steps: 1, trainer: Megatron}", "rollout": "{engine: SGLang}"}, ()),
            ("whole", {"adapter": "{type: Full}"}, ("spec.placement.nodes",)),
            ("a queue", {"lifecycle": "{queueName: team}"}, ()),
        )
    ),
    Case(
        "a generated name",
        manifest(metadata="{generateName: corpus-}"),
        ("metadata.generateName", "metadata.name"),
        ("metadata.generateName",),
        "the server makes a name first",
    ),
    Case(
        "a megabyte of prompts inline",
        manifest(data="{prompts: [{uri: a, inline: '" + "12+34= " * 140_000 + "'}]}"),
        ("spec.data.prompts[0].inline",),
    ),
    Case(
        "a megabyte of prompts for a URI",
        manifest(data="{prompts: [{uri: '" + "12+34= " * 140_000 + "'}]}"),
        ("spec.data.prompts[0].uri",),
    ),
    Case("another version", manifest().replace("v1alpha1", "v2"), ("apiVersion",), ANY, NO_TYPE),
    Case("another kind", manifest().replace("OrbitRun", "Orbitrun"), ("kind",), ANY, NO_TYPE),
    Case("a key twice", manifest(training="{steps: 5, steps: 6}"), ("spec.training.steps",), ("",), NO_YAML),
    Case("two documents", f"{manifest()}---\n{manifest()}", ("",), (), "kubectl creates both"),
    Case(
        "a merge key",
        manifest(model="&m {uri: a}", data="{prompts: [{<<: *m}]}"),
        ("spec.data.prompts[0].<<", "spec.data.prompts[0].uri"),
        (),
        OWN_READING,
    ),
    Case("an unset variable", manifest(model="{uri: '${ORBIT_UNSET}'}"), ("spec.model.uri",), (), UNSET),
)  # fmt: skip


def hand_written() -> Iterator[Case]:
    """All of the above."""
    for block, texts in GOOD_BLOCKS.items():
        for text in texts:
            yield Case(f"{block}: {text}"[:80], manifest(**{block: text}))
    for block, mistakes in BAD_BLOCKS.items():
        for text, field in mistakes:
            yield Case(f"{block}: {text}"[:80], manifest(**{block: text}), (f"spec.{block}.{field}".rstrip("."),))
    for text in GOOD_METADATA:
        yield Case(f"metadata: {text}"[:80], manifest(metadata=text))
    for text, field in BAD_METADATA:
        yield Case(f"metadata: {text}"[:80], manifest(metadata=text), (f"metadata.{field}",))
    for text, by_server in BAD_LABELS.items():
        whole = manifest(metadata=f"{{name: corpus, labels: {{a: {text}}}}}")
        yield Case(f"label: {text}"[:80], whole, ("metadata.labels.a",), (by_server,), SERVER_NAMES_THE_MAP)
    for text in BAD_SCALARS:
        number = text.replace("_", "").isalnum() and text != "on"
        whole = manifest(training=f"{{steps: {text}}}")
        yield Case(f"scalar: {text}", whole, ("spec.training.steps",), () if number else None, OWN_READING)
    yield from OTHERS
