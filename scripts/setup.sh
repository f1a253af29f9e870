#!/usr/bin/env bash
# Creates a virtual environment in .venv and installs the pinned packages of a requirements file into it.
# Usage: bash scripts/setup.sh [requirements file]     (default: requirements.txt)
# A second call with the same file does nothing. PYTHON=... names the interpreter, 3.11 or later. TORCH_INDEX_URL=...
# names the package index of the torch and torchvision builds, for instance that of the CPU builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=${1:-requirements.txt}

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if ! { [ -x .venv/bin/python ] && suitable .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if suitable "$python"; then break; fi
        python=
    done
    if [ -n "$python" ]; then
        echo "setup: creating .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    elif [ -z "${PYTHON:-}" ] && command -v uv >/dev/null; then
        echo "setup: creating .venv with a Python that uv brings"
        uv venv --quiet --clear --seed --python 3.12 .venv
    else
        echo "setup: found no Python 3.11 or later with the modules venv and ensurepip (Debian: package python3-venv);" \
            "name one with PYTHON=/path/to/python3, or install uv, which brings one" >&2
        exit 1
    fi
fi

# A mark in .venv holds the checksum of all that decides what is installed. The requirements files include one another.
checksum() { cat requirements*.txt scripts/setup.sh scripts/torchvision_operators.py | cksum; }
mark() { echo ".venv/.installed-$(basename "$1")"; }
if [ "$(cat "$(mark "$requirements")" 2>/dev/null)" = "$(checksum)" ]; then exit 0; fi

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
pin() { grep -h "^$1==" requirements.txt requirements-eval.txt; }

echo "setup: installing $requirements into .venv (some minutes the first time)"
# torch comes first and alone. Its pin is then satisfied, and no other package can bring another build.
install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(pin torch)"
install -r "$requirements"

# torchvision must have been built for this torch. PyPI has one build; torch's own index has one for each build of torch.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
operators=$packages/torchvision_operators
# -S skips .pth files, so that an earlier installation of torchvision_operators does not hide a build that does not fit.
fits() { [ ! -e "$packages/torchvision" ] || PYTHONPATH=$packages .venv/bin/python -S -c 'import torchvision' 2>/dev/null; }
if ! fits && [ -n "${TORCH_INDEX_URL:-}" ]; then
    install --index-url "$TORCH_INDEX_URL" --no-deps --force-reinstall "$(pin torchvision)" ||
        echo "setup: $TORCH_INDEX_URL has no $(pin torchvision); keeping the build of the package index" >&2
fi
if fits; then
    rm -f "$operators.py" "$operators.pth"
else
    echo "setup: this build of torchvision does not fit this torch; declaring its operators in .venv"
    cp scripts/torchvision_operators.py "$operators.py"
    echo "import torchvision_operators" >"$operators.pth"
    .venv/bin/python -m py_compile "$operators.py"
    .venv/bin/python -c 'import torchvision'
fi

for file in requirements.txt "$requirements"; do checksum >"$(mark "$file")"; done
