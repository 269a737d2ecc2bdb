"""Kimi's tokenizer from its published files, against tiktoken with the pattern of the publisher's code."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import AutoTokenizer

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.tiktoken_model import is_tiktoken, load_tiktoken, save_converted
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.content import file_digests
from orbit_runtime.spec.data import Chat
from tests.integration.tiny_kimi import IM_END, NAMED, RANKS, RESERVED, write_tokenizer

PUBLISHED = "|".join((
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
))  # fmt: skip
"""`pat_str` in tokenization_kimi.py of Kimi-K2, K2.5 and K2.6."""
PARTS = (
    *"abcXYZ019 .,'-\n\r\t", "\u8bad", "\u7ec3", "\u6a21\u578b", "\u00e9", "\u00df", "\u00c5", "\ufb01", "\u03ac",
    "\u042f", "\u0436", "\u0627", "\u0628", "\ud55c", "\uae00", "\u30ab", "\u30bf", "\U0001f642",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u0301", "\u200d", "\u00a0", "\u3000", "\u3005", "\u3007", "\u3400",
    "\U00020000", "\u017f", "\u0130", "\u0131", "'S", "'\u017f", "'LL", *NAMED.values(),
    f"<|reserved_token_{RANKS + 5}|>",
)  # fmt: skip
"""Han and its neighbours, letters with and without case, marks, joined emoji, spaces, contractions, special tokens."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
QUESTION = [{"role": "user", "content": "12 + 30?"}]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "kimi"))


def reference(folder: Path) -> tiktoken.Encoding:
    reserved = {NAMED.get(place, f"<|reserved_token_{RANKS + place}|>"): RANKS + place for place in range(RESERVED)}
    ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
    return tiktoken.Encoding("kimi", pat_str=PUBLISHED, mergeable_ranks=ranks, special_tokens=reserved)


def test_texts_of_all_kinds_have_the_ids_that_tiktoken_gives_them(published: Path) -> None:
    expected, tokenizer = reference(published), ChatTokenizer(published)
    draw = random.Random(0)
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path("docs/guides").glob("*.md"))]
    texts += ["".join(draw.choices(PARTS, k=draw.randint(1, 40))) for _ in range(10_000)]
    for text, ids in zip(texts, tokenizer.encode_texts(texts), strict=True):
        assert ids == expected.encode(text, allowed_special="all"), text
        assert tokenizer.decode_all(ids) == expected.decode(ids)


def test_a_conversation_ends_where_the_model_ends_an_answer(published: Path) -> None:
    tokenizer = ChatTokenizer(published)
    assert tokenizer.eos_ids[0] == RANKS + IM_END
    assert tokenizer._tokenizer.pad_token_id == RANKS + 255
    ids = tokenizer.encode_chat(QUESTION)
    assert ids[0] == RANKS + 3
    assert ids[-2:] == [RANKS + 22, RANKS + 23]
    assert tokenizer.decode(ids) == "user12 + 30?assistant<think></think>"


def test_the_converted_files_give_the_same_ids_without_ours(published: Path, tmp_path: Path) -> None:
    converted = AutoTokenizer.from_pretrained(save_converted(published, tmp_path / "converted"))
    ours = load_tiktoken(published)
    for text in ("训练模型, it's 12345\n\n  done", "<|im_end|>a<|media_pad|>"):
        assert converted.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)
    assert converted.chat_template == ours.chat_template
    assert converted.eos_token_id == ours.eos_token_id


def test_another_vocabulary_is_another_model(folder: Path) -> None:
    before = file_digests(folder)
    file = folder / "tiktoken.model"
    file.write_bytes(file.read_bytes().replace(b" 399\n", b" 400\n"))
    assert file_digests(folder)["tiktoken.model"] != before["tiktoken.model"]


def test_tools_are_described_in_typescript_as_the_models_code_describes_them(published: Path) -> None:
    start = "<|im_system|>tool_declare<|im_middle|>"
    written = ChatTokenizer(published).render(QUESTION, [TOOL])
    assert written.startswith(f"{start}# Tools\n\n## functions\nnamespace functions {{\ntype add = (_: ")
    told = ChatTokenizer(published, Chat(template_arguments={"tools_ts_str": "# Tools"})).render(QUESTION, [TOOL])
    assert told.startswith(f"{start}# Tools<|im_end|>")
    silent = ChatTokenizer(published, Chat(template_arguments={"tools_ts_str": ""}))
    assert '"name":"add"' in silent.render(QUESTION, [TOOL])


def test_tools_that_the_models_code_cannot_describe_are_json_with_sorted_keys(published: Path) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"b": {"x": 1}, "a": {}}}}}
    written = ChatTokenizer(published).render(QUESTION, [odd])
    assert '[{"function":{"name":"f","parameters":{"properties":{"a":{},"b":{"x":1}}}},"type":"function"}]' in written


def test_a_tokenizer_json_beside_it_counts_more(folder: Path, tmp_path: Path) -> None:
    shutil.copy(save_converted(folder, tmp_path / "converted") / "tokenizer.json", folder)
    assert not is_tiktoken(folder)
    assert ChatTokenizer(folder).encode_text("训练 it's") == load_tiktoken(folder).encode("训练 it's")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"!!!! 0\n", "tiktoken.model:1"),
        (b"YQ== 0\nYg== x\n", "tiktoken.model:2"),
        (b"YQ== 0\nYg== 2\n", "without a gap"),
        (b"YQ== 0\nYg== 1\n", "no rank for the byte 0"),
        (b"", "without a gap"),
    ],
)
def test_damaged_ranks_are_named(folder: Path, lines: bytes, said: str) -> None:
    (folder / "tiktoken.model").write_bytes(lines)
    with pytest.raises(ModelError) as refused:
        ChatTokenizer(folder)
    assert said in f"{refused.value.where}: {refused.value}"
    assert refused.value.exit_code == 66


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "the rules of PreTrainedTokenizerFast are not known"),
        ({"added_tokens_decoder": {"3": {"content": "<x>"}}}, "added_tokens_decoder.3"),
        ({"added_tokens_decoder": {str(RANKS): {}}}, f"added_tokens_decoder.{RANKS}"),
        (
            {"added_tokens_decoder": {str(RANKS): {"content": "<x>"}, str(RANKS + 1): {"content": "<x>"}}},
            f"added_tokens_decoder.{RANKS + 1}",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(folder: Path, change: dict[str, object], said: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError) as refused:
        ChatTokenizer(folder)
    assert said in f"{refused.value.where}: {refused.value}"


def test_a_template_is_required(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(folder)
