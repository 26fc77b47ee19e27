# make        lists what there is
# make test   PYTHON=python3.12 chooses the interpreter that .venv is made from
PYTHON ?= python3
export PYTHON

.PHONY: help demo test test-long lint clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: ## set up kvos and its model, and run an agent's conversation on it
	@scripts/setup fast
	@.venv/bin/kvos model fetch
	@.venv/bin/kvos demo
	@printf '\nNext: . .venv/bin/activate, then kvos chat, or kvos --help.\n'

test: ## set up what tests need, then static checks and all tests
	@scripts/setup fast,dev
	@.venv/bin/kvos model fetch
	@scripts/check

test-long: ## the same with full counts of rounds, kills and flips, and planted faults
	@scripts/setup fast,dev
	@.venv/bin/kvos model fetch
	@scripts/check --long

lint: ## static checks only
	@scripts/setup fast,dev
	@scripts/lint

clean: ## remove .venv and everything that was generated here (not the model in the cache folder)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
