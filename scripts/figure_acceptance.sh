#!/usr/bin/env bash
# Reproduces the paper's maps for EAGLE-2 and ADT-Tree: codes per target call, depth and width of the trees and the target's
# top-1 probability in each cell, averaged over the images. Writes runs/figure_acceptance-MODEL/acceptance.png.
# Usage: [MODEL=NAME] [IMAGES=N] bash scripts/figure_acceptance.sh [options of `main.py generate_images`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
prompts=MSCOCO2017Val images=${IMAGES:-100}
if [ "$model" = emoji ]; then prompts=configs/emoji_bench.txt images=${IMAGES:-16}; fi
out=runs/figure_acceptance-$model
all=(--model "$model" --prompt "$prompts" --num_images "$images")
for method in eagle-2 adt-tree; do
    $python main.py generate_images "${all[@]}" --method "$method" --output_dir "$out/$method" "$@"
done
$python main.py report "$out/eagle-2" "$out/adt-tree"
$python main.py report "$out/eagle-2" "$out/adt-tree" --figures "$out"
