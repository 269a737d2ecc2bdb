"""Passes that are asked about, with hand-written stand-ins for SGLang's runner: no CUDA graph hides a layer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orbit_runtime.adapters.tensorfile import parse
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.sglang_plugin import taps, weights
from orbit_runtime.sglang_plugin.taps import without_graphs
from orbit_runtime.workers.servers.protocol import TAPS_VARIABLE, announce

TOKENS = [3, 1, 2]


class Model(nn.Module):
    """Names as SGLang's have them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(8, 4)
        self.model.norm = nn.LayerNorm(4)

    def forward(self, token_T: Tensor) -> Tensor:
        return self.model.norm(self.model.embed_tokens(token_T))  # type: ignore[operator,no-any-return]


class Graph:
    """As a recorded CUDA graph: its kernels run on static memory, and no Python does."""

    def __init__(self, model: Model) -> None:
        self._embed, self._norm = model.model.embed_tokens.weight, model.model.norm  # type: ignore[union-attr]

    def can_run_graph(self, batch: Any) -> bool:
        return len(batch.input_ids) <= 16

    def execute(self, batch: Any) -> Tensor:
        x = self._embed[batch.input_ids]
        return torch.layer_norm(x, (4,), self._norm.weight, self._norm.bias)  # type: ignore[arg-type]


@dataclass
class Runner:
    """The part of `ModelRunner` that chooses between graphs and modules (0.5.23: `_forward_raw`)."""

    model: Model
    decode_cuda_graph_runner: Graph | None = None
    prefill_cuda_graph_runner: Graph | None = None
    ways: list[str] = field(default_factory=list)
    lora_manager: Any = None

    def forward(self, batch: Any) -> Tensor:
        graphs = self.prefill_cuda_graph_runner
        if graphs is not None and graphs.can_run_graph(batch):
            self.ways.append("graph")
            return graphs.execute(batch)
        self.ways.append("modules")
        return self.model(batch.input_ids)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plug-in is asked, in a process with the little of SGLang that it looks at."""
    monkeypatch.setenv(TAPS_VARIABLE, str(tmp_path))
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    linears = dict.fromkeys(("ColumnParallelLinear", "RowParallelLinear"), type("Linear", (), {}))
    fakes = {
        "distributed": {"get_tp_group": lambda: alone},
        "distributed.utils": {"get_group_rank_size": lambda group: (0, 1)},
        "layers.linear": linears,
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", *(f"sglang.srt.{name}" for name in fakes)):
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(fakes.get(name.removeprefix("sglang.srt."), {}))
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


@pytest.fixture
def runner() -> Runner:
    model = Model()
    return Runner(model, Graph(model), Graph(model))


def batch_of(tokens: list[int], names: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        input_ids=torch.tensor(tokens), forward_mode=SimpleNamespace(is_extend=lambda: True),
        lora_ids=list(names), extend_seq_lens_cpu=[len(tokens)],
    )  # fmt: skip


def ask(folder: Path, name: str, request: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(request))
    announce(folder)


def answer(folder: Path) -> tuple[set[str], dict[str, Any]]:
    file, until = folder / taps.ANSWER.format(rank=0), time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    content = file.read_bytes()
    facts = parse_header(content, size=len(content), where="").metadata
    read = {name: value if name == "error" else json.loads(value) for name, value in facts.items()}
    return set(parse(content, where="")), read


def test_a_recorded_graph_runs_no_hook_and_without_graphs_every_hook_runs(runner: Runner) -> None:
    heard: list[str] = []
    runner.model.model.norm.register_forward_hook(lambda *_: heard.append("norm"))  # type: ignore[union-attr]
    runner.forward(batch_of(TOKENS))
    assert heard == []
    graphs = runner.prefill_cuda_graph_runner
    with without_graphs(runner):
        runner.forward(batch_of(TOKENS))
    with pytest.raises(IndexError), without_graphs(runner):
        runner.forward(batch_of([8]))
    assert heard == ["norm"]
    assert runner.prefill_cuda_graph_runner is graphs
    assert runner.decode_cuda_graph_runner is not None


def test_the_pass_that_is_asked_about_is_computed_by_modules_and_tells_every_point(
    runner: Runner, folder: Path
) -> None:
    request = {"token_ids": TOKENS, "adapter": None, "values": []}
    ask(folder, taps.REQUEST, request)
    for tokens in ([5, 5], TOKENS):
        taps.around_forward(Runner.forward, runner, batch_of(tokens))
    assert runner.ways == ["graph", "modules"]
    assert (folder / taps.SEEN.format(rank=0)).exists()
    told, facts = answer(folder)
    assert {"point:model.embed_tokens", "point:model.norm"} <= told
    assert facts["order"] == ["model.embed_tokens", "model.norm"]
    assert set(facts["parts"]) == {"model.embed_tokens.weight", "model.norm.weight", "model.norm.bias"}
    (folder / taps.REQUEST).unlink()
    announce(folder)
    taps.around_forward(Runner.forward, runner, batch_of(TOKENS))
    assert runner.ways[-1] == "graph"


def test_the_canarys_pass_is_computed_by_modules_once(runner: Runner, folder: Path) -> None:
    runner.lora_manager = SimpleNamespace(lora_refs={"key": SimpleNamespace(lora_name="policy-v1")})
    asked = {"name": "first", "token_ids": TOKENS, "adapters": ["policy-v1"], "standing": [], "seconds": 1}
    ask(folder, taps.FACTS_REQUEST, asked)
    for batch in (batch_of(TOKENS, ("other",)), batch_of(TOKENS, ("key",)), batch_of(TOKENS, ("key",))):
        taps.around_forward(Runner.forward, runner, batch)
        taps.tell(runner, batch, lambda *_: SimpleNamespace(own=dict, facts=lambda every: {}))
    assert runner.ways == ["graph", "modules", "graph"]


def test_what_cannot_be_told_is_said_in_the_answer_and_the_pass_goes_on(runner: Runner, folder: Path) -> None:
    """The request names an adapter of a server that has no LoRA manager."""
    ask(folder, taps.REQUEST, {"token_ids": TOKENS, "adapter": "policy-v1", "values": []})
    result = taps.around_forward(Runner.forward, runner, batch_of(TOKENS))
    assert torch.equal(result, runner.model(torch.tensor(TOKENS)))
    told, facts = answer(folder)
    assert (told, list(facts)) == (set(), ["error"])
    assert "AttributeError" in facts["error"]


def test_a_pass_looks_at_files_once_after_each_announcement_and_an_idle_one_at_none(
    runner: Runner, folder: Path
) -> None:
    def calls_of_a_pass() -> list[str]:
        calls: list[Any] = []
        sys.setprofile(lambda _, event, called: calls.append(called) if event == "c_call" else None)
        try:
            taps.around_forward(Runner.forward, runner, batch_of(TOKENS))
            taps.tell(runner, batch_of(TOKENS), lambda *_: SimpleNamespace())
        finally:
            sys.setprofile(None)
        return [each.__name__ for each in calls if each.__module__ in ("posix", "_io") or "_io." in repr(each)]

    assert "open" in calls_of_a_pass(), "the first maps the counter"
    assert calls_of_a_pass() == []
    ask(folder, taps.REQUEST, {"token_ids": [5, 5], "adapter": None, "values": []})
    assert "open" in calls_of_a_pass()
    assert calls_of_a_pass() == []
    (folder / taps.REQUEST).unlink()
    announce(folder)
    assert "open" in calls_of_a_pass()
    assert calls_of_a_pass() == []
    assert runner.ways == ["graph"] * 6


@pytest.mark.parametrize("columns", [1, 300, 512])
def test_a_layer_is_read_through_its_own_product(columns: int) -> None:
    """Exactly, in BF16 too: every sum is one value times 1."""
    kept = torch.randn(7, columns).bfloat16()
    made: Callable[[Tensor], Tensor] = lambda x: nn.functional.linear(x, kept)  # noqa: E731
    assert torch.equal(weights.dense(made, columns, dtype=torch.bfloat16, device="cpu"), kept)
