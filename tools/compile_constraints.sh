#!/bin/sh
# Recompiles the pinned sets of images/constraints/ from pyproject.toml. Neither hosts nor local paths are written to them.
# Usage: tools/compile_constraints.sh [--upgrade]      without --upgrade, pins that still satisfy pyproject.toml stay.
set -eu
cd "$(dirname "$0")/.."

compile() {
    output=$1
    shift
    .venv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        --no-emit-package orbit-rl --python-version 3.12 --constraint images/constraints/shared.in \
        pyproject.toml --output-file "images/constraints/$output" "$@"
}

# A laptop, a CI machine, a cluster's operator: any system and any supported Python.
compile laptop.txt --universal --extra train --extra dev --extra operator --extra docs "$@"
# Environments of other packages: verifiers pins older versions of what the others have newer.
compile bridges.txt --universal --extra train --extra gym --extra verifiers "$@"
compile node.txt --python-platform x86_64-manylinux_2_35 \
    --extra train --extra sglang --extra megatron --extra ray --extra operator --extra trackers "$@"
