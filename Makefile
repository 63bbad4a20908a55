# Everything runs in .venv. Options for pip go through its own environment variables or PIP_ARGS.
PYTHON ?= python3
PIP_ARGS ?=
MODEL := smollm2-135m
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install model demo test test-gpu lint format type layers check bench bench-gpu clean
.DEFAULT_GOAL := help

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv and install Pagetide with its development tools (quick if nothing changed)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagetide needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints-cpu.txt -e '.[dev]'
	@touch $@

model: $(STAMP) ## fetch the default model (quick if it is there)
	@$(BIN)/pagetide pull $(MODEL)

demo: model ## serve the default model on the CPU, ask it several things at once, stop
	@$(BIN)/python -m tools.demo

test: model ## all tests that need no GPU, with coverage
	$(BIN)/pytest -m "not gpu" --cov --cov-report=term $(ARGS)

test-gpu: model ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

lint: $(STAMP) ## style: ruff, and the line budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_lines.py

format: $(STAMP) ## rewrite the sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## mypy, strict
	$(BIN)/mypy

layers: $(STAMP) ## who may import whom
	$(BIN)/lint-imports --no-logo

check: lint type layers test ## everything: style, types, layers, tests

bench: model ## a short form of all benchmarks on the CPU, and a summary (under ten minutes)
	@$(BIN)/python -m tools.bench $(ARGS)

bench-gpu: $(STAMP) ## all benchmarks on a GPU in full, and a summary
	@$(BIN)/python -m tools.bench --gpu $(ARGS)

clean: ## remove caches and build outputs; .venv and models stay
	rm -rf build dist *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
