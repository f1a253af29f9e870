#!/usr/bin/env bash
# Table 1: speed-up, tau and mean depth of EAGLE-2, LANTERN, ADT-Tree and both together, T = 0 and 1, on 100 captions of MS-COCO
# 2017 (`bash scripts/get_data.sh`). MODEL=anole, llamagen, ... takes a published model (ckpts/README.md); without it, the embedded
# one runs on 16 prompts of its own. An interrupted run goes on. Usage: [MODEL=NAME] bash scripts/table1_coco.sh [options of bench]
exec bash "$(dirname "${BASH_SOURCE[0]}")/speed_table.sh" table1_coco coco MSCOCO2017Val configs/emoji_bench.txt "$@"
