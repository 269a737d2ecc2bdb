"""What in a model's folder, besides its weights, decides what the model computes: for telling two models apart.

Belongs here: which files those are, their digests, and that of the weights as they lie on disk. Does not belong here:
the digest of the weights as they were loaded (`policy`), or understanding any file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orbit_runtime.model_info.headers import TensorInfo, read_folder, read_header

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


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` over every tensor's name, dtype, shape and bytes; the same however they are spread over files.

    An adapter is kept with it, so that it is never merged into another base. Reads every byte, several files at once.
    """
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for name, (path, info) in read_folder(folder).items():
        by_file.setdefault(path, {})[name] = info
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = {name: digest for each in pool.map(_tensor_digests, by_file, by_file.values()) for name, digest in each}
    text = json.dumps(sorted(found.items()), separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _tensor_digests(path: Path, infos: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    start = read_header(path).data_start
    digests = []
    with path.open("rb", buffering=0) as file:
        for name, info in infos.items():
            digest = hashlib.sha256(f"{info.dtype}{list(info.shape)}".encode())
            file.seek(start + info.start)
            left = info.num_bytes
            while left:
                block = file.read(min(left, 1 << 22))
                if not block:
                    raise OSError(f"{path} ended early")
                digest.update(block)
                left -= len(block)
            digests.append((name, digest.hexdigest()))
    return digests
