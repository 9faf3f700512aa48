#!/usr/bin/env bash
# Prints the path of a Python that jaxkv runs on: python3 if it is new enough, else the newest one found.
#
#   scripts/find_python.sh            $PYTHON if set, else as above
#   scripts/find_python.sh --newest   the newest one, whatever python3 is
set -euo pipefail

# Prints "MINOR PATH" if the command is Python >= 3.11 and can make virtual environments.
probe() {
    "$1" -c '
import sys, ensurepip, venv
if sys.version_info >= (3, 11):
    print(sys.version_info.minor, sys.executable)
' 2>/dev/null || true
}

candidates() {
    printf '%s\n' python3
    for minor in 14 13 12 11; do printf '%s\n' "python3.$minor"; done
    if command -v pyenv >/dev/null; then printf '%s\n' "$(pyenv root)"/versions/*/bin/python3; fi
}

if [ "${1:-}" != --newest ]; then
    first=$(probe "${PYTHON:-python3}")
    if [ -n "${PYTHON:-}" ] && [ -z "$first" ]; then
        echo "PYTHON=$PYTHON is not Python >= 3.11 with the modules venv and ensurepip" >&2
        exit 1
    fi
    if [ -n "$first" ]; then
        echo "${first#* }"
        exit
    fi
fi

newest=$(candidates | while read -r candidate; do probe "$candidate"; done | sort -s -k1,1nr | head -n 1)
if [ -z "$newest" ]; then
    echo "jaxkv needs Python >= 3.11 with the modules venv and ensurepip; none was found. Install one, or set PYTHON." >&2
    exit 1
fi
echo "${newest#* }"
