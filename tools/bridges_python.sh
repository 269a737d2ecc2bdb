#!/bin/sh
# Prints the interpreter of an environment that the bridged packages are installed in; the first call makes it.
# It stands apart from .venv because verifiers pins what the trainer's packages have newer. Orbit itself is not installed there.
set -eu

cd "$(dirname "$0")/.."
CONSTRAINTS=images/constraints/bridges.txt
wanted=$(cat "$CONSTRAINTS" tools/bridges_python.sh | cksum | cut -d' ' -f1)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl/bridges-$wanted
python=$folder/bin/python

if [ ! -f "$folder/.complete" ]; then
    echo "Making $folder ..." >&2
    rm -rf "$folder"
    # shellcheck source=/dev/null
    . tools/index_settings.sh
    .venv/bin/uv venv --quiet --python .venv/bin/python "$folder" >&2
    # staros-stardata holds an environment of verifiers that is nobody's here.
    .venv/bin/uv pip install --quiet --compile-bytecode --python "$python" --constraint "$CONSTRAINTS" "orbit-rl[train,gym,verifiers] @ ." staros-stardata==0.1.1 \
        pytest pytest-timeout pytest-xdist hypothesis >&2
    .venv/bin/uv pip uninstall --quiet --python "$python" orbit-rl >&2
    : >"$folder/.complete"
fi
printf '%s\n' "$python"
