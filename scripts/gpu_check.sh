#!/usr/bin/env bash
# What a GPU has to prove, under 10 minutes on one device: the tests marked gpu; the CPU's tokens in fp32; milliseconds a step and a
# cycle, with and without CUDA graphs, of the embedded model and of models of Anole's, Lumina-mGPT's and LlamaGen-XL's dimensions with
# random weights, against the measured copy bandwidth; transformers' generate() beside them. One JSON document, on stdout and under
# docs/results/. Without a GPU everything runs on the CPU with tiny dimensions, and the document says so.
# No figure yet: it has not been run on a GPU. Usage: bash scripts/gpu_check.sh [options of `main.py gpu_check`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
commit=$(git rev-parse --short HEAD)
exec "$python" main.py gpu_check --output "docs/results/gpu_check_$commit.json" "$@"
