#!/usr/bin/env bash
# What a GPU has to prove, on one device: the tests marked gpu (the CPU's tokens in fp32, one wait per step), and milliseconds per step
# with and without CUDA graphs: of the embedded model, beside transformers, and of the published dimensions with random weights, beside
# the time it takes to read them once. No figure yet: it has not been run on a GPU.
# Usage: bash scripts/gpu_check.sh [options of `main.py bench`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=runs/gpu_check-$(git rev-parse --short HEAD)
methods=(--methods eagle-1 eagle-2 self-draft --temperatures 1 --warmup 2 --profile)
$python -m pytest -q -m gpu tests
for graphs in --no-cuda_graphs --cuda_graphs; do
    $python main.py bench "${methods[@]}" --device cuda --reference transformers $graphs --output_dir "$out/emoji$graphs" "$@"
    for model in anole lumina_mgpt llamagen2; do
        $python main.py bench "${methods[@]}" --device cuda --model "$model" --random_weights --num_images 2 $graphs \
            --output_dir "$out/$model$graphs" "$@"
    done
done
$python main.py report "$out"/*
