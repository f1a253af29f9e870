#!/usr/bin/env bash
# The embedded model from nothing: half an hour for the tokenizer, then the target for as long as there is time
# (PICTURES, all resumes together). Two cores with AMX learn 80,000 an hour; on a CPU without bfloat16 units set PRECISION=fp32.
# Every stage resumes where it was stopped; `main.py train_emoji restore` puts ckpts/emoji back, to go on from there.
# Needs `bash scripts/setup.sh requirements-train.txt` and npm. Usage: bash scripts/train_emoji.sh [work folder]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-data/emoji}
python=${PYTHON:-.venv/bin/python}
pictures=${PICTURES:-300000} decay=${DECAY:-20000} precision=${PRECISION:-bf16}
# glibc gives freed tensors back and faults them in again; this keeps them.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456
emoji() { "$python" main.py train_emoji "$@" --work_dir "$work"; }

emoji data
emoji tokenizer --rate 6 --flat 0.3
emoji bpe
emoji target --precision "$precision" --compile --max_pictures "$pictures"
emoji target --precision "$precision" --compile --decay_pictures "$decay"
emoji export
emoji measure
emoji recognise
emoji prompts --num_prompts 5000
"$python" main.py generate_train_data --prompt "$work/drafter_prompts.txt" --output_dir "$work/drafter_data"
"$python" main.py train_drafter --config configs/emoji-drafter.yaml --data_dir "$work/drafter_data" \
  --save_dir "$work/drafter" --export ckpts/emoji/drafter
emoji export  # again, for the figures of the model card
rm -rf "$work/contact"
PYTHON=$python bash scripts/contact_sheet.sh "$work/contact" "$work/contact.jpg"
