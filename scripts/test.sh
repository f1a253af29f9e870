#!/usr/bin/env bash
# Sets up .venv and runs lint, type checks and all tests on the CPU. Only packages are downloaded.
# Usage: bash scripts/test.sh [pytest options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh requirements-dev.txt
.venv/bin/python -m ruff check --output-format concise .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/lint-imports >.venv/imports.txt || { cat .venv/imports.txt; exit 1; }
.venv/bin/shellcheck scripts/*.sh scripts/*.sbatch .ci/run
.venv/bin/python -m mypy
# Two workers with one thread each: the tiny models of the tests are no faster on more threads, which would compete.
# Each takes one half of the files and, once it is done, what the other has left, so that few fixtures are made twice.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -q -n 2 --dist worksteal "$@"
