"""Reading a model folder's JSON files, naming the file and line of an error.

`templates/` holds chat templates, named by `model_type`, of families whose releases have a program in a template's
place: published code is never run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError

DAMAGED = "correct it, or copy or download the file again"


def check_folder(folder: Path, fix: str = "correct spec.model.uri") -> None:
    """Raises ModelError (66) if a model's folder does not exist, without importing anything heavy."""
    if not folder.is_dir():
        raise ModelError("the model folder does not exist", where=str(folder), fix=fix)


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
        text = path.read_bytes().decode("utf-8-sig")
        content = json.loads(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ModelError("not UTF-8", where=f"{path}:{line}", fix=DAMAGED) from None
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg} (column {error.colno})"
        raise ModelError(what, where=f"{path}:{error.lineno}", fix=DAMAGED) from None
    except (IsADirectoryError, PermissionError) as error:
        raise ModelError(f"the file cannot be read: {error.strerror}", where=str(path)) from None
    if not isinstance(content, dict):
        raise ModelError("not a JSON object", where=str(path), fix=DAMAGED)
    return content


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
