#!/usr/bin/env bash
# What a method costs in images for what it gains in speed. Interrupted runs go on.
# The embedded model: EffNet-FD (no FID) and equal pixels of exact and relaxed arms, against plain decoding at the same seed and at two
# others. Table on stdout; table3_quality.json and quality_speed.png under runs/quality. A quarter of an hour to an hour on two CPU cores. A result with
# commit, device and date: docs/results/table3_quality.json, docs/LOG.md. Needs `bash scripts/setup.sh requirements-eval.txt`.
# MODEL=anole, llamagen, ...: the paper's scores (CLIP, HPS v2.1, Inception Score, aesthetic; FID with REF_DIR=, real images) of every
# method on 100 captions of MS-COCO 2017, as runs/quality-MODEL/report.html. Weights of the metrics are fetched. No result is known yet.
# Usage: [MODEL=NAME] bash scripts/table3_quality.sh [options of `main.py generate_images` for every arm]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}

if [ "$model" != emoji ]; then
    out=runs/quality-$model arms=()
    for arm in ar eagle2 lantern adt adt-lantern; do
        arms+=("$out/$arm")
        "$python" main.py generate_images --config "configs/$model-$arm.yaml" --temperature 1 --output_dir "$out/$arm" "$@"
        "$python" main.py eval_fid_clip --fake_dir "$out/$arm" --how_many -1 ${REF_DIR:+--ref_dir "$REF_DIR"}
        "$python" main.py eval_hpsv2 --image_path "$out/$arm"
        "$python" main.py eval_quality --fake_dir "$out/$arm" --metrics is aesthetic
    done
    exec "$python" main.py report "${arms[@]}" --html "$out/report.html"
fi

out=runs/quality
draw() {
    local name=$1
    shift
    "$python" main.py generate_images --prompt configs/emoji_contact.txt --num_images -1 --batch_size 16 --heatmaps 0 --precision fp32 \
        --output_dir "$out/$name" "$@"
}
for seed in 42 43 44; do draw "ar_s$seed" --model_type base --random_seed "$seed" "$@"; done
draw jacobi --drafter_type jacobi "$@"
draw eagle2 --drafter_type eagle "$@"
draw adt --drafter_type eagle --peanut "$@"
arms=("$out/jacobi" "$out/eagle2" "$out/adt")
for point in 100:0.1 100:0.3 100:0.8 100:2 1000:0.5 1000:0.8 1000:1; do
    name="jacobi_k${point%:*}_d${point#*:}"
    draw "$name" --drafter_type jacobi --lantern --lantern_k "${point%:*}" --lantern_delta "${point#*:}" "$@"
    arms+=("$out/$name")
done
"$python" main.py quality_curve --base "$out/ar_s42" --others "$out/ar_s43" "$out/ar_s44" --arms "${arms[@]}" --output_dir "$out"
