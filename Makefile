# Two commands for newcomers: `make demo` and `make test`. Each does its own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile

.PHONY: setup demo test lint unit property simulation integration bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml hatch_build.py $(wildcard proto/kvpool/v1/*.proto)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/kvpool demo

test: lint
	$(PYTEST) tests

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit property simulation integration: setup
	$(PYTEST) tests/$@

bench: setup
	$(BIN)/kvpool bench all

clean:
	rm -rf .venv dist build kvpool/v1
