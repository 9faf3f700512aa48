#!/usr/bin/env bash
# Style, format, types and the import rules of the two towers. Runs all four, fails if one does.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dev 'parity?'
bin=$(dirname "$python")
status=0
check() {
    echo "--- $*"
    "$bin/$@" || status=1
}
check ruff check .
check ruff format --check .
check basedpyright --pythonpath "$python"
check lint-imports
exit $status
