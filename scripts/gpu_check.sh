#!/usr/bin/env bash
# Runs the GPU tests and measures this machine's GPU: milliseconds per step, memory, equal images.
# Prints one table and, as the last line, one JSON document. Exit status: 0; 1 if something is wrong; 2 if it cannot run here.
# Usage: bash scripts/gpu_check.sh [PART ...] [options]     (`main.py gpu_check --help` names them and the default)
# It runs with PYTHON=..., or else with the first of .venv and python3 that has a CUDA build of torch and all packages, or else it
# sets up .venv with PyPI's build of torch (TORCH_INDEX_URL=... names another index, for drivers older than CUDA 13).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
needed="torch numpy safetensors tokenizers yaml tqdm PIL scipy pytest"

# Prints what an interpreter lacks to use a GPU, or nothing.
lacks() {
    command -v "$1" >/dev/null || { echo "it does not exist"; return; }
    # shellcheck disable=SC2086 # the names are words
    "$1" -c 'import sys
from importlib.metadata import version
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
if sys.version_info < (3, 11):
    print("it is older than Python 3.11")
elif missing:
    print("it has no", ", ".join(missing))
elif tuple(map(int, version("torch").split(".")[:2])) < (2, 11):
    print(f"its torch {version('"'torch'"')} is older than 2.11")
else:
    import torch
    if not torch.version.cuda:
        print(f"its torch {torch.__version__} is a build for CPUs")' $needed 2>/dev/null || echo "it does not run"
}
refuse() { echo "gpu_check: $*" >&2; exit 2; }

if [ -n "${PYTHON:-}" ]; then
    reason=$(lacks "$PYTHON")
    [ -z "$reason" ] || refuse "PYTHON=$PYTHON cannot use a GPU: $reason"
else
    # PYTHON becomes the first interpreter that lacks nothing, or stays empty if there is none.
    for PYTHON in .venv/bin/python python3 ""; do
        [ -n "$PYTHON" ] && [ -n "$(lacks "$PYTHON")" ] || break
    done
fi
if [ -z "$PYTHON" ]; then
    nvidia-smi >/dev/null 2>&1 || refuse "there is no GPU here: no NVIDIA driver answers nvidia-smi"
    bash scripts/setup.sh requirements-gpu.txt ||
        refuse "set-up failed; without network name an interpreter with a CUDA build of torch by PYTHON="
    PYTHON=.venv/bin/python
fi
exec "$PYTHON" main.py gpu_check "$@"
