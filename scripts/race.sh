#!/usr/bin/env bash
# Replays the AR baseline and another method side by side in real time: writes runs/race-MODEL/race.html, a page that needs no
# other file, and race.webp, the animation in README.md. Run it on an idle machine, because it shows measured times.
# Usage: [MODEL=NAME] [METHOD=NAME] [PROMPT=TEXT] bash scripts/race.sh [options of `main.py generate_images`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
prompt=${PROMPT:-twemoji emoji of eggplant}
out=runs/race-$model
one=(--model "$model" --prompt "$prompt" --num_images 1 --record 1)
$python main.py generate_images "${one[@]}" --method ar --output_dir "$out/left" "$@"
$python main.py generate_images "${one[@]}" --method "${METHOD:-self-draft}" --output_dir "$out/right" "$@"
$python main.py report "$out/left" "$out/right" --race "$out/race.html"
$python main.py report "$out/left" "$out/right" --race "$out/race.webp"
