#!/usr/bin/env bash
# Set-up, lint, types and the whole test suite: CPU, no download but the packages.
# Usage: bash scripts/test.sh [pytest options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh requirements-dev.txt
.venv/bin/python -m ruff check --output-format concise .
.venv/bin/python -m mypy adt_tree models
# Two workers, one thread each: tiny models gain nothing from more threads and lose to contention.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -q -n 2 "$@"
