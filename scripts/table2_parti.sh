#!/usr/bin/env bash
# Reproduces the paper's Table 2, which differs from Table 1 (table1_coco.sh) in its prompts: 100 of PartiPrompts, or,
# for the embedded model, 16 prompts whose pairs of style and name it has not seen.
# Usage: [MODEL=NAME] bash scripts/table2_parti.sh [options of `main.py bench`]
exec bash "$(dirname "${BASH_SOURCE[0]}")/speed_table.sh" table2_parti parti PartiPrompts configs/emoji_held_out.txt "$@"
