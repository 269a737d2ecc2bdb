#!/bin/sh
# Runs tests/chart and tests/cluster in three processes at once: what needs nodes, and beside it all that needs none,
# whose reports follow. Much of it is waiting.
# usage: tools/test_cluster.sh PYTHON [PYTEST_OPTION]...
set -u
python=$1
shift
# Operators are started by the dozen: in a fresh environment each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
reports=$(mktemp -d)
crashes=tests/cluster/test_operator_crashes.py
# The node tests take longest: they go first where all want a core.
nice -n 5 "$python" -m pytest tests/cluster --ignore "$crashes" -m "not node" "$@" >"$reports/operator" 2>&1 &
operator=$!
nice -n 5 "$python" -m pytest "$crashes" tests/chart -m "not node" "$@" >"$reports/crashes" 2>&1 &
others=$!
# Asked to end, pytest ends its servers first.
trap '[ -z "$others" ] || { kill -TERM "$operator" "$others" 2>/dev/null; wait; }; rm -rf "$reports"' EXIT
trap 'exit 130' INT TERM
"$python" -m pytest tests/cluster -m node "$@"
result=$?
for each in "$operator" "$others"; do
    wait "$each" || result=$?
done
others=
cat "$reports/operator" "$reports/crashes"
exit "$result"
