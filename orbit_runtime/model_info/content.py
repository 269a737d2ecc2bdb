"""The files of a model's folder, besides its weights, that affect what it computes; used to tell two models apart."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orbit_runtime.model_info.headers import TensorInfo, read_folder, read_header
from orbit_runtime.model_info.settings import TEMPLATE_FILE, own_template
from orbit_runtime.storage.cache import Cache

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "tiktoken.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Structure, tokenisation in both directions, and where a completion ends. A README may change."""

KEPT_FROM_BYTES = 1 << 28
"""Smaller weights are hashed in a fraction of a second, and nothing is cached for them."""
SETTLED_SECONDS = 2.0
"""A file that changed more recently might change again within one tick of the file system's clock."""


def file_digests(folder: Path) -> dict[str, str]:
    """File → `sha256:<hex>` for every existing file of `FILES`, and the chat template that Orbit has in a missing one's
    place."""
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    if ours := own_template(folder):
        files[TEMPLATE_FILE] = ours
    return {name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in files.items()}


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` over every tensor's name, dtype, shape and bytes, independent of their distribution over files.

    An adapter is stored with it, so that it is never merged into another base. Reads every byte, several files at once.
    """
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for name, (path, info) in read_folder(folder).items():
        by_file.setdefault(path, {})[name] = info
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = {name: digest for each in pool.map(_tensor_digests, by_file, by_file.values()) for name, digest in each}
    text = json.dumps(sorted(found.items()), separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def cached_weights_digest(
    folder: Path,
    cache: Cache,
    *,
    kept_from: int = KEPT_FROM_BYTES,
    compute: Callable[[Path], str] = weights_digest,
    clock: Callable[[], float] = time.time,
) -> str:
    """`weights_digest`, read from the cache as long as every file is the same, unchanged, as when it was computed.

    A file counts as unchanged if its path, device, inode, size and both times are; a user can set only one time.
    """
    started = clock()
    facts, size, changed = _file_facts(folder)
    key = hashlib.sha256(facts.encode()).hexdigest()
    if size < kept_from:
        return compute(folder)
    known = cache.load_digest(key)
    if known is not None:
        return known
    digest = compute(folder)
    if changed < started - SETTLED_SECONDS and _file_facts(folder)[0] == facts:
        cache.save_digest(key, digest)
    return digest


def _file_facts(folder: Path) -> tuple[str, int, float]:
    """An identifier that changes if the weights' files do, their bytes, and the newest time of change."""
    paths = {path for path, _ in read_folder(folder).values()} | set(folder.glob("*.index.json"))
    found = {str(path.resolve()): path.stat() for path in sorted(paths)}
    facts = [[path, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for path, s in found.items()]
    newest = max(max(s.st_mtime, s.st_ctime) for s in found.values())
    return json.dumps(facts), sum(s.st_size for s in found.values()), newest


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
