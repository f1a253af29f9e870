#!/bin/sh
# The search behind the defaults of the adaptive tree (AdaptConstants in adt_tree/policy.py), on pairs of the embedded model
# that neither training nor bench has. Phases are run one by one: each starts from the defaults in the code, so put its winner
# there before the next. Tables on stdout, all points as JSON under runs/. Results with date and device: docs/LOG.md.
# Usage: scripts/sweep_adt.sh bounds|steps|init TEMPERATURE [options of `main.py sweep`]     trees of the drafter network
#        scripts/sweep_adt.sh stale TEMPERATURE --drafter_type jacobi|hybrid [options]       self-drafted trees
set -eu
cd "$(dirname "$0")/.."
phase="${1:?bounds, steps, init or stale}"
t="${2:?a temperature, such as 1}"
shift 2
case "$phase" in
  stale) grid="--betas 0.1 0.2 0.4 --step_depths 2 --step_widths 1 --depths 12:18:24 16:20:24 --widths 1:2:4 4:6:8
               --budgets 23 31 --fixed_depths 16 20 --fixed_widths 3 8" ;;
  bounds) grid="--betas 0.5 --step_depths 1 --step_widths 1 --depths 1:3:6 1:5:8 2:6:12 --widths 1:2:3 1:3:6
                --budgets 10 16 24 --fixed_depths 3 5 8 --fixed_widths 2 4" ;;
  steps) grid="--betas 0.3 0.5 0.7 0.9 --step_depths 1 2 --step_widths 0 1" ;;
  init) grid="--betas 0.3 0.5 --step_depths 1 2 --step_widths 1 --inits horizontal vertical both random" ;;
  *) echo "sweep_adt: no phase $phase; choose bounds, steps, init or stale" >&2; exit 2 ;;
esac
drafter=eagle
previous=""
for word in "$@"; do
  case "$previous $word" in
    "--drafter_type "*) drafter="$word" ;;
    *" --drafter_type="*) drafter="${word#*=}" ;;
  esac
  previous="$word"
done
# shellcheck disable=SC2086 -- the grid is a list of words
exec "${PYTHON:-.venv/bin/python}" main.py sweep --temperature "$t" \
  --prompt configs/emoji_unseen.txt --slice 16-24 --num_images 4 \
  --output_dir "runs/sweep_${phase}_${drafter}_t$t" $grid "$@"
