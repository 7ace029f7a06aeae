# make help lists the targets. Everything is installed into .venv, which is made anew only when constraints.txt or
# setup.py have changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
TORCH_INDEX_URL ?=
TESTS ?= tests/unit tests/distributed tests/e2e
PYTEST_ARGS ?=
ARGS ?=
DEMO_ARGS ?=
SMOLLM2_ARGS ?=
# word problems for make smollm2, where there is such a file
GSM8K ?= $(wildcard ../shared/data/gsm8k.jsonl)

ENGINE_VENVS ?= .venv-engines
VENV := .venv
BIN := $(VENV)/bin
# A stamp named after the contents: a fresh checkout with an old .venv beside it is not made anew.
STAMP := $(VENV)/.setup-$(shell cat constraints.txt setup.py | cksum | cut -d' ' -f1)
TORCH_PIN := $(shell grep -m1 '^torch==' constraints.txt)

# One OpenMP thread per process: tests and demo run several processes on few cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help
help: ## list the targets
	@echo 'usage: make TARGET [PYTHON=/path/to/python3.12] [TORCH_INDEX_URL=URL]'
	@echo
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1 \t/' | expand -t 20
	@echo
	@echo 'PYTHON: the Python (>= 3.12) to use, otherwise one is looked for.'
	@echo 'TORCH_INDEX_URL: package index with another build of torch, e.g. one of CPU builds'
	@echo 'DEMO_ARGS: flags of luspo train for the demo; WORLD_SIZE, TP, PP, EP, SEED in the environment choose its layout'
	@echo 'SMOLLM2_ARGS: flags of luspo train for make smollm2; GSM8K=FILE: word problems for it'
	@echo 'ENGINE_VENVS: folder of the engines'\'' environments (.venv-engines); ENGINE_PYTHON: the Python 3.11 for them'
	@echo 'TESTS, PYTEST_ARGS: what make test runs, e.g. make test TESTS=tests/unit PYTEST_ARGS="-k config"'

.PHONY: setup
setup: $(STAMP) ## make .venv with everything in it (about 5 minutes, 6 GB with the CUDA build of torch)

$(STAMP): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(STAMP):
	@python="$$(PYTHON='$(PYTHON)' tools/find_python.sh)"; \
	echo "Making $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV)
	@if [ -n '$(TORCH_INDEX_URL)' ]; then \
		$(BIN)/pip install --quiet --no-deps --index-url '$(TORCH_INDEX_URL)' '$(TORCH_PIN)'; \
	fi
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,demo]'
	@touch $@

.PHONY: lint
lint: setup ## style, types, and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/mypy luspo_megatron
	$(BIN)/lint-imports --no-logo

.PHONY: test
test: setup ## run all tests but those with real engines and those on Slurm
	$(BIN)/python -m pytest $(TESTS) $(PYTEST_ARGS)

.PHONY: test-slurm
test-slurm: setup ## launches, requeue and preemption on a Slurm cluster of this machine (as root; installs Slurm)
	@tests/slurm/install.sh
	$(BIN)/python -m pytest tests/slurm $(PYTEST_ARGS)

.PHONY: test-engines
test-engines: setup ## tests against real vLLM and SGLang servers on the CPU (makes their environments: 7 GB, Python 3.11)
	@for engine in vllm sglang; do TORCH_INDEX_URL='$(TORCH_INDEX_URL)' tools/engine_venv.sh $$engine '$(ENGINE_VENVS)'/$$engine; done
	ENGINE_VENVS='$(abspath $(ENGINE_VENVS))' $(BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

.PHONY: bench-sync
bench-sync: setup ## weight sync against the raw link, 1 GB from 4 ranks to one receiver (ARGS=--help)
	$(BIN)/python -m benchmarks.bench_sync $(ARGS)

.PHONY: demo
demo: setup ## build, cold-start, train and evaluate a tiny Qwen3-MoE on this machine's CPU (about 10 minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON='$(CURDIR)/$(BIN)/python' bash examples/qwen3_moe/tiny_cpu.sh $(DEMO_ARGS)

.PHONY: bench-convert
bench-convert: setup ## checkpoint conversion against cp + fsync, 2 GB (ARGS=--names: 18,867 small tensors)
	$(BIN)/python benchmarks/bench_convert.py --folder runs/bench_convert $(ARGS)

.PHONY: bench-loss
bench-loss: setup ## time and memory of the loss stage against naive autograd and Liger (CPU, about 3 minutes)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	env -u OMP_NUM_THREADS $(BIN)/python -m benchmarks.bench_loss $(ARGS)

.PHONY: kernels
kernels: setup ## compile every Triton kernel for every architecture: registers, spills, shared memory (no GPU needed)
	$(BIN)/python -m benchmarks.kernel_report $(ARGS)

.PHONY: smollm2
smollm2: setup ## fetch SmolLM2-135M-Instruct and train it a few steps on this machine's CPU (about 10 minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON='$(CURDIR)/$(BIN)/python' GSM8K='$(GSM8K)' \
		bash examples/smollm2/smollm2.sh $(SMOLLM2_ARGS)

.PHONY: clean
clean: ## remove .venv, caches and build folders; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find luspo_megatron tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
