"""Shows on a CUDA device what only a CUDA device can show: `python -m tools.gpu_proof`, or `make gpu-proof`.

Each stage takes at most eight minutes and writes its own JSON, <out>/<card>/<stage>.json. One whose JSON of this
commit is there is skipped, so that the command can be given again until all is done. Exit status: 0, every stage passed
or says why it could not measure; 1, one failed; 2, wrong options; 3, there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, measured_on
from tests.fakes.pretended_cuda import pretended_environment
from tools.gpu_proof.proof import STAGE_SECONDS, TINY_ENVIRONMENT, exit_status, page, run_stages
from tools.gpu_proof.record import NO_CARD
from tools.gpu_proof.stages import STAGES

OUT, TINY_OUT = RESULTS / "gpu", ROOT / "runs" / "gpu-proof"
NO_DEVICE = 3


def main() -> int:
    options = parse()
    variables: Mapping[str, str] = TINY_ENVIRONMENT if options.tiny else {}
    if options.pretended:
        variables = pretended_environment(options.out.resolve() / "runtime") | {"TRITON_INTERPRET": "1"}
    facts = ask_machine(variables) | origin(options) | {"tiny": options.tiny}
    if facts["card"] == NO_CARD and not options.tiny:
        print(
            "torch finds no CUDA device here; --tiny shows that the stages run, and measures nothing", file=sys.stderr
        )
        return NO_DEVICE
    print(f"{facts['card']}, torch {facts['torch']}, commit {facts['commit']}{' and changes' * bool(facts['dirty'])}")
    for pin in facts["pins"]:
        print(f"not as pinned: {pin['package']} {pin['here'] or 'is missing'}, wanted {pin['wanted'] or 'any'}")
    folder = options.out / re.sub("[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    records = run_stages(
        options.stage or STAGES, folder, facts, again=options.again, seconds=options.seconds, variables=variables
    )
    print("\n" + page(facts, records))
    return exit_status(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one; may be given several times")
    parser.add_argument("--again", action="store_true", help="also what this commit was measured on already")
    parser.add_argument(
        "--tiny", action="store_true", help="smallest sizes, without a device, kernels in Triton's interpreter"
    )
    parser.add_argument(
        "--pretended",
        action="store_true",
        help="--tiny on a device pretended in main memory: what would mix two devices fails",
    )
    parser.add_argument("--out", type=Path, help=f"folder of the results; {OUT.relative_to(ROOT)} unless given")
    parser.add_argument("--seconds", type=float, default=STAGE_SECONDS, help="longest that one stage may take")
    parser.add_argument("--commit", help="of these files, where there is no git checkout to ask")
    options = parser.parse_args()
    options.tiny |= options.pretended
    if options.out is None:
        options.out = TINY_OUT if options.tiny else OUT
    if options.tiny and options.out.resolve().is_relative_to(RESULTS):
        parser.error("--tiny tells nothing of a device: give --out another folder than that of the results")
    return options


def ask_machine(variables: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.gpu_proof.machine"]
    answer = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE
    ).stdout
    told: dict[str, Any] = json.loads(answer)
    return told


def origin(options: argparse.Namespace) -> dict[str, Any]:
    found = measured_on()
    return {"commit": options.commit, "dirty": False} if found["commit"] is None and options.commit else found


if __name__ == "__main__":
    sys.exit(main())
