#!/usr/bin/env bash
# Images a minute with 1 to 16 images in flight, plain and self-drafted, and the tree sizes that measured costs choose: table on
# stdout, throughput.json and throughput.png under runs/throughput. An interrupted run goes on.
# Usage: bash scripts/throughput.sh [options of `main.py throughput`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-.venv/bin/python}" main.py throughput --temperature 1 --batch_sizes 1 2 4 8 16 --num_images 32 \
    --output_dir runs/throughput "$@"
