#!/bin/sh
# Builds sdist and wheel, installs each in a clean environment outside the checkout, and runs the quickstart from the wheel.
set -eu
cd "$(dirname "$0")/.."
checkout=$PWD
uv=$checkout/.venv/bin/uv
constraints=$checkout/images/constraints/laptop.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
"$uv" build --quiet --python .venv/bin/python --build-constraint "$constraints" --out-dir dist
wheel=$(ls "$checkout"/dist/orbit_rl-*.whl)
sdist=$(ls "$checkout"/dist/orbit_rl-*.tar.gz)
echo "built: dist/${wheel##*/} ($(wc -c <"$wheel") bytes), dist/${sdist##*/} ($(wc -c <"$sdist") bytes)"

# What is tracked below orbit_runtime must be in both, the shipped model and prompts included.
git ls-files orbit_runtime | LC_ALL=C sort >"$work/tracked"
.venv/bin/python -m zipfile -l "$wheel" | awk '/^orbit_runtime\// { print $1 }' | LC_ALL=C sort >"$work/in_wheel"
tar -tzf "$sdist" | sed -n 's,^[^/]*/\(orbit_runtime/.*[^/]\)$,\1,p' | LC_ALL=C sort >"$work/in_sdist"
for built in in_wheel in_sdist; do
    missing=$(LC_ALL=C comm -23 "$work/tracked" "$work/$built")
    [ -z "$missing" ] || { printf 'error: tracked, and not %s:\n%s\n' "$built" "$missing" >&2; exit 1; }
done

# make_environment NAME REQUIREMENT: a clean environment in $work/NAME
make_environment() {
    "$uv" venv --quiet --python .venv/bin/python "$work/$1"
    "$uv" pip install --quiet --python "$work/$1/bin/python" --constraint "$constraints" --build-constraint "$constraints" "$2"
}

make_environment light "orbit-rl @ file://$sdist"
if "$work/light/bin/python" -c 'import torch' 2>/dev/null; then
    echo "error: the base install brought torch in." >&2
    exit 1
fi
make_environment full "orbit-rl[train] @ file://$wheel"
cp examples/quickstart.yaml "$work/quickstart.yaml"
cd "$work"
light/bin/orbit --help >help.txt
light/bin/orbit validate quickstart.yaml
light/bin/orbit run quickstart.yaml --dry-run
if light/bin/orbit replay . 2>replay.txt; then
    echo "error: the base install replays a run without torch." >&2
    exit 1
fi
grep -q "pip install 'orbit-rl\[train\]'" replay.txt || { cat replay.txt >&2; exit 1; }
full/bin/orbit run quickstart.yaml --out "$work/quickstart"
full/bin/orbit report "$work/quickstart" --json
echo "release-check: the sdist gives a working base install, the wheel a working quickstart."
