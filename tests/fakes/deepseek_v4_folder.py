"""A model's folder as DeepSeek-V4 is published: its special tokens, and no chat template.

Belongs here: the tokenizer, over single bytes. Does not belong here: weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL = (BOS, EOS, PAD, "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<｜deepseek_image｜>")
PLAIN = ("<think>", "</think>", "｜DSML｜")
"""Tokens of their own that a text keeps when special ones are left out."""


def write_deepseek_v4(folder: Path) -> Path:
    """The folder, with config.json, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    end = write_tokenizer(folder)
    config = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> int:
    """Writes the tokenizer's two files. Returns the id of the token that ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(PLAIN))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.token_to_id(EOS))
