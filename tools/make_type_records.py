"""Writes `model_info/types.json`: the record of every causal type that the tests compare with transformers, and why
each of the others is refused.

    python -m tools.make_type_records [TYPE …]     all of them, or these anew

Belongs here: collecting. Does not belong here: what a record holds (`policy.module_tree`), the types' settings
(`tests.models.causal_types`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from orbit_runtime.model_info.checkpoint import read_config
from orbit_runtime.model_info.families import FAMILIES
from orbit_runtime.model_info.headers import read_folder
from orbit_runtime.model_info.module_tree import matrices, shipped_types
from orbit_runtime.policy.module_tree import make_record
from tests.models.causal_types import LEFT_OUT, TYPES, make_type

FILE = Path(__file__).parents[1] / "orbit_runtime" / "model_info" / "types.json"


def make_type_record(folder: Path, name: str) -> dict[str, Any]:
    made = make_type(folder, name)
    tensors = read_folder(made)
    shapes = {each.removesuffix(".weight"): info.shape for each, (_, info) in tensors.items()}
    return make_record(made, list(matrices(read_config(made), shapes, tensors).values()))


def main() -> None:
    asked = sys.argv[1:] or [name for name in TYPES if name not in FAMILIES]
    records = {name: each for name, each in shipped_types().items() if name in TYPES}
    for name in asked:
        with tempfile.TemporaryDirectory() as scratch:
            records[name] = make_type_record(Path(scratch), name)
        print(name, records[name].get("passes", records[name].get("refused")), flush=True)
    records |= {name: {"refused": why} for why, names in LEFT_OUT.items() for name in names.split()}
    lines = [f"{json.dumps(name)}: {json.dumps(records[name], sort_keys=True)}" for name in sorted(records)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
