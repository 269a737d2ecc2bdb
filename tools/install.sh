#!/bin/sh
# Brings .venv up to date with pyproject.toml and the constraints, and does nothing when it already is.
# Usage: tools/install.sh EXTRA[,EXTRA...] [PYTHON]
# Belongs here: the environment of a checkout. Does not belong here: release environments (tools/release_check.sh).
set -eu

UV_VERSION=0.13.8
EXTRAS=$1
PYTHON=${2:-}
VENV=.venv
CONSTRAINTS=images/constraints/laptop.txt
# Exists while an installation runs, holding its process id; left behind, it says that one was interrupted.
MARK=.venv.installing
STAMP="$VENV/.installed-$(printf %s "$EXTRAS" | tr , -)"

cd "$(dirname "$0")/.."

# The folder is part of the key: scripts in .venv/bin carry its path, so a checkout that was moved is installed anew.
wanted=$({ pwd; echo "$UV_VERSION $EXTRAS $PYTHON"; cat tools/install.sh pyproject.toml "$CONSTRAINTS"; } | cksum)

is_current() {
    [ ! -e "$MARK" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && "$VENV/bin/python" -c '' 2>/dev/null
}

is_current && exit 0

waited=0
until (set -C; echo $$ >"$MARK") 2>/dev/null; do
    owner=$(cat "$MARK" 2>/dev/null || true)
    if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then
        echo "An earlier installation was interrupted: $VENV is made anew." >&2
        rm -rf "$VENV" "$MARK"
        continue
    fi
    [ "$waited" -gt 0 ] || echo "Waiting for the installation that process ${owner:-?} runs ..." >&2
    waited=$((waited + 1))
    # Without an owner's id for this long, nobody is between creating the mark and writing it.
    if [ -z "$owner" ] && [ "$waited" -gt 10 ]; then rm -rf "$VENV" "$MARK"; fi
    sleep 1
done

if [ "$waited" -gt 0 ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
    rm -f "$MARK"
    exit 0
fi

# An error before anything in .venv was touched leaves it as it was; afterwards the mark stays, and the next call starts afresh.
trap 'rm -f "$MARK"' EXIT

# Succeeds when .venv runs, was made for this folder, and has the Python that was asked for, if one was.
is_usable() {
    "$VENV/bin/python" -c 'import pip' 2>/dev/null || return 1
    grep -qx "command = .* -m venv $PWD/$VENV" "$VENV/pyvenv.cfg" || return 1
    [ -z "$PYTHON" ] || [ "$("$PYTHON" -V)" = "$("$VENV/bin/python" -V)" ]
}

if ! is_usable; then
    base=$(tools/find_python.sh "$PYTHON")
    echo "Making $VENV with $base ..." >&2
    rm -rf "$VENV"
    "$base" -m venv "$PWD/$VENV"
fi

. tools/index_settings.sh
echo "Installing orbit-rl[$EXTRAS] into $VENV ..." >&2
[ "$("$VENV/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" = "$UV_VERSION" ] ||
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
install() {
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --constraint "$CONSTRAINTS" --build-constraint "$CONSTRAINTS" \
        --editable ".[$EXTRAS]" "$@"
}
# A wrong requirement or a missing network shows here, where nothing was changed yet.
install --dry-run --quiet
trap - EXIT
# Compiled now: where nothing may be written (PYTHONDONTWRITEBYTECODE, a read-only checkout) each process would compile
# torch and transformers anew, for 20 seconds.
install
# uv would compile only what it installs now, but a .venv may be older than this line. Packages may hold files that are
# not for this Python.
"$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python3.*/site-packages || true
"$VENV/bin/python" -m compileall -q orbit_runtime operator
printf '%s\n' "$wanted" >"$STAMP"
rm -f "$MARK"
