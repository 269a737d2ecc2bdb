#!/bin/sh
# Prints the path of a CPython that Orbit can be installed with, or says what was looked for and what to do.
# Usage: tools/find_python.sh [PYTHON]      PYTHON, if given, is the only candidate.
# A candidate counts only after it was run: version managers leave shims on PATH that exist and then refuse to start.
set -u

VERSIONS="3.12 3.13 3.14"
CHECK='
import struct, sys, sysconfig
ok = sys.implementation.name == "cpython" and (3, 12) <= sys.version_info[:2] <= (3, 14)
ok = ok and struct.calcsize("P") == 8 and not sysconfig.get_config_var("Py_GIL_DISABLED")
if not ok:
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
print(sys.executable)
'
without_venv=""

# Prints the interpreter behind candidate $1 and succeeds when it is usable.
try_python() {
    case "$1" in
        */*) [ -x "$1" ] || return 1 ;;
        *) command -v "$1" >/dev/null 2>&1 || return 1 ;;
    esac
    found=$("$1" -I -c "$CHECK" 2>/dev/null </dev/null)
    status=$?
    if [ "$status" -eq 4 ]; then
        without_venv="$without_venv $1"
    fi
    [ "$status" -eq 0 ] && [ -n "$found" ] && printf '%s\n' "$found"
}

if [ -n "${1:-}" ]; then
    try_python "$1" && exit 0
    echo "error: $1 is not a 64-bit CPython 3.12, 3.13 or 3.14 with the venv module." >&2
    echo "  fix: give the path of one, as in 'make install PYTHON=/path/to/python3.12', or leave PYTHON out to have it found." >&2
    exit 1
fi

home=${HOME:-/nonexistent}
data=${XDG_DATA_HOME:-$home/.local/share}
pyenv=${PYENV_ROOT:-$home/.pyenv}
for version in $VERSIONS; do
    # An unmatched pattern stays as it is written, and is then no executable file.
    for candidate in \
        "python$version" \
        "$pyenv"/versions/"$version".*/bin/python \
        "$data"/uv/python/cpython-"$version".*/bin/python3 \
        "$home"/.asdf/installs/python/"$version".*/bin/python \
        "${ASDF_DATA_DIR:-$home/.asdf}"/installs/python/"$version".*/bin/python \
        "${MISE_DATA_DIR:-$data/mise}"/installs/python/"$version".*/bin/python \
        "$home"/.rye/py/cpython@"$version".*/bin/python3 \
        /opt/homebrew/bin/python"$version" \
        /home/linuxbrew/.linuxbrew/bin/python"$version" \
        /opt/local/bin/python"$version" \
        /Library/Frameworks/Python.framework/Versions/"$version"/bin/python"$version" \
        /usr/local/bin/python"$version" \
        /usr/bin/python"$version" \
        /opt/python/"$version"*/bin/python3; do
        try_python "$candidate" && exit 0
    done
done
for candidate in \
    python3 python /usr/local/bin/python3 /opt/homebrew/bin/python3 /usr/bin/python3 \
    "${CONDA_PREFIX:-/nonexistent}"/bin/python \
    "$home"/miniconda3/bin/python "$home"/miniforge3/bin/python "$home"/mambaforge/bin/python "$home"/anaconda3/bin/python \
    "$home"/micromamba/bin/python /opt/conda/bin/python \
    "$home"/miniconda3/envs/*/bin/python "$home"/miniforge3/envs/*/bin/python "$home"/mambaforge/envs/*/bin/python \
    "$home"/anaconda3/envs/*/bin/python "${MAMBA_ROOT_PREFIX:-$home/micromamba}"/envs/*/bin/python /opt/conda/envs/*/bin/python; do
    try_python "$candidate" && exit 0
done

{
    echo "error: no 64-bit CPython 3.12, 3.13 or 3.14 was found."
    echo "  looked for: python3.12, python3.13, python3.14, python3 and python on PATH; and in the folders of"
    echo "    pyenv ($pyenv/versions), uv ($data/uv/python), asdf, mise, rye, conda, mamba, Homebrew, MacPorts, /usr/local and /opt"
    for candidate in $without_venv; do
        echo "  found $candidate, which lacks the venv or ensurepip module (on Debian and Ubuntu: apt install python3-venv)"
    done
    echo "  fix: install Python 3.12 (for example 'pyenv install 3.12', 'uv python install 3.12', 'brew install python@3.12' or"
    echo "    'apt install python3.12 python3.12-venv'), or name yours: 'make install PYTHON=/path/to/python3.12'"
} >&2
exit 1
