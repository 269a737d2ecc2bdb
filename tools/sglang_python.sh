#!/bin/sh
# Prints the interpreter of an environment that SGLang is installed in; the first call makes it (about 10 GB).
# It stays in the user's cache folder, under the constraints it was made with. Orbit itself is not installed there.
set -eu

cd "$(dirname "$0")/.."
CONSTRAINTS=images/constraints/node.txt
wanted=$(sed -n 's/^sglang==\([^ ;]*\).*/\1/p' "$CONSTRAINTS")-$(cksum <"$CONSTRAINTS" | cut -d' ' -f1)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl/sglang-$wanted
python=$folder/bin/python

if [ ! -f "$folder/.complete" ]; then
    [ "$(uname -s)" = Linux ] || { echo "error: SGLang runs on Linux only; the other tests are 'make test'." >&2; exit 1; }
    echo "Making $folder ..." >&2
    rm -rf "$folder"
    # shellcheck source=/dev/null
    . tools/index_settings.sh
    .venv/bin/uv venv --quiet --python .venv/bin/python "$folder" >&2
    .venv/bin/uv pip install --quiet --python "$python" --constraint "$CONSTRAINTS" "orbit-rl[sglang,train] @ ." \
        --no-sources >&2
    .venv/bin/uv pip uninstall --quiet --python "$python" orbit-rl >&2
    # SGLang spawns processes that import all of it again; compiled once, a start takes a third of the time.
    env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q -j 0 "$folder/lib" >/dev/null 2>&1 || true
    : >"$folder/.complete"
fi
printf '%s\n' "$python"
