.PHONY: setup test

setup:
	bash scripts/setup.sh

test:
	bash scripts/test.sh
