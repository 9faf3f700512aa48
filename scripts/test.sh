#!/usr/bin/env bash
# Sets up .venv with what the tests need, and runs them all, or those that pytest's arguments choose.
#
#   scripts/test.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
pytest_args=("$@")
. scripts/setup.sh test 'parity?' gemma3
# XLA compiles for the CPU in half the time without LLVM's optimisations, and the tests wait for little else. Choose
# another level with XLA_FLAGS: the last one counts. `.ci/run` tests on the newest jax with all optimisations.
export XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
exec "$python" -m pytest -n auto --maxprocesses 4 --dist worksteal ${pytest_args[@]+"${pytest_args[@]}"}
