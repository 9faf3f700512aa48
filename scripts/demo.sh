#!/usr/bin/env bash
# Sets up .venv with jaxkv and SmolLM2-135M, and answers a question with it.
#
#   scripts/demo.sh ["another question"]
set -euo pipefail
cd "$(dirname "$0")/.."
question=${1:-Why is the sky blue?}
set --  # or the sourced script would take the question for an extra
. scripts/setup.sh
echo "\$ jaxkv generate -m smollm2 \"$question\" --max-tokens 64 --temperature 0 --stats" >&2
exec "$python" -m jaxkv generate -m smollm2 "$question" --max-tokens 64 --temperature 0 --stats
