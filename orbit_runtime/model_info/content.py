"""What in a model's folder, besides its weights, decides what the model computes: for telling two models apart.

Belongs here: which files those are, and their digests. Does not belong here: the weights, which are digested as they
were loaded (`policy`), or understanding any file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Structure, text to ids and back, and where an answer ends. A README may change."""


def file_digests(folder: Path) -> dict[str, str]:
    """File → `sha256:<hex>` of every file of `FILES` that is there."""
    return {
        name: f"sha256:{hashlib.sha256((folder / name).read_bytes()).hexdigest()}"
        for name in FILES
        if (folder / name).is_file()
    }
