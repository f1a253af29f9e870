#!/usr/bin/env bash
# Compares the speed of this checkout with that of another one: milliseconds per step of the embedded model under the methods, trees
# and temperatures below, for one image or eight in flight. The checkouts take turns, one process after the other, on the same
# prompts and seeds, and the one that goes first changes from pair to pair. Prints, per row of bench, the median over pairs of
# OTHER's time divided by this checkout's, with its 95 % interval: above 1, this checkout is faster. Exit status 1 if a median is
# below 0.97, or with eight images in flight, whose times vary more, below 0.94.
# Nothing else may run on the machine. Both checkouts run in this one's environment.
# Usage: bash scripts/compare_speed.sh OTHER_CHECKOUT [PAIRS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
other=$(cd "$1" && pwd) here=$(pwd) pairs=${2:-15}
python=${PYTHON:-$here/.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run() {  # CHECKOUT NAME PAIR
    while read -r number flags; do
        # shellcheck disable=SC2086 # flags are words
        if ! (cd "$1" && $python main.py bench --warmup 1 --prompt "$here/configs/emoji_bench.txt" --output_dir "$out/$2-$3-$number" \
            $flags 2> "$out/errors" < /dev/null | tail -n 1 > "$out/$2-$3-$number.json"); then
            cat "$out/errors" >&2
            exit 1
        fi
    done << 'FLAGS'
1 --num_images 1 --temperatures 1 --methods eagle-2 self-draft --total_token 32
2 --num_images 1 --temperatures 0 --methods adt-tree
3 --num_images 8 --temperatures 1 --methods self-draft --total_token 16 --batch_size 8
FLAGS
}
for ((pair = 0; pair < pairs; pair++)); do
    if ((pair % 2)); then run "$here" this $pair; run "$other" other $pair; else run "$other" other $pair; run "$here" this $pair; fi
done
$python - "$out" "$pairs" << 'PYTHON'
import json
import sys
from pathlib import Path

import numpy as np

from eval.columns import interval

folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
numbers = sorted(file.stem.split("-")[-1] for file in folder.glob("this-0-*.json"))  # of the lines of FLAGS
ms = {"other": {}, "this": {}}  # checkout -> row of bench -> milliseconds per step, one entry per pair
for checkout, times in ms.items():
    for file in (folder / f"{checkout}-{pair}-{number}.json" for pair in range(pairs) for number in numbers):
        for row in json.loads(file.read_text())["rows"]:
            times.setdefault((file.stem.split("-")[-1], row["method"], row["temperature"], row["batch_size"]), []).append(row["step_ms"])
print(f"{'':<12}{'T':>3}{'images':>8}{'other ms':>10}{'this ms':>10}{'ratio':>8}   95 % interval, {pairs} pairs")
slow = False
for key, other in ms["other"].items():
    _, method, temperature, images = key
    this = np.array(ms["this"][key])
    ratios = np.array(other) / this
    low, high = interval((ratios,), np.median)
    ratio = float(np.median(ratios))
    slow |= ratio < (0.97 if images == 1 else 0.94)
    print(
        f"{method:<12}{temperature:3g}{images:8}{np.median(other):10.3f}{np.median(this):10.3f}{ratio:8.3f}"
        f"   {low:.3f} to {high:.3f}"
    )
sys.exit(slow)
PYTHON
