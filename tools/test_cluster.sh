#!/bin/sh
# Runs tests/cluster in two processes at once: what needs nodes, and what needs no more than a control plane, whose report follows.
# usage: tools/test_cluster.sh PYTHON [PYTEST_OPTION]...
set -u
python=$1
shift
report=$(mktemp)
"$python" -m pytest tests/cluster -m "not node" "$@" >"$report" 2>&1 &
plane=$!
# Asked to end, pytest ends its servers first.
trap '[ -z "$plane" ] || { kill -TERM "$plane"; wait "$plane"; }; rm -f "$report"' EXIT
trap 'exit 130' INT TERM
"$python" -m pytest tests/cluster -m node "$@"
nodes=$?
wait "$plane"
planes=$? plane=
cat "$report"
[ "$nodes" -eq 0 ] || exit "$nodes"
exit "$planes"
