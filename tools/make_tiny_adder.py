"""Makes `builtin://tiny-adder`: a Qwen3 small enough to ship, which adds two-digit numbers right one time in four.

Belongs here: its tokenizer, its supervised training, its packing (by compressed-tensors, not by our codecs), its
digests. Does not belong here: reading it back (`orbit_runtime.model_info.builtin_models`).

    python tools/make_tiny_adder.py            write all folders and digests.json
    python tools/make_tiny_adder.py --repack   make FP8, NVFP4 and MXFP4 from the shipped BF16 variant; no training
    python tools/make_tiny_adder.py --check    make it again elsewhere and compare every byte with what is shipped

Two phases. *Knowing*: exact answers, until the most likely answer is nearly always right. *Doubting*: labels that are
right only in some draws and otherwise off by a small error, with every linear fake-quantised to INT4, so that samples
become as unsure as the labels. Reinforcement learning then has something to find in a minute on two cores.

The BF16 variant holds exactly the values that the INT4 variant decompresses to: one policy in two formats. FP8, NVFP4
and MXFP4 are that BF16 variant quantised once more, so each is a slightly other policy.

Same bits again: one thread, deterministic algorithms, local generators. Kinds of CPU differ in the last bit of a matrix
product, so on another kind `--check` may name the two weight files; the other files are the same everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import Qwen3Config, Qwen3ForCausalLM

BUILTIN = Path(__file__).resolve().parent.parent / "orbit_runtime" / "model_info" / "builtin"
NAME = "tiny-adder"
GROUP = 32
BLOCK = 128
REPACKED = ("fp8", "mxfp4", "nvfp4")
SPECIAL = ("<|pad|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
CHARACTERS = "\t\n" + "".join(chr(code) for code in range(32, 127))
PAD, END, USER, ASSISTANT = 0, 1, 3, 4
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|assistant|>' -}}\n"
    "{%- endif -%}\n"
)
MAX_NEW_TOKENS = 4


@dataclass(frozen=True)
class Phase:
    """One stretch of supervised training."""

    steps: int
    learning_rate: float
    right_share: float
    """Share of labels that are the right answer."""
    quantised: bool


KNOWING = Phase(steps=350, learning_rate=3e-3, right_share=1.0, quantised=False)
DOUBTING = Phase(steps=120, learning_rate=1e-3, right_share=0.45, quantised=True)
BATCH = 192
ERRORS = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""What a wrong label is off by: a digit, a forgotten carry, both."""


def model_config() -> dict[str, Any]:
    """`config.json` of the BF16 variant, in the fields a published Qwen3 has."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "max_window_layers": 4,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
    }


def weight_arguments() -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)


def quantization_config() -> dict[str, Any]:
    """The `quantization_config` block of the INT4 variant, in the words of published W4A16 checkpoints."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def float4_arguments(variant: str) -> QuantizationArgs:
    if variant == "nvfp4":
        return QuantizationArgs(
            num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
        )
    return QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)


def repacked_config(variant: str) -> dict[str, Any]:
    """`quantization_config` of the variants made from BF16, in the words of published checkpoints."""
    if variant == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if variant == "nvfp4" else "group",
        "group_size": 16 if variant == "nvfp4" else 32,
        "scale_dtype": "torch.float8_e4m3fn" if variant == "nvfp4" else "torch.uint8",
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return quantization_config() | {"format": f"{variant}-pack-quantized", "config_groups": {"group_0": group}}


def build_tokenizer() -> Tokenizer:
    """One token per printable ASCII character; the roles and the end of a message are single special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>", fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": {},
        "model_max_length": 2048,
        "pad_token": "<|pad|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|unk|>",
    }


def build_model(generator: torch.Generator) -> Qwen3ForCausalLM:
    """Random weights from `generator` only; norms at one."""
    config = Qwen3Config(**{**model_config(), "dtype": "float32"}, attn_implementation="sdpa")
    with torch.random.fork_rng():
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = 0.02 if "embed" in name else 1.0 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def character_ids(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def build_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """All 8,100 prompts as ids `[8100, 9]`, and answers 0..219 as ids `[220, 4]`, ended and padded."""
    prompts = [
        [USER, *character_ids(f"{left}+{right}="), END, ASSISTANT]
        for left in range(10, 100)
        for right in range(10, 100)
    ]
    answers = [(character_ids(str(value)) + [END] + [PAD] * 3)[:MAX_NEW_TOKENS] for value in range(220)]
    return torch.tensor(prompts), torch.tensor(answers)


def sums() -> torch.Tensor:
    """The right answer of each prompt, in the order of `build_tables`."""
    return (torch.arange(10, 100)[:, None] + torch.arange(10, 100)[None, :]).reshape(-1)


def fake_quantised(weight: torch.Tensor) -> torch.Tensor:
    """Values as INT4 will hold them, gradient straight through; the arithmetic of `packed`, checked there."""
    grouped = weight.view(weight.shape[0], -1, GROUP)
    scale = (grouped.detach().abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    codes = (grouped.detach() / scale).round().clamp(-8, 7)
    values = (codes * scale).bfloat16().float().view_as(weight)
    return weight + (values - weight).detach()


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name


def as_shipped(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with the rounding of its file: INT4 for linears, BF16 for the rest."""
    return fake_quantised(parameter) if is_quantised(name, parameter) else parameter.bfloat16().float()


def train_phase(model: Qwen3ForCausalLM, phase: Phase, generator: torch.Generator) -> None:
    prompts, answers = build_tables()
    right = sums()
    errors = torch.tensor(ERRORS)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(phase.steps):
        warmup = min(1.0, (step + 1) / 50)
        decay = 0.5 * (1 + math.cos(math.pi * step / phase.steps))
        optimizer.param_groups[0]["lr"] = phase.learning_rate * warmup * decay
        rows = torch.randint(len(prompts), (BATCH,), generator=generator)
        wrong = torch.rand(BATCH, generator=generator) >= phase.right_share
        error = errors[torch.randint(len(errors), (BATCH,), generator=generator)]
        labels = answers[right[rows] + torch.where(wrong, error, 0)]
        tokens = torch.cat([prompts[rows], labels[:, :-1]], dim=1)
        weights = parameters
        if phase.quantised:
            weights = {name: as_shipped(name, parameter) for name, parameter in parameters.items()}
        call = {"input_ids": tokens, "use_cache": False, "logits_to_keep": MAX_NEW_TOKENS}
        logits = torch.func.functional_call(model, weights, (), call).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"  step {step + 1:5d} of {phase.steps}  loss {loss.item():.4f}", flush=True)


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight_packed`, `weight_scale`, `weight_shape` of one linear, by compressed-tensors itself."""
    arguments = weight_arguments()
    grouped = weight.view(weight.shape[0], -1, GROUP)
    scale, zero_point = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    parts = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero_point.to(torch.int8)}
    return {name: tensor.contiguous() for name, tensor in PackedQuantizationCompressor.compress(parts, scheme).items()}


def build_variants(model: Qwen3ForCausalLM) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of both checkpoints, under their Hugging Face names."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weight_arguments())
    bf16: dict[str, torch.Tensor] = {}
    int4: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if not is_quantised(name, tensor):
            bf16[name] = int4[name] = tensor.bfloat16()
            continue
        parts = packed(tensor)
        bf16[name] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"].bfloat16().contiguous()
        assert torch.equal(bf16[name].float(), fake_quantised(tensor).bfloat16().float()), name
        int4.update({name.removesuffix("weight") + part: value for part, value in parts.items()})
    return {"bf16": bf16, "int4": int4}


def repacked(weight: torch.Tensor, variant: str) -> dict[str, torch.Tensor]:
    """Tensors of one linear in FP8 (blocks as DeepSeek and Qwen3 publish them), NVFP4 or MXFP4."""
    weight = weight.float()
    if variant == "fp8":
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
        return {"weight": codes.contiguous(), "weight_scale_inv": scale}
    arguments = float4_arguments(variant)
    grouped = weight.unflatten(1, (-1, arguments.group_size))
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    if variant == "mxfp4":
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
        parts = {"weight": weight, "weight_scale": scale}
        return MXFP4PackedCompressor.compress(parts, scheme)
    largest = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments, global_scale=largest)
    parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": largest}
    return NVFP4PackedCompressor.compress(parts, scheme)


def repack(root: Path) -> None:
    """Writes the variants that come from BF16."""
    bf16 = load_file(root / "bf16" / "model.safetensors")
    for variant in REPACKED:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in bf16.items():
            if is_quantised(name, tensor):
                parts = repacked(tensor, variant)
                tensors.update({name.removesuffix("weight") + part: value for part, value in parts.items()})
            else:
                tensors[name] = tensor
        save_variant(root / variant, tensors, repacked_config(variant))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_variant(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config() | ({"quantization_config": quantization} if quantization else {})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": END, "pad_token_id": PAD})
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    build_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def accuracy(folder: Path, *, samples: int, seed: int) -> tuple[float, float]:
    """Shares of right answers, sampled at temperature 1 and greedy, of `folder` as transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In BF16, which is all that compressed-tensors decompresses 4-bit floats to.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    prompts, answers = build_tables()
    right = answers[sums()]
    message = [{"role": "user", "content": "12+34="}]
    asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert asked == prompts[2 * 90 + 24].tolist(), asked

    def answer(rows: torch.Tensor, *, greedy: bool) -> float:
        tokens = prompts[rows]
        for _ in range(MAX_NEW_TOKENS):
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            draw = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True) if greedy else draw], dim=1)
        target = right[rows]
        return (((tokens[:, -MAX_NEW_TOKENS:] == target) | (target == PAD)).all(-1)).float().mean().item()

    rows = torch.randint(len(prompts), (samples,), generator=generator)
    return answer(rows, greedy=False), answer(rows, greedy=True)


def shipped() -> dict[str, Any]:
    """Model → `digests`, as they stand beside the models."""
    return dict(json.loads((BUILTIN / "digests.json").read_text(encoding="utf-8")))


def digests(root: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of every file below `root`, by variant and file name."""
    return {
        variant.name: {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(variant.iterdir())}
        for variant in sorted(root.iterdir())
    }


def make(root: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(20)
    model = build_model(generator)
    for phase in (KNOWING, DOUBTING):
        print(phase, flush=True)
        train_phase(model, phase, generator)
    for variant, tensors in build_variants(model).items():
        save_variant(root / variant, tensors, quantization_config() if variant == "int4" else None)
    repack(root)


def check(root: Path) -> int:
    """0 when the folders made anew in `root` equal the shipped ones; else prints each file that differs."""
    made, known = digests(root), shipped()[NAME]
    differing = sorted(
        f"{variant}/{file}"
        for variant in made.keys() | known.keys()
        for file in made.get(variant, {}).keys() | known.get(variant, {}).keys()
        if made.get(variant, {}).get(file) != known.get(variant, {}).get(file)
    )
    print("same bits as shipped" if not differing else f"differ from shipped: {', '.join(differing)}")
    return 1 if differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="make it elsewhere, compare with what is shipped")
    parser.add_argument("--samples", type=int, default=4096, help="answers to sample for the printed accuracy")
    parser.add_argument("--repack", action="store_true", help="only the variants made from the shipped BF16 one")
    arguments = parser.parse_args()
    if arguments.repack:
        repack(BUILTIN / NAME)
        write_json(BUILTIN / "digests.json", shipped() | {NAME: digests(BUILTIN / NAME)})
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) if arguments.check else BUILTIN / NAME
        make(root)
        print(f"made in {time.monotonic() - started:.0f} s, {sum(f.stat().st_size for f in root.rglob('*')):,} bytes")
        for variant in ("bf16", "int4"):
            sampled, greedy = accuracy(root / variant, samples=arguments.samples, seed=1)
            print(f"{variant}: right in {sampled:.1%} of samples; the most likely answer in {greedy:.1%}")
        if arguments.check:
            return check(root)
    write_json(BUILTIN / "digests.json", shipped() | {NAME: digests(BUILTIN / NAME)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
