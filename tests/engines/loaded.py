"""A model that SGLang loads, with its real LoRA manager and Orbit's plug-in, on a CPU and without a server.

    PYTHONPATH=… <SGLang's python> tests/engines/loaded.py ASKED.json

For families whose attention SGLang computes on a GPU only: its model class, loader, LoRA manager, wrappers and slots
are the real ones; a batch is announced as the scheduler does, and single modules are asked for their outputs. Runs in
SGLang's own environment, as one process. `fake_kernels` has what stands in for attention.

Belongs here: loading, announcing a batch, asking modules. Does not belong here: any expectation.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(asked: dict[str, Any]) -> None:
    from orbit_runtime.sglang_plugin import activate, cpu
    from orbit_runtime.workers.servers.protocol import EXPERTS_VARIABLE, OFT_VARIABLE, VARIABLE

    os.environ.update({VARIABLE: "1", OFT_VARIABLE: str(asked["oft_block_size"]), EXPERTS_VARIABLE: asked["experts"]})
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", SGLANG_PLUGINS="orbit")
    # DeepSeek-V4's loader would compile the kernels of its hyper-connections.
    os.environ.update(SGLANG_OPT_USE_TILELANG_MHC_PRE="0")
    cpu.install()
    activate()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import torch
    from safetensors.torch import load_file, save_file

    from orbit_runtime.sglang_plugin.hooks import _facts

    torch.set_grad_enabled(False)
    runner = load_model(asked["arguments"])
    manager = runner.lora_manager
    told: dict[str, Any] = {"wrapped": wrapped(manager)}
    ids = {None: None} | {name: load(runner, name, folder) for name, folder in asked["adapters"].items()}
    batch = announce(manager, [(ids[name], count) for name, count in asked["batch"]])
    batch.window = getattr(runner.model_config.hf_config, "sliding_window", None)
    given = {name: x for name, x in load_file(asked["inputs"]).items() if name != "none"}
    computed = {name: call(runner, batch, name, x) for name, x in given.items()}
    told["facts"] = _facts(runner)
    save_file({name: y.contiguous().clone() for name, y in computed.items()}, asked["outputs"])
    Path(asked["told"]).write_text(json.dumps(told))


def load_model(arguments: list[str]) -> Any:
    """Loads a model as SGLang's own benchmark of one batch does, up to where attention's memory begins."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(arguments)
    ports = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    initialize_bf16_gemm_config()
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=ports.nccl_port)
    config = ModelConfig.from_server_args(server_args)
    if config.hf_config.model_type == "deepseek_v4":
        from tests.engines import fake_kernels

        fake_kernels.install()
    bootstrap.init_layer_runtime(model_config=config)
    return ModelRunner(
        model_config=config, mem_fraction_static=0.3, gpu_id=0, nccl_port=ports.nccl_port, server_args=server_args
    )


def wrapped(manager: Any) -> dict[str, str]:
    return {name: type(module).__name__ for modules in manager.lora_modules for name, module in modules.items()}


def load(runner: Any, name: str, folder: str) -> str:
    """Loads an adapter's folder through the manager; returns the id by which a batch names it."""
    from sglang.srt.lora.lora_registry import LoRARef

    reference = LoRARef(lora_name=name, lora_path=folder, pinned=False)
    result = runner.lora_manager.load_lora_adapter(reference)
    assert result.success, result.error_message
    return str(reference.lora_id)


def announce(manager: Any, sequences: list[tuple[str | None, int]]) -> Any:
    """A batch of prompts, each with its adapter's id or None."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lengths = [count for _, count in sequences]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, batch_size=len(sequences), lora_ids=[key for key, _ in sequences],
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32), extend_seq_lens_cpu=lengths,
        extend_num_tokens=sum(lengths), extend_logprob_start_lens_cpu=lengths, return_logprob=False,
        can_run_decode_cuda_graph=False, positions=torch.cat([torch.arange(count) for count in lengths]),
    )  # fmt: skip
    manager.fetch_new_loras(set(batch.lora_ids))
    manager.prepare_lora_batch(batch)
    return batch


def call(runner: Any, batch: Any, name: str, x: Any) -> Any:
    """A module's output.

    Of other kinds: `sent:<experts>` what they are handed, `packed:<experts>` what stands between their products under
    the plug-in's wrapper, `attention:<layer>` a layer's output over fake kernels.
    """
    from tests.engines import fake_kernels

    kind, _, module = name.rpartition(":")
    found = runner.model.get_submodule(module)
    if kind == "attention":
        return fake_kernels.attention(found, batch, x)
    if kind == "sent":
        return sent(found, x)
    if kind == "packed":
        return packed(runner.lora_manager, found.base_layer, x)
    # gpt-oss holds the output's weight in BF16 whatever the model's dtype is; nothing is lost.
    getattr(found, "base_layer", found).to(x.dtype)
    y = found(x)
    return y[0] if isinstance(y, tuple) else y


def sent(layer: Any, x: Any) -> Any:
    """The tokens as the experts' kernel gets them. Some blocks bring them quantised as well, from a stream of
    their own, which must be dropped and waited for."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    rows = len(x)
    routes = StandardTopKOutput(torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32), torch.zeros(rows, 8))
    waited: list[str] = []
    quantised = SimpleNamespace(x_q=x, x_sf=x, ready=SimpleNamespace(wait=lambda: waited.append("event")))
    dispatched = layer._dispatch_with_pre_quant(x, routes, quantised)
    assert dispatched.hidden_states_pre_quant is None
    assert waited == ["event"]
    return dispatched.hidden_states


def packed(manager: Any, layer: Any, x: Any) -> Any:
    """The plug-in's wrapper, as SGLang makes it where Marlin holds FP4 experts, over a fake of its two products."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod
    from sglang.srt.lora import layers
    from sglang.srt.lora.lora_moe_runner_marlin import MarlinLoraRunnerCore

    held, inner, width = layer.quant_method, layer.intermediate_size_per_partition, layer.hidden_size
    # On a CPU it is a module of its own, and torch lets no other object take its place.
    del layer.quant_method
    layer.quant_method = method = Mxfp4MarlinMoEMethod(None, "experts")
    layer.runner = method.runner = SimpleNamespace(runner_backend=MoeRunnerBackend.MARLIN)
    for name, size in (("w13_weight", width), ("w2_weight", inner)):
        setattr(layer, name, torch.nn.Parameter(torch.zeros(8, size // 16, 1), requires_grad=False))
        setattr(layer, f"{name}_scale", None)
    shared = {"experts_shared_outer_loras": True, "max_lora_rank": manager.max_lora_rank}
    wrapper = layers.get_lora_layer(layer, manager.lora_backend, **shared)
    core = wrapper._lora_runner.runner_core
    assert isinstance(core, MarlinLoraRunnerCore)
    assert isinstance(wrapper, layers.FusedMoEWithLoRA)
    assert wrapper.quant_method is layer.quant_method is method is not held

    def two_products(sent: Any, weights: Any, config: Any, hooks: Any) -> Any:
        assert weights.weight_bits == 4
        assert weights.w2_qweight is layer.w2_weight
        assert core.config.routed_scaling_factor is not None
        assert config.routed_scaling_factor is None
        between = sent.hidden_states[:, None, : 2 * inner].repeat(1, 2, 1)
        hooks.after_gate_up(sent.hidden_states, between, None, None)
        return StandardCombineInput(hidden_states=between.flatten(1))

    core.run_from_dispatch = two_products
    rows = len(x)
    routes = StandardTopKOutput(torch.ones(rows, 2), torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(rows, 8))
    # What SGLang builds where no adapter is active: its kernels need a GPU.
    idle = SimpleNamespace(max_lora_rank=manager.max_lora_rank, has_active_lora=False)
    return wrapper._forward_with_lora(x, routes, idle, pre_quant_input=None)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
