#!/usr/bin/env bash
# Trains the embedded model and its drafter from scratch and writes them to ckpts/emoji.
# The tokenizer takes half an hour. The target then trains on PICTURES pictures, over the last DECAY of which its rates fall; two
# cores with AMX process 80,000 pictures per hour. Set PRECISION=fp32 on a CPU without bfloat16 units.
# A second call resumes each stage where it stopped. To continue training from ckpts/emoji itself, first copy it into the work
# folder by `python -m recipes.emoji.restore`.
# Needs npm and the packages of `bash scripts/setup.sh requirements-train.txt`. Usage: bash scripts/train_emoji.sh [WORK_FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-data/emoji}
python=${PYTHON:-.venv/bin/python}
pictures=${PICTURES:-320000} decay=${DECAY:-20000} precision=${PRECISION:-bf16}
# By default glibc returns the memory of freed tensors to the system and pays page faults to get it back. These settings keep it.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456
emoji() { "$python" -m "recipes.emoji.$1" "${@:2}" --work_dir "$work"; }

emoji data
emoji tokenizer --rate 6 --flat 0.3
emoji bpe
emoji target --precision "$precision" --compile --max_pictures "$pictures" --decay_pictures "$decay"
emoji export
emoji measure
emoji recognise
emoji prompts --num_prompts 5000
"$python" main.py generate_train_data --prompt "$work/drafter_prompts.txt" --output_dir "$work/drafter_data"
"$python" main.py train_drafter --config configs/emoji-drafter.yaml --data_dir "$work/drafter_data" \
  --save_dir "$work/drafter" --export ckpts/emoji/drafter
emoji export  # a second time, so that checksums.json covers the drafter
rm -rf "$work/contact"
PYTHON=$python bash scripts/contact_sheet.sh "$work/contact" "$work/contact.jpg"
