#!/usr/bin/env bash
# Downloads published checkpoints into ckpts/ in the published layout. A second call resumes an interrupted download.
# Usage: bash scripts/get_ckpts.sh NAME...     (without a NAME it prints the table of ckpts/README.md)
#        REVISION=... pins the revision of the target; FILE=c2i_B_256.pt selects another file for llamagen_c2i;
#        PIXELS=1 fetches what makes pixels of codes too: the diffusion model of glm_image, simplear's decoder.
# For gated repositories, accept the licence on their page and run `.venv/bin/hf auth login`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-.venv/bin/python}" main.py get_ckpts ${REVISION:+--revision "$REVISION"} ${FILE:+--file "$FILE"} \
    ${PIXELS:+--pixels} "$@"
