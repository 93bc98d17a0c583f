# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

# The stamp carries what was installed; it is older than a file below when that file changes what must be installed.
.venv/.dev: pyproject.toml constraints.txt requirements-oracles.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isaac-newton needs Python 3.11 or newer; name one with make PYTHON=…")'
	@echo "Setting up .venv (once; a few minutes) …"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-oracles.txt
	@touch $@

.venv/.docs: .venv/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

.venv/.dist: .venv/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dist]'
	@touch $@

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

.PHONY: demo
demo: .venv/.dev ## Train with and without ISAAC on embedded data; progress, a table, a picture
	@$(BIN)/isaac-newton demo

.PHONY: bench
bench: .venv/.dev ## Measure the time and memory of a step on three models of the paper's Table 2, CPU
	@$(BIN)/isaac-newton bench table2 --threads 1 --models 100,400,autoencoder

.PHONY: test
test: lint ## Lint, types and all tests
	@$(BIN)/python -m pytest -n 2 $(ARGS)

.PHONY: lint
lint: .venv/.dev ## Style, types, the direction of imports, and plain prose
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/prose.py

.PHONY: docs
docs: .venv/.docs ## The documentation, into site/
	@$(BIN)/mkdocs build --strict

.PHONY: dist
dist: .venv/.dist ## Wheel and sdist, installed into an empty environment, with the README's script run there
	@$(BIN)/python tools/dist.py

.PHONY: clean
clean: ## Remove everything that can be made again
	rm -rf .venv site build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
