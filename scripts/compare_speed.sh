#!/usr/bin/env bash
# Compares the speed of this checkout with that of another one: milliseconds per step of the embedded model under ar, eagle-2 and
# self-draft, at temperature 1 with trees of 32 nodes. The checkouts take turns, one process after the other, on the same prompts
# and seeds, and the one that goes first changes from pair to pair. Prints, per method, the median over pairs of OTHER's time
# divided by this checkout's, with its 95 % interval: above 1, this checkout is faster. Exit status 1 if a median is below 0.97.
# Nothing else may run on the machine. Both checkouts run in this one's environment.
# Usage: bash scripts/compare_speed.sh OTHER_CHECKOUT [PAIRS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
other=$(cd "$1" && pwd) here=$(pwd) pairs=${2:-15}
python=${PYTHON:-$here/.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run() {  # CHECKOUT NAME PAIR
    if ! (cd "$1" && $python main.py bench --methods eagle-2 self-draft --temperatures 1 --total_token 32 --warmup 1 --num_images 2 \
        --prompt "$here/configs/emoji_bench.txt" --output_dir "$out/$2-$3" 2> "$out/errors" | tail -n 1 > "$out/$2-$3.json"); then
        cat "$out/errors" >&2
        exit 1
    fi
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
ms = {"other": {}, "this": {}}  # checkout -> method -> milliseconds per step, one entry per pair
for checkout, methods in ms.items():
    for pair in range(pairs):
        for row in json.loads((folder / f"{checkout}-{pair}.json").read_text())["rows"]:
            methods.setdefault(row["method"], []).append(row["step_ms"])
print(f"{'':<12}{'other ms':>10}{'this ms':>10}{'ratio':>8}   95 % interval, {pairs} pairs")
slow = False
for method, times in ms["other"].items():
    ratios = np.array(times) / np.array(ms["this"][method])
    low, high = interval((ratios,), np.median)
    ratio = float(np.median(ratios))
    slow |= ratio < 0.97
    print(f"{method:<12}{np.median(times):10.3f}{np.median(ms['this'][method]):10.3f}{ratio:8.3f}   {low:.3f} to {high:.3f}")
sys.exit(slow)
PYTHON
