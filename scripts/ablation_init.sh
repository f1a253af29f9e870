#!/usr/bin/env bash
# The ablation of the adaptive tree's start: the left cell's state (horizontal), that of the cell above, or any cell's, all else as
# by default; the paper finds horizontal best. Usage: [MODEL=NAME] bash scripts/ablation_init.sh [TEMPERATURE] [options of sweep]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
t=${1:-0}
shift || true
prompts=MSCOCO2017Val count=100
if [ "$model" = emoji ]; then prompts=configs/emoji_held_out.txt count=16; fi
out=runs/ablation_init-$model-t$t
$python main.py sweep --model "$model" --temperature "$t" --betas 0.5 --step_depths 1 --step_widths 1 \
    --inits horizontal vertical random --prompt "$prompts" --num_images "$count" --output_dir "$out" "$@"
$python main.py report "$out"
$python main.py report "$out" --html "$out/report.html"
