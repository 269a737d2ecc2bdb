"""Addresses of models and adapters on the command line: a folder, a store, or a shipped card."""

from __future__ import annotations

from pathlib import Path

from orbit_runtime.errors import ModelError, UsageError
from orbit_runtime.model_info.settings import check_folder
from orbit_runtime.spec.storage import STORES


def local_folder(uri: str, *, precision: str = "Auto", option: str | None = None) -> Path | None:
    """The folder on this machine; None for an object store or a hub.

    Args:
        precision: which variant of a `builtin://` model.
        option: where the user may choose it. Elsewhere, and where they did not, another variant is taken if that one
            is not shipped.

    Raises:
        UsageError: a file, where a folder is asked for.
        ModelError: an unknown shipped model.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme == "builtin":
        from orbit_runtime.model_info.builtin_models import any_builtin_folder, builtin_folder

        if option is None or precision == "Auto":
            return any_builtin_folder(rest, precision)
        return builtin_folder(rest, precision, option=option)
    if separator and scheme != "file":
        if scheme not in (*STORES, "hf"):
            raise UsageError(
                f"there is no address {scheme}://", where=uri, fix="use a path, builtin://, s3:// or hf://"
            )
        return None
    folder = Path(rest if separator else uri).expanduser()
    if folder.is_file():
        raise UsageError("this is a file", where=str(folder), fix=f"name its folder: {folder.parent}")
    return folder


def needed_folder(uri: str, *, precision: str = "Auto") -> Path:
    """Returns `local_folder` for commands that read every byte.

    Raises:
        ModelError: it lies elsewhere, or is not there.
    """
    folder = local_folder(uri, precision=precision)
    if folder is None:
        raise ModelError(
            "not on this machine",
            where=uri,
            fix="download it and name its folder: every byte is read",
        )
    check_folder(folder, "correct the path")
    return folder
