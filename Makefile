# Every target sets up what it needs; .venv is built again only when its inputs have changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format bench docs clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  \1\t/' | expand -t 12

venv: $(INSTALLED) ## Build .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: kvbus needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Move KV between two real engines and compare the tokens
	$(BIN)/kvbus demo

test: $(INSTALLED) ## Run all tests
	$(BIN)/python -m pytest

check: $(INSTALLED) ## Lint, format, types, and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_imports.py

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure handoffs beside bare NIXL (minutes)
	$(BIN)/kvbus bench

docs: $(INSTALLED) ## Generate the generated parts of docs/ and the golden vectors
	PYTHONPATH=. $(BIN)/python docs/generate_protocol.py
	PYTHONPATH=. $(BIN)/python docs/diagrams.py
	$(BIN)/python -m tests.vectors.generate

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
