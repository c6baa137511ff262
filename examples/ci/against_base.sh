#!/usr/bin/env bash
# Fails if a training script's data loading is slower than at another commit: against_base.sh BASE SCRIPT [ARGS]...
#
# Both run on this machine, one after the other; a report of another machine says nothing. FAIL_ABOVE is the part of the
# samples/s that may be missing. The reports and a page are left in OUT.
set -euo pipefail
test $# -ge 2 || { echo "usage: $0 BASE SCRIPT [ARGS]..." >&2; exit 2; }
base=$1; shift
out=$(mkdir -p "${OUT:-stoker-ci}" && cd "${OUT:-stoker-ci}" && pwd)
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree" 2>/dev/null || rm -rf "$tree"' EXIT
git worktree add --quiet --detach "$tree" "$base"

(cd "$tree" && stoker run --json "$out/base.json" "$@")
stoker run --json "$out/head.json" --html "$out/head.html" \
  --fail-on "slower-than=$out/base.json" --fail-above "${FAIL_ABOVE:-10%}" "$@"
