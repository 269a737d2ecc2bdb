#!/bin/sh
# Prints the path of versitygw, an S3 server that honours conditional writes; the first call builds it with Go.
# It stays in the user's cache folder under its version, so a new version is built beside the old one.
# usage: tools/versitygw.sh [--fetch]   (--fetch: only what the build will read, while something else compiles)
set -eu

VERSION=v1.8.0
folder=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl/versitygw-$VERSION
binary=$folder/versitygw
package=github.com/versity/versitygw/cmd/versitygw

if ! "$binary" --version >/dev/null 2>&1; then
    if ! go version >/dev/null 2>&1; then
        echo "error: 'make test-store' builds its S3 server with Go, and no 'go' on PATH runs." >&2
        echo "  fix: install Go 1.24 or newer; the tests that need Python only are 'make test'." >&2
        exit 1
    fi
    mkdir -p "$folder"
    staging=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$staging"' EXIT
    trap 'exit 143' INT TERM
    if [ "${1-}" = --fetch ]; then
        printf 'module orbit.local/versitygw\n\ngo 1.24.0\n\nrequire github.com/versity/versitygw %s\n' "$VERSION" >"$staging/go.mod"
        (cd "$staging" && go list -mod=mod -deps "$package" >"$staging/packages")
        exit
    fi
    echo "Building versitygw $VERSION with $(go version) ..." >&2
    # As in cluster_programs.sh: with the same settings the standard library is compiled once for both.
    GOBIN=$staging CGO_ENABLED=0 go install -gcflags all=-dwarf=false -ldflags "-s -w" "$package@$VERSION" >&2
    mv "$staging/versitygw" "$binary"
fi
[ "${1-}" = --fetch ] || printf '%s\n' "$binary"
