"""Facts from headers: a folder and a store say the same, mixed and broken checkpoints are told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.faulty_store import FakeClock, FaultyBackend

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import load_card
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.headers import BITS
from orbit_runtime.model_info.remote_checkpoint import store_facts
from orbit_runtime.model_info.weights import EXPERT, Weight
from orbit_runtime.storage import Store

SMALL = {
    "qwen3_moe": {
        "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "deepseek_v4": {
        **load_card("DeepSeek-V4-Flash")["config"], "vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 8, "q_lora_rank": 64, "n_routed_experts": 4, "moe_intermediate_size": 64,
        "compress_ratios": [0, 4, 128, 0], "head_dim": 64, "o_groups": 2, "o_lora_rank": 32, "hc_mult": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16,
    },
}  # fmt: skip

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors_of(weight: Weight, form: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes that a format writes for a weight, by the formats' own descriptions."""
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (0, 0)
    for expert in range(weight.count) if EXPERT in weight.name else (0,):
        name = weight.name.replace(EXPERT, str(expert))
        module = name.removesuffix(".weight")
        lead = (weight.count,) if weight.count > 1 and EXPERT not in weight.name else ()
        if form == "INT4":
            yield f"{module}.weight_packed", "I32", (rows, columns // 8)
            yield f"{module}.weight_scale", "BF16", (rows, columns // 32)
            yield f"{module}.weight_shape", "I32", (2,)
        elif form == "NVFP4":
            yield name, "U8", (rows, columns // 2)
            yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
            yield f"{module}.weight_scale_2", "F32", ()
            yield f"{module}.input_scale", "F32", ()
        elif form == "FP8":
            yield name, "F8_E4M3", (rows, columns)
            yield f"{module}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
        elif form == "V4-FP8":
            yield name, "F8_E4M3", (rows, columns)
            yield f"{module}.scale", "F8_E8M0", (-(-rows // 128), -(-columns // 128))
        elif form == "V4-FP4":
            yield name, "I8", (rows, columns // 2)
            yield f"{module}.scale", "F8_E8M0", (rows, columns // 32)
        elif form == "blocks":
            yield f"{module}_blocks", "U8", (*lead, rows, columns // 32, 16)
            yield f"{module}_scales", "U8", (*lead, rows, columns // 32)
        else:
            yield name, weight.dtype, (*lead, *weight.shape)


def write_model(folder: Path, config: dict, forms: dict[str, str], *, shards: int = 1) -> int:
    """A checkpoint whose tensors are zeros; `forms` by role. Returns the bytes of all tensors."""
    tensors: Tensors = {}
    for weight in describe(config).weights:
        form = forms.get(weight.role, "plain") if weight.is_linear else "plain"
        for name, dtype, shape in tensors_of(weight, form):
            tensors[name] = (dtype, shape)
    names = sorted(tensors)
    parts = [names[index::shards] for index in range(shards)]
    total, weight_map = 0, {}
    for index, part in enumerate(parts):
        file = "model.safetensors" if shards == 1 else f"model-{index + 1:05}-of-{shards:05}.safetensors"
        header, position = {}, 0
        for name in part:
            dtype, shape = tensors[name]
            size = BITS[dtype] // 8
            for each in shape:
                size *= each
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + bytes(position))
        total += position
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def open_memory(folder: Path) -> tuple[Store, FaultyBackend]:
    backend, clock = FaultyBackend(), FakeClock()
    for path in folder.iterdir():
        backend.inner.put(path.name, path.read_bytes())
    store = Store(
        backend, "s3://bucket/model", root=None, deadline_seconds=10, clock=clock, sleep=clock.sleep, monotonic=clock
    )
    return store, backend


@pytest.mark.parametrize(
    ("family", "forms", "precision"),
    [
        ("qwen3_moe", {}, "BF16"),
        ("qwen3_moe", dict.fromkeys(("attention", "routed_expert"), "FP8"), "FP8"),
        ("qwen3_moe", {"routed_expert": "INT4"}, "INT4"),
        ("qwen3_moe", dict.fromkeys(("attention", "routed_expert"), "NVFP4"), "NVFP4"),
        ("deepseek_v4", {"attention": "V4-FP8", "shared_expert": "V4-FP8", "routed_expert": "V4-FP4"}, "MXFP4"),
        ("deepseek_v4", {"attention": "V4-FP8", "shared_expert": "V4-FP8", "routed_expert": "V4-FP8"}, "FP8"),
        ("gpt_oss", {"routed_expert": "blocks"}, "MXFP4"),
    ],
)
def test_a_checkpoint_is_understood_by_its_headers_alone(
    tmp_path: Path, family: str, forms: dict[str, str], precision: str
) -> None:
    total = write_model(tmp_path, SMALL[family], forms, shards=3)
    facts = folder_facts(tmp_path)
    assert facts.precision == precision
    assert facts.checkpoint_bytes == facts.num_bytes() == total
    assert facts.unknown == ()
    assert {w.weight.name for w in facts.weights} == {w.name for w in describe(SMALL[family]).weights}


def test_a_store_and_a_folder_say_the_same_and_only_headers_are_read(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {"routed_expert": "INT4"}, shards=2)
    store, backend = open_memory(tmp_path)
    from_store, from_folder = store_facts(store), folder_facts(tmp_path)
    assert from_store.weights == from_folder.weights
    read = [key for call, key in backend.calls if call == "get"]
    assert sorted(read) == ["config.json", "model.safetensors.index.json"]
    assert [key for call, key in backend.calls if call == "get_range"] == sorted(
        path.name for path in tmp_path.glob("*.safetensors")
    )


def test_a_header_longer_than_the_first_read_is_read_on(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {})
    store, backend = open_memory(tmp_path)
    assert store_facts(store, first_read=64).weights == folder_facts(tmp_path).weights
    assert [call for call, _ in backend.calls].count("get_range") == 2


def test_the_shipped_models_are_understood() -> None:
    packed = folder_facts(builtin_folder("tiny-adder", "INT4"))
    plain = folder_facts(builtin_folder("tiny-adder", "BF16"))
    assert (packed.precision, plain.precision) == ("INT4", "BF16")
    assert packed.num_bytes() < plain.num_bytes()


def point_to(folder: Path, file: object) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {})
    config = {**SMALL["qwen3_moe"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks \d+ weights of a qwen3_moe, such as model\.layers\.2"):
        folder_facts(tmp_path)


def test_tensors_that_the_family_does_not_know_are_counted_and_named(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {})
    fewer = {**SMALL["qwen3_moe"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fewer))
    facts = folder_facts(tmp_path)
    assert facts.unknown[0].startswith("model.layers.1.")
    assert facts.num_bytes() == facts.checkpoint_bytes


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").write_text('{"a": ' * 100000), "nested too deeply"),
        (lambda f: (f / "config.json").write_text('{"a": ' + "1" * 5000 + "}"), "a number of thousands of digits"),
        (lambda f: (f / "config.json").write_text('{"a": {"rms_norm_eps": NaN}}'), "rms_norm_eps is nan, not a finite"),
        (lambda f: (f / "config.json").write_text('{"a": [1e999]}'), r"a\[0\] is inf"),
        (lambda f: (f / "config.json").write_text('{"model_type": [[]]}'), "model_type is not a name"),
        (
            lambda f: (f / "config.json").write_text('{"num_hidden_layers": 10000000}'),
            "is 10,000,000; no model has more",
        ),
        (lambda f: point_to(f, 3), "the index has no weight_map"),
        (lambda f: point_to(f, "../other.safetensors"), "outside of the model's folder"),
        (lambda f: point_to(f, "/elsewhere/other.safetensors"), "outside of the model's folder"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12"), "too few"),
    ],
)
def test_a_broken_checkpoint_is_one_error_wherever_it_lies(tmp_path: Path, break_it: object, says: str) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {})
    break_it(tmp_path)  # type: ignore[operator]
    with pytest.raises(ModelError, match=says):
        folder_facts(tmp_path)
    store, _ = open_memory(tmp_path)
    with pytest.raises(ModelError, match=says):
        store_facts(store)


def test_a_store_without_a_shard_names_it(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {}, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    store, _ = open_memory(tmp_path)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        store_facts(store)
