#!/usr/bin/env bash
# The README's picture: 48 prompts that training saw and, framed, 16 (style, name) pairs that it did not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/contact}
$python main.py generate_images --peanut --prompt configs/emoji_contact.txt --num_images -1 --batch_size 8 \
    --heatmaps 1 --output_dir "$out"
# The README's copies: JPEG, so that the repository stays small.
$python - "$out" <<'PY'
import sys
from pathlib import Path

from PIL import Image

out = Path(sys.argv[1])
Image.open(out / "contact_sheet.png").convert("RGB").save("docs/contact_sheet.jpg", quality=85)
Image.open(next(out.glob("heatmap_*.png"))).convert("RGB").save("docs/heatmap.jpg", quality=85)
PY
