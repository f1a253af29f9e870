#!/usr/bin/env bash
# What relaxed acceptance costs in images for what it gains in speed, on the embedded model: EffNet-FD (no FID) and equal pixels of
# exact and relaxed arms, against plain decoding at the same seed and at two others. Table on stdout; table3_quality.json and
# quality_speed.png under runs/quality. A result with commit, device and date: docs/LOG.md, docs/quality_speed.png. About an hour on two
# CPU cores; interrupted runs go on. Needs `bash scripts/setup.sh requirements-eval.txt`.
# Usage: bash scripts/table3_quality.sh [prompt file] [options of `main.py generate_images` for every arm]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
prompts=${1:-configs/emoji_contact.txt}
shift || true
out=runs/quality
draw() {
    local name=$1
    shift
    "$python" main.py generate_images --prompt "$prompts" --num_images -1 --batch_size 16 --heatmaps 0 --precision fp32 \
        --output_dir "$out/$name" "$@"
}
for seed in 42 43 44; do draw "ar_s$seed" --model_type base --random_seed "$seed" "$@"; done
draw jacobi --drafter_type jacobi "$@"
draw adt --drafter_type eagle --peanut "$@"
arms=("$out/jacobi" "$out/adt")
for point in 100:0.1 100:0.3 100:0.8 100:2 1000:0.5 1000:0.8 1000:1; do
    name="jacobi_k${point%:*}_d${point#*:}"
    draw "$name" --drafter_type jacobi --lantern --lantern_k "${point%:*}" --lantern_delta "${point#*:}" "$@"
    arms+=("$out/$name")
done
"$python" main.py quality_curve --base "$out/ar_s42" --others "$out/ar_s43" "$out/ar_s44" --arms "${arms[@]}" --output_dir "$out"
