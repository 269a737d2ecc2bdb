"""Reading a model folder's JSON files, naming the file and line of an error.

`templates/` holds chat templates, named by `model_type`, of families whose releases have a program in a template's
place: published code is never run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError

UNFINISHED = "conversion.progress.json"
"""Exists in a folder that `orbit convert` or `orbit merge` has not finished: it is not a checkpoint yet."""
DAMAGED = "correct it, or copy or download the file again"
MAX_COUNT = 16_384
"""Most layers, experts or heads: each of them is built before any weight is read. Doge has that many experts."""
_COUNTS = re.compile(r"(num|n)_\w*(layer|expert|head)")


def check_folder(folder: Path, fix: str = "correct spec.model.uri") -> None:
    """Raises ModelError (66) if a model's folder does not exist, or a conversion into it was interrupted."""
    if not folder.is_dir():
        what = "is a link to itself, or to nothing" if folder.is_symlink() else "does not exist"
        raise ModelError(f"the model folder {what}", where=str(folder), fix=fix)
    if (folder / UNFINISHED).is_file():
        raise ModelError(
            "a conversion into this folder was not finished",
            where=str(folder),
            fix="give the same `orbit convert` or `orbit merge` command again: it continues",
        )


def check_model_folder(folder: Path, fix: str) -> None:
    """`check_folder`, and raises ModelError (66) if it holds no config.json."""
    check_folder(folder, fix)
    if not (folder / "config.json").is_file():
        raise ModelError("the model folder holds no config.json", where=str(folder), fix=fix)


def load_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: names file and line; a `FileNotFoundError` is left to the caller.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    return parse_settings(data, str(path))


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading. A pipe or a device, of which there may be no end, is an `OSError` too."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    return file


def parse_settings(data: bytes, where: str) -> dict[str, Any]:
    """The object in the text of a JSON file.

    Raises:
        ModelError: names the line after `where`, or the field with a value that no model has.
    """
    try:
        text = data.decode("utf-8-sig")
        content = json.loads(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ModelError("not UTF-8", where=f"{where}:{line}", fix=DAMAGED) from None
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg} (column {error.colno})"
        raise ModelError(what, where=f"{where}:{error.lineno}", fix=DAMAGED) from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "a number of thousands of digits"
        raise ModelError(f"not JSON that can be read: {what}", where=where, fix=DAMAGED) from None
    if not isinstance(content, dict):
        raise ModelError("not a JSON object", where=where, fix=DAMAGED)
    _check_values(content, where)
    return content


def _check_values(content: dict[str, Any], where: str) -> None:
    waiting: list[tuple[str, Any]] = [*content.items()]
    while waiting:
        path, value = waiting.pop()
        if path.rpartition(".")[2] == "model_type" and not isinstance(value, str | None):
            raise ModelError(f"{path} is not a name", where=where, fix=DAMAGED)
        if isinstance(value, dict):
            waiting += ((f"{path}.{name}", each) for name, each in value.items())
        elif isinstance(value, list):
            waiting += ((f"{path}[{index}]", each) for index, each in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value) and "limit" not in path:
            # Limits such as Mamba's `time_step_limit` end at infinity.
            raise ModelError(f"{path} is {value}, not a finite number", where=where, fix=DAMAGED)
        elif isinstance(value, int) and value > MAX_COUNT and _COUNTS.match(path.rpartition(".")[2]):
            raise ModelError(f"{path} is {value:,}; no model has more than {MAX_COUNT:,}", where=where, fix=DAMAGED)


TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_FILE = "chat_template.jinja"
_PUBLISHED = (TEMPLATE_FILE, "chat_template.json", "additional_chat_templates")


def own_template(folder: Path) -> Path | None:
    """The file with the template of this model's family; None if the folder has a template, or the family needs none.

    Raises:
        ModelError: config.json or tokenizer_config.json cannot be read.
    """
    config, tokenizer = folder / "config.json", folder / "tokenizer_config.json"
    if any((folder / name).exists() for name in _PUBLISHED) or not config.is_file():
        return None
    if tokenizer.is_file() and load_settings(tokenizer).get("chat_template"):
        return None
    known = {path.stem: path for path in TEMPLATES.glob("*.jinja")}
    return known.get(str(load_settings(config).get("model_type")))
