#!/usr/bin/env bash
# Table 2: as table1_coco.sh, on 100 of PartiPrompts; the embedded model on other prompts of its own.
# Usage: [MODEL=NAME] bash scripts/table2_parti.sh [options of `main.py bench`]
exec bash "$(dirname "${BASH_SOURCE[0]}")/speed_table.sh" table2_parti parti PartiPrompts configs/emoji_held_out.txt "$@"
