#!/bin/sh
# The sweep that sets the defaults of the adaptive tree (adt_tree/policy.py) on the embedded model's training prompts:
# first the shape of its bounds and budget, then beta, l_d and l_k, then the initialisation, at T = 1 and T = 0.
# Tables on stdout, all points as JSON under runs/sweep_*. Its result is dated in docs/LOG.md.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
for t in 1 0; do
  "$python" main.py sweep --temperature "$t" --num_images 4 --output_dir "runs/sweep_bounds_t$t" \
    --betas 0.5 --step_depths 1 --step_widths 1 --depths 1:3:6 1:4:8 2:5:10 --widths 1:2:4 1:4:8 --budgets 10 15 24 \
    --fixed_depths 3 5 --fixed_widths 2 4 "$@"
  "$python" main.py sweep --temperature "$t" --num_images 4 --output_dir "runs/sweep_steps_t$t" \
    --betas 0.3 0.5 0.7 0.9 --step_depths 1 2 --step_widths 0 1 2 "$@"
  "$python" main.py sweep --temperature "$t" --num_images 8 --output_dir "runs/sweep_init_t$t" \
    --betas 0.5 --step_depths 1 --step_widths 1 --inits horizontal vertical random "$@"
done
