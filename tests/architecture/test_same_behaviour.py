"""What `make same-behaviour` compares has been recorded."""

from __future__ import annotations

import re

from tools.same_behaviour.__main__ import GROUPS, VALUES


def test_every_group_has_its_values_and_the_commit_and_machine_that_gave_them() -> None:
    kept = {path.stem: path.read_text(encoding="utf-8").splitlines()[:2] for path in VALUES.glob("*.txt")}
    assert kept.keys() == GROUPS.keys()
    for name, (commit, machine) in kept.items():
        assert re.fullmatch("# commit: [0-9a-f]{8,}", commit), f"{name} is not of a commit alone"
        assert (machine != "# machine: any") == GROUPS[name].is_local, name
