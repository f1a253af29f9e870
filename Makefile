.PHONY: setup check test types demo

setup:
	bash scripts/setup.sh

test:
	bash scripts/test.sh

types:
	bash scripts/setup.sh requirements-dev.txt
	.venv/bin/python -m mypy adt_tree models

check: test

demo: setup
	.venv/bin/python main.py generate_images --method adt-tree
