#!/usr/bin/env bash
# Measures and prints the table of table1_coco.sh or table2_parti.sh, which call it, beside the paper's: first by the published
# rejection rule, then by the coupled rule. Writes the plot runs/NAME-MODEL/NAME-MODEL_speed.png.
# Usage: MODEL=... bash scripts/speed_table.sh NAME PAPER_TABLE PROMPTS EMOJI_PROMPTS [options of `main.py bench`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
name=$1 paper=$2 prompts=$3 emoji_prompts=$4
shift 4
count=100
# The embedded model knows the names of emoji, but no captions of photographs.
if [ "$model" = emoji ]; then prompts=$emoji_prompts count=16; fi
out=runs/$name-$model
$python main.py bench --model "$model" --methods eagle-2 eagle-2-lantern adt-tree adt-tree-lantern --temperatures 0 1 \
    --vary verify=rejection,coupled --prompt "$prompts" --num_images "$count" --output_dir "$out" "$@"
$python main.py report "$out" --paper "$paper"
$python main.py report "$out" --figures "$out"
