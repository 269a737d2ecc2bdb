"""Chat templates of families that are published without one; `templates/` holds a file for each, named by `model_type`.

Such a release has a program in a template's place, and published code is never run.

Belongs here: which folder needs which of them. Does not belong here: rendering (`data.chat`).
"""

from __future__ import annotations

from pathlib import Path

from orbit_runtime.model_info.settings import load_settings

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
