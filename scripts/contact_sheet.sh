#!/usr/bin/env bash
# The README's picture: 40 prompts that training saw and, framed, the 24 (style, name) pairs that it did not.
# Usage: bash scripts/contact_sheet.sh [folder of the run] [JPEG]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/contact}
$python main.py generate_images --prompt configs/emoji_contact.txt --num_images -1 --batch_size 8 \
    --heatmaps 0 --output_dir "$out"
# JPEG, so that the repository stays small.
$python -c 'import sys; from PIL import Image; Image.open(sys.argv[1]).convert("RGB").save(sys.argv[2], quality=85)' \
    "$out/contact_sheet.png" "${2:-docs/contact_sheet.jpg}"
