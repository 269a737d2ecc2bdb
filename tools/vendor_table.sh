#!/bin/sh
# Measures how other libraries read the bytes of every format: writes tools/formats/measured.json and the page made of it,
# and runs the tests that need those libraries. They get an environment of their own, .venv-vendors (VENDORS names another).
set -eu
cd "$(dirname "$0")/.."
VENDORS=${VENDORS:-.venv-vendors}
UV=${UV:-.venv/bin/uv}

. tools/index_settings.sh

install() { "$UV" pip install --quiet --python "$VENDORS/bin/python" --constraint images/constraints/laptop.txt "$@"; }

if [ ! -x "$VENDORS/bin/python" ]; then
    "$UV" venv --quiet --python "$(readlink -f .venv/bin/python)" "$VENDORS"
fi
# torch, transformers and compressed-tensors are those that the tests have: one difference at a time.
install --editable ".[train,dev]" torchao==0.18.0 nvidia-modelopt==0.47.0 bitsandbytes==0.50.2 requests
# GPTQModel asks for a newer transformers, which reading a weight does not need: it comes without its dependencies.
install datasets pypcre logbar device-smi threadpoolctl pillow protobuf
install --no-deps gptqmodel==7.7.0 defuser tokenicer

export PYTHONPATH="$PWD" PYTHONWARNINGS=ignore
"$VENDORS/bin/python" -m tools.formats.measure
"$VENDORS/bin/python" -m tools.formats.generate
"$VENDORS/bin/python" -m pytest tests/models/test_vendor_differences.py tests/unit_runtime/quant -q
