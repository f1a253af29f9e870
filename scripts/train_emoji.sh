#!/usr/bin/env bash
# The embedded model from nothing: about four hours on two CPU cores. Every stage resumes where it was stopped.
# Needs `bash scripts/setup.sh requirements-train.txt` and npm. Usage: bash scripts/train_emoji.sh [work folder]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-data/emoji}
python=${PYTHON:-.venv/bin/python}
$python main.py train_emoji data --work_dir "$work"
$python main.py train_emoji tokenizer --work_dir "$work"
$python main.py train_emoji bpe --work_dir "$work"
$python main.py train_emoji target --work_dir "$work"
$python main.py train_emoji export --work_dir "$work"
$python main.py train_emoji prompts --work_dir "$work" --num_prompts 1600 --mixed 0.75
$python main.py generate_train_data --prompt "$work/drafter_prompts.txt" --output_dir "$work/drafter_data"
$python main.py train_drafter --config configs/emoji-drafter.yaml --data_dir "$work/drafter_data" \
  --save_dir "$work/drafter" --export ckpts/emoji/drafter
$python main.py train_emoji export --work_dir "$work"  # again, for the drafter's rows of the model card
$python main.py train_emoji contact --work_dir "$work"
