#!/usr/bin/env bash
# Reproduces the paper's Table 1: speed-up and mean accepted length (tau) of EAGLE-2, LANTERN, ADT-Tree and ADT-Tree with
# LANTERN at temperatures 0 and 1 on 100 captions of MS-COCO 2017 (`bash scripts/get_data.sh`). MODEL=anole, llamagen, ... selects
# a published model (ckpts/README.md). Without it, the embedded model runs on the 16 prompts of its bench. A second call resumes
# an interrupted run.
# Usage: [MODEL=NAME] bash scripts/table1_coco.sh [options of `main.py bench`]
exec bash "$(dirname "${BASH_SOURCE[0]}")/speed_table.sh" table1_coco coco MSCOCO2017Val configs/emoji_bench.txt "$@"
