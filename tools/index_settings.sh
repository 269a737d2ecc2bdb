#!/bin/sh
# Sourced by the scripts that install with uv: the package index and certificates that pip was told about.
VENV=${VENV:-.venv}

# uv reads its own settings only: whoever told pip about a mirror or a certificate has told us.
pip_settings=$("$VENV/bin/python" -m pip config list 2>/dev/null || true)
setting() { printf '%s\n' "$pip_settings" | sed -n "s/^global\.$1='\(.*\)'\$/\1/p"; }
: "${UV_DEFAULT_INDEX:=${PIP_INDEX_URL:-$(setting index-url)}}"
: "${UV_INDEX:=${PIP_EXTRA_INDEX_URL:-$(setting extra-index-url)}}"
: "${UV_FIND_LINKS:=${PIP_FIND_LINKS:-$(setting find-links)}}"
: "${SSL_CERT_FILE:=${PIP_CERT:-$(setting cert)}}"
[ -z "$UV_DEFAULT_INDEX" ] || export UV_DEFAULT_INDEX
[ -z "$UV_INDEX" ] || export UV_INDEX
[ -z "$UV_FIND_LINKS" ] || export UV_FIND_LINKS
[ -z "$SSL_CERT_FILE" ] || export SSL_CERT_FILE
: "${UV_HTTP_TIMEOUT:=${PIP_DEFAULT_TIMEOUT:-120}}"
export UV_HTTP_TIMEOUT
