"""tokenizer.json decides how texts become tokens and tokens texts, whatever class the files beside it name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from orbit_runtime.data.chat import SAMPLE, ChatTokenizer

TEXT = "Hello  world 1234567 it's\n\n  x = 12+34"
CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", None)
TYPES = (
    "llama", "qwen3", "qwen2", "mistral", "granite", "olmo2", "smollm3", "phi3", "glm4", "qwen3_moe", "deepseek_v3",
    "gpt_oss", "glm4_moe",
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as in GPT-2 and Llama 3, and each digit by itself, as only some families cut."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([  # type: ignore[assignment]
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([TEXT, "Hello world", "1234567 1234567 1234567"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def ids_of_class(folder: Path, name: str | None) -> list[int]:
    """Of the sample, by transformers' class itself over the whole vocabulary."""
    made: Any = tokenizer_class_from_name(name or "PreTrainedTokenizerFast")
    return list(made.from_pretrained(folder, local_files_only=True)(SAMPLE, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("model_type", TYPES)
def test_ids_and_texts_are_those_of_the_file_whatever_class_is_named(
    file: Path, tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = Tokenizer.from_file(str(file))
    ids = right.encode(TEXT, add_special_tokens=False).ids
    assert right.decode(ids) == TEXT
    shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in CLASSES:
        caplog.clear()
        fields = {"eos_token": "<|end|>"} | ({"tokenizer_class": name} if name else {})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        ours = ChatTokenizer(tmp_path)
        assert (ours.encode_text(TEXT), ours.decode(ids)) == (ids, TEXT), name
        assert ours.eos_ids[-1] == right.token_to_id("<|end|>")
        assert ours.decode([*ids, ours.eos_ids[-1]]) == TEXT
        assert ours.decode_all([ours.eos_ids[-1]]) == "<|end|>"
        ChatTokenizer(tmp_path)
        is_other = ids_of_class(tmp_path, name) != right.encode(SAMPLE, add_special_tokens=False).ids
        assert is_other == (name in ("LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"))
        told = f"{tmp_path}: tokenizer_class {name} is ignored: tokenizer.json cuts texts by other rules"
        assert [each.getMessage() for each in caplog.records] == [told] * is_other


def test_a_template_is_read_from_the_file_of_a_models_processor(file: Path, tmp_path: Path) -> None:
    """As models with a vision tower were published."""
    shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "<{{ messages[0].content }}>"}))
    assert ChatTokenizer(tmp_path).render([{"role": "user", "content": "Hello"}]) == "<Hello>"
