#!/usr/bin/env bash
# A virtual environment in .venv with everything pinned. Usage: bash scripts/setup.sh [requirements file]
# Does nothing when .venv already holds what the file asks for. PYTHON=... picks the interpreter (3.11 or later);
# TORCH_INDEX_URL=... fetches torch alone from another index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted=${1:-requirements.txt}

recent() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if ! { [ -x .venv/bin/python ] && recent .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if recent "$python"; then break; fi
        python=
    done
    if [ -z "$python" ]; then
        echo "setup: no Python 3.11 or later with venv and ensurepip found (on Debian: the python3-venv package);" \
            "name one with PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "setup: creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

# The files include one another, so all of them make the mark.
sum_of() { cat requirements*.txt | cksum; }
mark_of() { echo ".venv/.installed-$(basename "$1")"; }
if [ "$(cat "$(mark_of "$wanted")" 2>/dev/null)" != "$(sum_of)" ]; then
    echo "setup: installing $wanted into .venv (some minutes the first time)"
    torch=$(grep '^torch==' requirements.txt)
    # torch first and alone: what follows then finds its pin satisfied and cannot bring another build.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$wanted"
    for file in requirements.txt "$wanted"; do sum_of >"$(mark_of "$file")"; done
fi
