"""tokenizer.json decides how texts become tokens and tokens texts, whatever class the files beside it name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orbit_runtime.data.chat import ChatTokenizer

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


@pytest.mark.parametrize("model_type", TYPES)
def test_ids_and_texts_are_those_of_the_file_whatever_class_is_named(
    file: Path, tmp_path: Path, model_type: str
) -> None:
    right = Tokenizer.from_file(str(file))
    ids = right.encode(TEXT, add_special_tokens=False).ids
    assert right.decode(ids) == TEXT
    shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in CLASSES:
        fields = {"eos_token": "<|end|>"} | ({"tokenizer_class": name} if name else {})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        ours = ChatTokenizer(tmp_path)
        assert (ours.encode_text(TEXT), ours.decode(ids)) == (ids, TEXT), name
        assert ours.eos_ids[-1] == right.token_to_id("<|end|>")
        assert ours.decode([*ids, ours.eos_ids[-1]]) == TEXT
        assert ours.decode_all([ours.eos_ids[-1]]) == "<|end|>"
