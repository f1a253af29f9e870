#!/usr/bin/env bash
# The race of the AR baseline and a method: one page that needs nothing else, and the README's moving picture.
# The clocks are those of the machine as it was: let it do nothing else meanwhile.
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
$python main.py report "$out/left" "$out/right" --html "$out/race.html"
$python main.py report "$out/left" "$out/right" --animation "$out/race.webp"
