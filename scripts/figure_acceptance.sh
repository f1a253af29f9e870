#!/usr/bin/env bash
# The paper's figures over the image: codes a target call, depth and width of the trees and the target's top-1 probability by cell,
# averaged over images, for EAGLE-2 and ADT-Tree; one page with images, heatmaps and maps.
# Usage: [MODEL=NAME] [IMAGES=N] bash scripts/figure_acceptance.sh [options of `main.py generate_images`]
# 2026-11-21, embedded model, 3 prompts, T = 1: codes a call 2.02 (EAGLE-2), 1.83 (ADT-Tree); correlation with top-1 probability 0.52, 0.53.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
prompts=MSCOCO2017Val images=${IMAGES:-100}
if [ "$model" = emoji ]; then prompts=configs/emoji_held_out.txt images=${IMAGES:-16}; fi
out=runs/figure_acceptance-$model
all=(--model "$model" --drafter_type eagle --prompt "$prompts" --num_images "$images" --dump "$images")
$python main.py generate_images "${all[@]}" --output_dir "$out/eagle2" "$@"
$python main.py generate_images "${all[@]}" --peanut --output_dir "$out/adt" "$@"
$python main.py acceptance "$out/eagle2" "$out/adt" --output_dir "$out"
$python main.py report "$out/eagle2" "$out/adt" "$out" --html "$out/report.html"
