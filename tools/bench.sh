#!/bin/sh
# Runs every program of benchmarks/ by itself, one after the other; each prints a table and writes its JSON.
set -eu
cd "$(dirname "$0")/.."
for program in $(grep -l '^if __name__ == "__main__":' benchmarks/*.py); do
    echo "== $program"
    .venv/bin/python "$program"
done
