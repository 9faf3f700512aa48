#!/usr/bin/env bash
# Sets up .venv with what the tests need, and runs them all, or those that pytest's arguments choose.
#
#   scripts/test.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
pytest_args=("$@")
. scripts/setup.sh test 'parity?' gemma3
exec "$python" -m pytest -n auto --maxprocesses 4 --dist worksteal ${pytest_args[@]+"${pytest_args[@]}"}
