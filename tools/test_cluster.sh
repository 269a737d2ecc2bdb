#!/bin/sh
# Runs tests/chart and tests/cluster: what needs nodes in one process, and beside it in two workers, file by file, all that
# needs none, whose report follows. Where files or tests are named, those alone, in one process.
# usage: tools/test_cluster.sh PYTHON [TEST]... [PYTEST_OPTION]...
set -u
python=$1
shift
case ${1--} in -*) only= ;; *) only=yes ;; esac
# Operators are started by the dozen: in a fresh environment each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
# Memory is there, cores are not: servers and commands collect their garbage a quarter as often as they would.
export GOGC="${GOGC-400}"
report=$(mktemp)
# A kubelet sets these for its node, which is this machine.
settings=$(sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops 2>/dev/null)
give_back() {
	printf '%s\n' "$settings" | while IFS= read -r line; do
		[ -z "$line" ] || sysctl -qw "$(printf %s "$line" | tr -d ' ')" || true
	done
}
rest=
if [ -z "$only" ]; then
	# The node tests take longer: they go first where both want a core.
	nice -n 10 "$python" -m pytest tests/cluster tests/chart -m "not node" -n 2 --dist loadfile --no-loadscope-reorder \
		"$@" >"$report" 2>&1 &
	rest=$!
	set -- tests/cluster -m node "$@"
fi
# In the background too: a shell that is asked to end hears it only while it waits.
"$python" -m pytest "$@" &
first=$!
# Asked to end, pytest ends its servers first.
trap '[ -z "$first$rest" ] || kill -TERM $first $rest; wait; rm -f "$report"; give_back' EXIT
trap 'exit 130' INT TERM
wait "$first"
nodes=$? first=
others=0
if [ -n "$rest" ]; then
	wait "$rest"
	others=$? rest=
fi
cat "$report"
[ "$nodes" -eq 0 ] || exit "$nodes"
exit "$others"
