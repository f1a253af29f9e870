#!/usr/bin/env bash
# One table of the paper: every method against the AR baseline at T = 0 and 1, as table, plot and page. Called by table1_coco.sh and
# table2_parti.sh. Usage: MODEL=... bash scripts/speed_table.sh NAME PAPER_TABLE PROMPTS EMOJI_PROMPTS [options of `main.py bench`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
name=$1 paper=$2 prompts=$3 own=$4
shift 4
count=100
if [ "$model" = emoji ]; then prompts=$own count=16; fi  # it has seen emoji names, and nothing of photographs
out=runs/$name-$model
$python main.py bench --model "$model" --methods eagle-2 eagle-2-lantern adt-tree adt-tree-lantern --temperatures 0 1 \
    --prompt "$prompts" --num_images "$count" --output_dir "$out" "$@"
$python main.py report "$out" --paper "$paper"
$python main.py report "$out" --paper "$paper" --html "$out/report.html"
