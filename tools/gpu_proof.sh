#!/bin/sh
# Runs the proof on a CUDA device with a Python that has torch, in an environment of its own beside it. Needs no network.
# Usage: tools/gpu_proof.sh PYTHON [OPTION...]      PYTHON may be empty: python3; options: python -m tools.gpu_proof --help
# What that Python lacks comes from wheels/gpu or, where that is missing, from wheels/gpu.tar.xz (`make gpu-wheels` gathers
# both where there is a network); WHEELS names another folder.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
[ $# -eq 0 ] || shift
VENV=.venv-gpu
WHEELS=${WHEELS:-wheels/gpu}

fail() { echo "error: $1" >&2; echo "  fix: $2" >&2; exit 2; }

base=$("$PYTHON" -c 'import sys; print(sys.executable)') ||
    fail "$PYTHON does not start" "give the Python that has torch, as in 'make gpu-proof PYTHON=/path/to/python3'"
"$base" -c 'import torch' 2>/dev/null || fail "$base has no torch" "give the Python that has it: make gpu-proof PYTHON=..."

[ -d "$WHEELS" ] || [ ! -f "$WHEELS.tar.xz" ] ||
    "$base" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$WHEELS.tar.xz" "$WHEELS"
wanted=$({ pwd; "$base" -c 'import sys, torch; print(sys.executable, sys.version, torch.__version__)'; ls "$WHEELS" 2>/dev/null; } | cksum)
if [ ! -f "$VENV/.made" ] || [ "$(cat "$VENV/.made")" != "$wanted" ]; then
    [ -f "$WHEELS/requirements.txt" ] ||
        fail "$WHEELS has no wheels" "run 'make gpu-wheels' on a machine with a network, and bring the folder along"
    rm -rf "$VENV"
    "$base" -m venv --without-pip --system-site-packages "$VENV"
    # Of a Python that is an environment itself, --system-site-packages shows what lies below it, and not its own.
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base" -c 'import sys; print(*[each for each in sys.path if each.endswith(("site-packages", "dist-packages"))], sep="\n")' \
        >"$packages/the_one_with_torch.pth"
    pip() { "$VENV/bin/python" "$(ls "$WHEELS"/pip-*.whl)"/pip "$@"; }
    install() { pip install --quiet --disable-pip-version-check --no-index --find-links "$WHEELS" "$@"; }
    install -r "$WHEELS/requirements.txt" ||
        fail "the wheels in $WHEELS do not suit $base" "run 'make gpu-wheels GPU_PYTHON=X.Y' with its version, and bring them again"
    while read -r peer; do
        install "$peer" || echo "$peer could not be installed: what is compared with it will say so" >&2
    done <"$WHEELS/requirements-peers.txt"
    echo "$wanted" >"$VENV/.made"
fi
exec "$VENV/bin/python" -m tools.gpu_proof "$@"
