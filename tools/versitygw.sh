#!/bin/sh
# Prints the path of versitygw, an S3 server that honours conditional writes; the first call builds it with Go.
# It stays in the user's cache folder under its version, so a new version is built beside the old one.
set -eu

VERSION=v1.8.0
folder=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl/versitygw-$VERSION
binary=$folder/versitygw

if ! "$binary" --version >/dev/null 2>&1; then
    if ! go version >/dev/null 2>&1; then
        echo "error: 'make test-store' builds its S3 server with Go, and no 'go' on PATH runs." >&2
        echo "  fix: install Go 1.24 or newer; the tests that need Python only are 'make test'." >&2
        exit 1
    fi
    echo "Building versitygw $VERSION with $(go version) ..." >&2
    mkdir -p "$folder"
    staging=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$staging"' EXIT
    GOBIN=$staging CGO_ENABLED=0 go install -trimpath -gcflags all=-dwarf=false -ldflags "-s -w" \
        "github.com/versity/versitygw/cmd/versitygw@$VERSION" >&2
    mv "$staging/versitygw" "$binary"
fi
printf '%s\n' "$binary"
