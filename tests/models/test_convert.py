"""`orbit convert`: what it writes is what the codecs make of whole weights, other libraries load it, and nothing that
interrupts it leaves something that looks like a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints import target as targets
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.destination import file_digest
from orbit_runtime.checkpoints.target import Target, build_target
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import ModelError, OutputError, StorageError, UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.quantization import PRECISIONS
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.formats import FORMATS
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import load_reference, make_checkpoint, reference_logprobs

ROOT = Path(__file__).resolve().parents[2]
PACKED = [layout for layout in targets.WRITABLE if layout != "BF16"]
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Captured = pytest.CaptureFixture[str]


def quiet(done: int, total: int, what: str) -> None:
    pass


def target_of(layout: str) -> Target:
    return build_target(PRECISIONS[layout], layout, None, ())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def digests(folder: Path) -> dict[str, str]:
    """Of all but `conversion.json`, which names the source."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != "conversion.json"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that take several runs of rows, the last one partial in every block size; head and embedding apart."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 512, "intermediate_size": 1088, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 72, "tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every weight in whole blocks of 128: transformers' fp8 reader refuses a partial one."""
    folder = tmp_path_factory.mktemp("even")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def expected(layout: str, dense: dict[str, torch.Tensor], modules: list[str]) -> dict[str, torch.Tensor]:
    """By the codec on whole weights; NVFP4 with one global for projections that engines fuse."""
    codec, made = FORMATS[layout], {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        named: dict[str, Any] = {}
        if PRECISIONS[layout] == "NVFP4":
            members = next((group for group in FUSED if leaf in group), (leaf,))
            named = {"amax": max(dense[f"{parent}.{member}.weight"].float().abs().max() for member in members)}
        group = (32,) if layout.startswith("INT4") else ()
        assert codec.quantize is not None
        assert codec.to_checkpoint is not None
        weight = codec.quantize(dense[f"{module}.weight"].float(), *group, **named)
        made |= {f"{module}.{name}": tensor for name, tensor in codec.to_checkpoint(weight).items()}
    return made


@pytest.mark.parametrize("layout", PACKED)
def test_the_written_tensors_are_those_of_the_codec_on_whole_weights(tmp_path: Path, wide: Path, layout: str) -> None:
    result = convert(wide, tmp_path / "out", target_of(layout), show=quiet)
    dense, written = tensors_of(wide), tensors_of(tmp_path / "out")
    assert len(result.modules) == 7
    computed = expected(layout, dense, list(result.modules))
    copied = {n: t for n, t in dense.items() if n.removesuffix(".weight") not in result.modules}
    assert written.keys() == computed.keys() | copied.keys()
    for name, tensor in (computed | copied).items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(in_bytes(written[name]), in_bytes(tensor)), name
    codec = FORMATS[layout]
    for module, error in result.modules.items():
        w = dense[f"{module}.weight"].double()
        back = codec.dequantize(codec.from_checkpoint(written, module), torch.float32).double()
        assert error["relative_rms"] == pytest.approx(float((back - w).norm() / w.norm()), rel=1e-5)
        assert error["max_error"] == pytest.approx(float((back - w).abs().max()), rel=1e-5)
        # The tiny model's weights are drawn from a normal distribution.
        assert result.normal_rms == pytest.approx(error["relative_rms"], rel=0.25)


NOT_ON_A_CPU = ("FP8BlockCT",)
"""Layouts of which transformers makes no model that runs on a CPU: compressed-tensors reads them module by module."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checkpoint_of_more_bits_is_rounded_once_by_a_conversion_that_a_run_names(
    tmp_path: Path, even: Path, dtype: torch.dtype
) -> None:
    wide, out = shutil.copytree(even, tmp_path / "wide"), tmp_path / "out"
    made = {name: (tensor.float() * 1.0007).to(dtype) for name, tensor in tensors_of(even).items()}
    for path in wide.glob("*.safetensors*"):
        path.unlink()
    save_file(made, wide / "model.safetensors", {"format": "pt"})
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    assert run_command(["convert", str(wide), str(out), "--precision", "BF16"]) == 0
    matrices = {name: tensor for name, tensor in tensors_of(out).items() if tensor.ndim == 2}
    assert matrices
    assert all(torch.equal(tensor, made[name].bfloat16()) for name, tensor in matrices.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert orbit_logprobs(out).isfinite().all()
    with pytest.raises(ModelError, match="expected a bfloat16 matrix"):
        orbit_logprobs(wide)
    assert run_command(["convert", str(out), str(tmp_path / "again"), "--precision", "BF16"]) == 64
    assert run_command(["convert", str(out), str(tmp_path / "packed"), "--precision", "INT4"]) == 0


@pytest.mark.parametrize("layout", ["INT4", "MXFP4"])
def test_a_weight_that_would_be_read_back_as_infinite_is_refused(tmp_path: Path, even: Path, layout: str) -> None:
    large, name = shutil.copytree(even, tmp_path / "large"), "model.layers.0.mlp.up_proj.weight"
    tensors = tensors_of(even)
    tensors[name][0, 0] = -3.3e38
    for path in large.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}: {layout} cannot hold values as large as 3\.3e\+38") as caught:
        convert(large, tmp_path / "out", target_of(layout), show=quiet)
    assert caught.value.exit_code == 66


def test_where_blocks_do_not_divide_rows_have_scales_and_it_is_said(tmp_path: Path, capsys: Captured) -> None:
    source = str(shutil.copytree(builtin_folder("tiny-adder", "BF16"), tmp_path / "model"))
    assert run_command(["convert", source, str(tmp_path / "out"), "--precision", "FP8"]) == 0
    said = capsys.readouterr().out
    told = ("blocks of 128 x 128 do not divide", "every row has a scale of its own", "near that is as good as can be")
    assert [words for words in told if words not in said] == []
    read_by_transformers(tmp_path / "out", "FP8")
    torch.testing.assert_close(orbit_logprobs(tmp_path / "out"), orbit_logprobs(tmp_path / "model"), rtol=0, atol=0.5)
    asked = ["convert", source, str(tmp_path / "blocks"), "--precision", "FP8", "--layout", "FP8Block"]
    assert run_command(asked) == 0
    assert "other programs may refuse them" in capsys.readouterr().out
    block = json.loads((tmp_path / "blocks" / "config.json").read_text())["quantization_config"]
    assert block["weight_block_size"] == [128, 128]


def read_by_transformers(folder: Path, layout: str) -> PreTrainedModel:
    settings = FineGrainedFP8Config if layout == "FP8Block" else CompressedTensorsConfig
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=settings(dequantize=True)
    ).float()


def read_by_compressed_tensors(folder: Path, source: Path, modules: Iterable[str]) -> PreTrainedModel:
    """By the configuration that was written, too; what is not quantised is the source's."""
    model, written = load_reference(source), tensors_of(folder)
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(block).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    for module in modules:
        prefix = f"{module}."
        parts = {name.removeprefix(prefix): each for name, each in written.items() if name.startswith(prefix)}
        if block["format"] == "float-quantized":
            # Its compressor guesses blocks from the scales' shape, and takes one block of columns for channels.
            dense = dequantize(parts["weight"], parts["weight_scale"], args=scheme.weights)
        else:
            dense = compressor.decompress(parts, scheme)["weight"]
        model.get_submodule(module).weight.data = dense.float()
    return model


@pytest.mark.parametrize("layout", [each for each in PACKED if each != "NVFP4ModelOpt"])
def test_transformers_gives_orbits_log_probs_for_what_was_written(tmp_path: Path, even: Path, layout: str) -> None:
    """Its own readers, or compressed-tensors', on the CPU. There is none for ModelOpt's files."""
    folder = tmp_path / "out"
    result = convert(even, folder, target_of(layout), show=quiet, shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    if layout in NOT_ON_A_CPU:
        model = read_by_compressed_tensors(folder, even, result.modules)
    else:
        model = read_by_transformers(folder, layout)
    theirs, codec, written = dict(model.named_parameters()), FORMATS[layout], tensors_of(folder)
    for module in result.modules:
        # compressed-tensors leaves fp32 products as they are; Orbit, as engines do, rounds them to BF16.
        rounded = theirs[f"{module}.weight"].detach().bfloat16()
        assert torch.equal(in_bytes(rounded), in_bytes(codec.dequantize(codec.from_checkpoint(written, module))))
        theirs[f"{module}.weight"].data.copy_(rounded)
    expected_T = reference_logprobs(model.eval(), TOKENS)
    torch.testing.assert_close(orbit_logprobs(folder), expected_T, rtol=0, atol=2e-4)


def orbit_logprobs(folder: Path) -> torch.Tensor:
    policy = load_policy(folder, AdapterConfig(type="LoRA", targets=("q_proj",)))
    with torch.no_grad():
        return policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))[0]


@pytest.mark.parametrize("precision", ["INT4", "FP8", "NVFP4", "MXFP4"])
def test_unpacking_to_bf16_is_exact(tmp_path: Path, precision: str) -> None:
    source = builtin_folder("tiny-adder", precision)
    result = convert(source, tmp_path / "out", Target("BF16"), show=quiet)
    written = tensors_of(tmp_path / "out")
    packed, policy = tensors_of(source), load_policy(source, AdapterConfig(type="LoRA", targets=("q_proj",)))
    for module, error in result.modules.items():
        codec = FORMATS[policy.model.get_submodule(f"{module}.base" if "q_proj" in module else module).format]
        whole = codec.dequantize(codec.from_checkpoint(packed, module))
        assert torch.equal(written[f"{module}.weight"].view(torch.int16), whole.view(torch.int16))
        assert error["relative_rms"] == error["max_error"] == 0
    if precision == "INT4":
        shipped = tensors_of(builtin_folder("tiny-adder", "BF16"))
        assert all(torch.equal(written[name], tensor) for name, tensor in shipped.items())
    torch.testing.assert_close(orbit_logprobs(tmp_path / "out"), orbit_logprobs(source), rtol=0, atol=1e-5)


def test_head_embedding_norms_and_what_the_user_names_stay_and_are_listed(tmp_path: Path, wide: Path) -> None:
    target = build_target("INT4", None, 128, ["o_proj", r"re:.*k_proj$"])
    source = tmp_path / "source"
    shutil.copytree(wide, source)
    with pytest.raises(UnsupportedError, match="1088 columns are not a multiple of the group of 128") as caught:
        convert(source, tmp_path / "out", target, show=quiet)
    assert "--ignore 're:.*down_proj$'" in str(caught.value)
    target = build_target("INT4", None, 64, ["o_proj", r"re:.*k_proj$"])
    result = convert(source, tmp_path / "out", target, show=quiet)
    assert sorted(name.rpartition(".")[2] for name in result.modules) == [
        "down_proj", "gate_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.k_proj"} <= set(block["ignore"])
    assert block["config_groups"]["group_0"]["weights"]["group_size"] == 64
    dense, written = tensors_of(wide), tensors_of(tmp_path / "out")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(written[name], dense[name])


def test_a_tied_embedding_is_written_once(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3")
    convert(source, tmp_path / "out", target_of("INT4"), show=quiet)
    names = tensors_of(tmp_path / "out").keys()
    assert "model.embed_tokens.weight" in names
    assert not [name for name in names if name.startswith("lm_head")]
    load_policy(tmp_path / "out", AdapterConfig(type="LoRA", targets=("q_proj",)))


KILLED = """
import os, signal, sys
from pathlib import Path
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
def show(done, total, what):
    if done >= total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), Target("INT4", 32), show=show, shard_bytes=20_000)
"""


@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_a_killed_conversion_is_no_checkpoint_and_continues_to_the_same_bytes(tmp_path: Path, share: float) -> None:
    source, out, alone = make_checkpoint(tmp_path / "source", "llama"), tmp_path / "out", tmp_path / "alone"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(out), str(share)], cwd=ROOT, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (out / "config.json").exists()
    with pytest.raises(ModelError, match="not finished"):
        load_policy(out, AdapterConfig(type="LoRA", targets=("q_proj",)))
    assert run_command(["inspect", str(out)]) == 66
    assert run_command(["serve", "--model", str(out)]) == 66
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoConfig.from_pretrained(out)
    again = convert(source, out, Target("INT4", 32), show=quiet, shard_bytes=20_000)
    whole = convert(source, alone, Target("INT4", 32), show=quiet, shard_bytes=20_000)
    assert digests(out) == digests(alone)
    assert again.modules == whole.modules
    assert (again.reused > 0) == (share > 0.5)
    third = convert(source, out, Target("INT4", 32), show=quiet, shard_bytes=20_000)
    assert third.reused == third.files, "nothing is done twice"


def test_a_shard_that_was_damaged_meanwhile_is_written_again(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "llama"), tmp_path / "out"

    def stop(done: int, total: int, what: str) -> None:
        if done >= total * 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, Target("INT4", 32), show=stop, shard_bytes=20_000)
    first = min(out.glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    convert(source, out, Target("INT4", 32), show=quiet, shard_bytes=20_000)
    convert(source, tmp_path / "alone", Target("INT4", 32), show=quiet, shard_bytes=20_000)
    assert digests(out) == digests(tmp_path / "alone")


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    convert(builtin_folder("tiny-adder", "BF16"), out, Target("INT4", 32), show=quiet)
    before = digests(out)
    with pytest.raises(OutputError, match="another conversion"):
        convert(builtin_folder("tiny-adder", "BF16"), out, Target("MXFP4", 32), show=quiet)
    assert digests(out) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert run_command(["convert", "builtin://tiny-adder", str(tmp_path / "full"), "--precision", "FP8"]) == 73
    assert "thesis.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["builtin://tiny-adder", "--precision", "INT3"], 64, "not a precision"),
        (["builtin://tiny-adder", "--precision", "MXFP4", "--group-size", "64"], 64, "no group size"),
        (["builtin://tiny-adder", "--precision", "INT4", "--group-size", "12"], 64, "cannot be packed"),
        (["builtin://tiny-adder", "--precision", "FP8", "--layout", "FP8BlockV4"], 64, "not a layout of FP8"),
        (["builtin://tiny-adder", "--precision", "INT4", "--ignore", "re:("], 64, "not a regular expression"),
        (["builtin://tiny-adder", "--precision", "INT4", "--ignore", "re:.*"], 78, "no module is left"),
        (["builtin://tiny-adder", "--precision", "INT4", "--ignore", "gate"], 64, "`gate` is no module of this model"),
        (["no/such/folder", "--precision", "INT4"], 66, "does not exist"),
        (["s3://bucket/model", "--precision", "INT4"], 66, "not on this machine"),
        (["int4", "--precision", "FP8"], 78, "round twice"),
        (["bf16", "--precision", "BF16"], 64, "BF16 already"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_sentence(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for precision in ("INT4", "BF16"):
        shutil.copytree(builtin_folder("tiny-adder", precision), tmp_path / precision.lower())
    source, *options = arguments
    assert run_command(["convert", source, "out", *options]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not Path("out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_it_before_and_during_and_more_room_continues_it(small_disk: Path, wide: Path) -> None:
    with pytest.raises(StorageError, match="still to be written"):
        convert(wide, small_disk / "out", Target("FP8"), show=quiet, shard_bytes=400_000)

    def fill(done: int, total: int, what: str) -> None:
        """Somebody else fills the disk once the conversion has begun."""
        if done > total * 0.4 and not (small_disk / "theirs").exists():
            room = shutil.disk_usage(small_disk).free
            (small_disk / "theirs").write_bytes(bytes(max(0, room - 4096)))

    subprocess.run(["mount", "-o", "remount,size=6m", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="no space is left") as caught:
        convert(wide, small_disk / "out", Target("FP8"), show=fill, shard_bytes=400_000)
    assert caught.value.exit_code == 74
    assert not (small_disk / "out" / "config.json").exists()
    (small_disk / "theirs").unlink()
    result = convert(wide, small_disk / "out", Target("FP8"), show=quiet, shard_bytes=400_000)
    assert result.reused > 0


MEMORY = """
import sys, torch
from pathlib import Path
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import build_target
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
small, big, out = map(Path, sys.argv[1:4])
target = build_target(sys.argv[4], None, None, ())
convert(small, out / "small", target, show=lambda *_: None)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
convert(big, out / "big", target, show=lambda *_: None)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["INT4", "FP8", "NVFP4"])
def test_peak_memory_stays_below_one_layer_in_bf16(tmp_path: Path, precision: str) -> None:
    small = make_checkpoint(tmp_path / "small", "llama")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 128}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    model.save_pretrained(tmp_path / "big")
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    arguments = [str(tmp_path / "small"), str(tmp_path / "big"), str(tmp_path / "out"), precision]
    assert small.is_dir()
    ended = subprocess.run([sys.executable, "-c", MEMORY, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    peak = int(ended.stdout)
    print(f"{precision}: peak {peak / 2**20:.1f} MiB above the start, a layer is {layer / 2**20:.1f} MiB")
    assert peak <= layer * 1.05
    assert layer > 30 * 2**20


def test_experts_in_one_tensor_are_unpacked_and_not_packed_again(tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, "gpt_oss", "MXFP4GptOss")
    convert(packed, tmp_path / "bf16", target_of("BF16"), show=quiet)
    made, wanted = tensors_of(tmp_path / "bf16"), tensors_of(plain)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    load_reference(tmp_path / "bf16")
    with pytest.raises(UnsupportedError, match="in one tensor, which Orbit writes in BF16 only"):
        convert(packed, tmp_path / "int4", target_of("INT4"), show=quiet)
    assert not (tmp_path / "int4").exists()
