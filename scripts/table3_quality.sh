#!/usr/bin/env bash
# Measures the quality of each method's images, in runs/quality-MODEL, and prints a table. A second call resumes an interrupted run.
# Needs the packages of `bash scripts/setup.sh requirements-eval.txt`.
# Without MODEL, it computes the EffNet-FD (which is not FID) between images of the embedded model by each method and images of
# the AR baseline at another seed. The distances between images of the AR baseline at different seeds show how far apart samples
# of the same distribution are. This takes 15 to 60 minutes on two CPU cores.
# With MODEL=anole, llamagen, ..., it computes the paper's scores on 100 captions of MS-COCO 2017: CLIP, HPS v2.1, Inception
# Score, aesthetic score and, if REF_DIR names a folder of real images, FID. The weights of the metrics are downloaded. No
# results exist for these models yet.
# Usage: [MODEL=NAME] bash scripts/table3_quality.sh [options of `main.py generate_images` for every method]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-emoji}
out=runs/quality-$model methods=()

run() {  # NAME [OPTION...]: generates the images of one method
    methods+=("$out/$1")
    "$python" main.py generate_images --output_dir "$out/$1" "${@:2}"
}

if [ "$model" != emoji ]; then
    for name in ar eagle2 lantern adt adt-lantern; do
        run "$name" --config "configs/$name.yaml" --model "$model" --temperature 1 "$@"
        "$python" main.py evaluate --fake_dir "$out/$name" --metrics clip hps is aesthetic ${REF_DIR:+fid --ref_dir "$REF_DIR"}
    done
else
    same=(--prompt configs/emoji_contact.txt --num_images -1 --batch_size 16 --heatmaps 0 --precision fp32 "$@")
    for seed in 42 43 44; do run "ar_s$seed" --method ar --random_seed "$seed" "${same[@]}"; done
    run self_draft --method self-draft --total_token 32 "${same[@]}"
    run eagle2 --method eagle-2 "${same[@]}"
    run adt --method adt-tree "${same[@]}"
    for point in 100:0.1 100:0.3 100:0.8 100:2 1000:0.5 1000:0.8 1000:1; do
        k=${point%:*} delta=${point#*:}
        run "self_draft_k${k}_d$delta" --method self-draft --lantern --lantern_k "$k" --lantern_delta "$delta" "${same[@]}"
    done
    for folder in "${methods[@]}"; do
        [ "$folder" = "$out/ar_s43" ] || "$python" main.py evaluate --metrics effnet_fd --fake_dir "$folder" --ref_dir "$out/ar_s43"
    done
fi
"$python" main.py report "${methods[@]}"
