#!/usr/bin/env bash
# Makes docs/contact_sheet.jpg: images of 40 prompts that training has seen and, framed, of the 24 pairs of
# style and name that it has not seen.
# Usage: bash scripts/contact_sheet.sh [RUN_FOLDER] [JPEG_FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/contact}
$python main.py generate_images --prompt configs/emoji_contact.txt --num_images -1 --batch_size 8 \
    --heatmaps 0 --output_dir "$out"
# The picture is stored as JPEG to keep the repository small.
$python -c 'import sys; from PIL import Image; Image.open(sys.argv[1]).convert("RGB").save(sys.argv[2], quality=85)' \
    "$out/contact_sheet.png" "${2:-docs/contact_sheet.jpg}"
