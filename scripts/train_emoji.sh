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
$python main.py train_emoji distil --work_dir "$work"
$python main.py train_emoji drafter --work_dir "$work"
$python main.py train_emoji export --work_dir "$work"  # again, for the drafter's rows of the model card
$python main.py train_emoji contact --work_dir "$work"
