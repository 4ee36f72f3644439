#!/usr/bin/env bash
# All that is to be shown on a machine with GPUs, rank i on GPU i where there are enough of them:
#   bash tests/on_gpus.sh RESULTS [options of `stepgraph bench peers`]
# Every part runs, also behind one that failed; RESULTS is a folder for their output.
set -uo pipefail
results=${1:?where to put the results}
shift
mkdir -p "$results"
failed=0
part() {
  local name=$1
  shift
  echo "== $name"
  "$@" >"$results/$name" 2>"$results/$name.err" || { echo "$name failed"; failed=1; }
  tail -n 5 "$results/$name"
}
part peers.json python3 -m stepgraph.tools.cli bench peers --format json "$@"
part tests.txt python3 -m pytest -m "cuda and not exhaustive" tests
part long.txt python3 -m pytest -m "cuda and exhaustive" -s tests
exit "$failed"
