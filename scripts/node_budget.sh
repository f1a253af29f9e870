#!/usr/bin/env bash
# tau and speed-up against the nodes drafted, for every drafter beside plain decoding, on held-out prompts of the embedded
# model: table on stdout, budget.json and budget.png under runs/. Shapes at each budget: `main.py budget --help`. An
# interrupted run goes on. Usage: bash scripts/node_budget.sh [TEMPERATURE] [options of `main.py budget`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
t=${1:-1}
shift || true
exec "${PYTHON:-.venv/bin/python}" main.py budget --temperature "$t" --budgets 8 16 32 64 128 \
    --drafters eagle jacobi hybrid --output_dir "runs/budget_t$t" "$@"
