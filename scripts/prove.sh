#!/usr/bin/env bash
# Compiles kernels and steps with the TPU and GPU compilers, for chips that are not there, and checks what came out.
# Sets up the environment with these compilers first (jaxkv[plan], some 400 MB).
#
#   scripts/prove.sh [PYTEST ARGUMENT...]     `-m exhaustive tests/compile`: every model family
set -euo pipefail
cd "$(dirname "$0")/.."
pytest_args=("$@")
. scripts/setup.sh test plan
export JAXKV_NEED_COMPILERS=1  # a skipped proof counts as a failed one
exec "$python" -m pytest -n auto --maxprocesses 4 -m compile ${pytest_args[@]+"${pytest_args[@]}"}
