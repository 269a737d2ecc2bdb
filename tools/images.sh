#!/bin/sh
# Builds the operator's and the runtime's image with buildah and runs the smoke test in each, or pushes them.
# usage: tools/images.sh build [operator|runtime] | push REGISTRY
# BASE_IMAGE, OPERATOR_BASE_IMAGE, HEAVY, CUBINS and VERSION in the environment go to the Dockerfile, which says what they are.
set -eu
cd "$(dirname "$0")/.."

VERSION=${VERSION:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' orbit_runtime/version.py)}
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# The same sources give the same labels and times, whenever they are built.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}

if ! command -v buildah >/dev/null; then
    echo "error: 'make images' builds with buildah, and there is none on PATH." >&2
    echo "  fix: install it, or use 'docker buildx bake -f images/bake.hcl'." >&2
    exit 1
fi

case ${1-} in
build)
    for target in ${2:-operator runtime}; do
        set -- --build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH"
        for name in BASE_IMAGE OPERATOR_BASE_IMAGE HEAVY CUBINS; do
            value=$(printenv $name || true)
            [ -z "$value" ] || set -- "$@" --build-arg "$name=$value"
        done
        buildah bud --layers --timestamp "$SOURCE_DATE_EPOCH" --target "$target" --tag "localhost/orbit-$target:$VERSION" "$@" .
        container=$(buildah from "localhost/orbit-$target:$VERSION")
        trap 'buildah rm "$container" >/dev/null' EXIT
        buildah run "$container" -- /opt/orbit/smoke.sh "$target"
        buildah rm "$container" >/dev/null
        trap - EXIT
    done
    ;;
push)
    if [ -z "${2-}" ]; then
        echo "error: no registry given." >&2
        echo "  fix: make images-push REGISTRY=registry.example.com/team" >&2
        exit 64
    fi
    for target in operator runtime; do
        buildah push "localhost/orbit-$target:$VERSION" "docker://$2/orbit-$target:$VERSION"
    done
    ;;
*) echo "usage: tools/images.sh build [operator|runtime] | push REGISTRY" >&2 && exit 64 ;;
esac
