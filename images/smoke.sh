#!/bin/sh
# Run inside an image, as its own user or another, with a read-only root: is it what it should be? Prints one line, or
# what is wrong.
# usage: smoke.sh operator|runtime
set -eu

fail() {
    echo "smoke: $1" >&2
    exit 1
}

# Any other user: some platforms choose one for each namespace, which has no name.
[ "$(id -u)" != 0 ] || fail "runs as root"
python -c 'import getpass; getpass.getuser()' 2>/dev/null || fail "a library that asks for its user's name gets none"
[ ! -w / ] && [ ! -w /opt/orbit ] || fail "its user may change / or /opt/orbit"
python -c 'import json; assert json.load(open("/opt/orbit/share/sbom/pip-inspect.json"))["installed"]' || fail "no list of packages"

case ${1-} in
operator)
    python - <<'PYTHON'
import importlib, pkgutil, sys

import orbit_operator

for module in pkgutil.walk_packages(orbit_operator.__path__, "orbit_operator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
heavy = {"torch", "numpy", "transformers", "fastapi"} & set(sys.modules)
assert not heavy, f"the operator imports {heavy}"
PYTHON
    ;;
runtime)
    if [ -d /usr/local/cuda ]; then
        # What Triton, FlashInfer and SGLang compile when they first run.
        [ -x /usr/local/cuda/bin/nvcc ] || fail "no nvcc: SGLang cannot compile its kernels"
        headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
        printf '#include <cuda.h>\n#include <Python.h>\n' | gcc -x c -fsyntax-only -I/usr/local/cuda/include "-I$headers" - \
            || fail "Triton cannot compile its launcher"
        printf '#include <curand_kernel.h>\n#include <cublas_v2.h>\n' | c++ -x c++ -fsyntax-only -I/usr/local/cuda/include - \
            || fail "FlashInfer cannot compile its kernels"
    fi
    # Where the heavy packages are mounted, they are not there while the image is built.
    if python -c 'import triton' 2>/dev/null; then
        python /opt/orbit/smoke_kernels.py || fail "what Triton compiles when it first runs does not compile here"
    fi
    orbit --help >/dev/null || fail "orbit does not start"
    orbit validate /opt/orbit/examples/quickstart.yaml >/dev/null || fail "the quickstart is refused"
    # What a policy wrote is run in a sandbox of the kernel's own means: it needs no right that a restricted pod lacks.
    python - <<'PYTHON' || fail "code cannot be run in its sandbox here"
from orbit_runtime.workers.user_code.sandbox import run_program

assert run_program("print(sum(range(10)))").output == "45\n"
for forbidden in ("open('../left', 'w')", "import socket; socket.socket()", "import os; os.fork()"):
    ended = run_program(forbidden)
    assert ended.ended == "failed" and "PermissionError" in ended.errors, (forbidden, ended)
PYTHON
    ;;
*) fail "say which: operator or runtime" ;;
esac
echo "smoke: ${1} is well, $(python -V), $(python -c 'import orbit_runtime; print(orbit_runtime.__version__)')"
