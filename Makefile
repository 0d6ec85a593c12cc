# Every target sets up what it needs: a virtual environment in .venv, made once and remade when its inputs change.
#
#   make demo     fetch the demo model once, serve it, ask one question, stream the answer
#   make test     the whole test suite
#   make serve    serve the demo model on 127.0.0.1:50051 until Ctrl-C

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.maniple-installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# With an NVIDIA driver the newest torch that fits is taken, with its CUDA libraries; without one a pinned build.
comma := ,
HAS_GPU := $(wildcard /dev/nvidiactl)
EXTRAS := dev$(if $(HAS_GPU),$(comma)cuda)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)

MODEL ?= demo
LISTEN ?= 127.0.0.1:50051
# Two at a time: the suite waits for processes as much as it computes (71 s instead of 105 s on two cores).
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Environments that have the peers of `make bench`; without them it makes its own.
BENCH_VLLM ?=
BENCH_LLAMA ?=

.PHONY: help demo test clients chart-test chart-readme mesh-test descriptors web fuzz serve setup lint gen check-gen breaking bench bench-plots bench-serve bench-steps bench-faults soak kernels-aot gpu-check clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "Maniple needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version), once. This takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@quiet=-qq; if [ -t 1 ]; then quiet=; fi; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## serve the demo model, ask one question, stream the answer, stop
	@$(BIN)/maniple demo --model $(MODEL)

serve: $(STAMP) ## serve MODEL (demo) on LISTEN (127.0.0.1:50051) in the foreground
	@$(BIN)/maniple serve --model $(MODEL) --listen $(LISTEN)

clients: $(STAMP) ## build the clients of other languages and run them against live servers (gets compilers)
	@$(BIN)/python -m pytest -q -rs --timeout 600 clients/tests $(PYTEST_ARGS)

chart-test: $(STAMP) ## render the chart with helm 3 and 4, do what images are built by, check both (gets helm)
	@$(BIN)/python -m pytest -q -rs -n $(JOBS) --dist worksteal --timeout 300 helm/tests docker/tests $(PYTEST_ARGS)

mesh-test: $(STAMP) ## put real proxies and a browser between clients, servers and workers (gets them)
	@$(BIN)/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/mesh $(PYTEST_ARGS)

chart-readme: $(STAMP) ## write the table of values in the chart's README
	@$(BIN)/python scripts/chart_readme.py

fuzz: $(STAMP) ## two minutes of random and broken messages for each door; MANIPLE_FUZZ_SEED to repeat a run
	@MANIPLE_FUZZ_SECONDS=$(or $(MANIPLE_FUZZ_SECONDS),120) $(BIN)/python -m pytest -q -s --timeout 0 \
		tests/contract/test_fuzz_doors.py $(PYTEST_ARGS)

test: $(STAMP) ## run the whole test suite; PYTEST_ARGS="-k name" for a part
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --ignore tests/mesh $(PYTEST_ARGS)

lint: $(STAMP) check-gen ## ruff, mypy --strict, import-linter, buf lint, drift of gen/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/mesh
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

gen: $(STAMP) ## generate gen/ from protos/
	@$(BIN)/python scripts/generate.py

check-gen: $(STAMP) ## fail if gen/ is not what protos/ give
	@$(BIN)/python scripts/generate.py --check 2>/dev/null

descriptors: $(STAMP) ## write build/maniple.binpb, by which proxies turn JSON into calls
	@$(BIN)/python scripts/descriptor_set.py

web: descriptors ## build the page of clients/web (needs node and npm)
	@cd clients/web && npm ci --silent --no-audit --no-fund --ignore-scripts && npm run --silent build

breaking: $(STAMP) ## fail if protos/ break clients of AGAINST (default: the branch main)
	$(BIN)/buf breaking protos --against '.git#ref=$(or $(AGAINST),main),subdir=protos'

bench: $(STAMP) ## the table of bench/README.md beside vLLM and llama.cpp, 40 minutes; BENCH_ARGS="--list"
	@$(BIN)/python bench/table.py $(if $(BENCH_VLLM),--vllm $(BENCH_VLLM)) $(if $(BENCH_LLAMA),--llama $(BENCH_LLAMA)) \
		$(BENCH_ARGS)

bench-plots: $(STAMP) ## draw bench/plots/ from the newest results
	@$(BIN)/python bench/plot.py $(BENCH_ARGS)

bench-serve: $(STAMP) ## latency and throughput of a server; BENCH_ARGS, see bench/README.md
	@$(BIN)/python bench/serve.py $(BENCH_ARGS)

bench-steps: $(STAMP) ## the cost of one steady step; BENCH_ARGS, see bench/README.md
	@$(BIN)/python bench/steps.py $(BENCH_ARGS)

bench-faults: $(STAMP) ## what clients notice of faults, and for how long; BENCH_ARGS, see bench/README.md
	@$(BIN)/python bench/faults.py $(BENCH_ARGS)

soak: $(STAMP) ## ten minutes of random faults under load; BENCH_ARGS="--duration-s 60" for a short one
	@$(BIN)/python bench/soak.py $(BENCH_ARGS)

gpu-check: $(STAMP) ## check this machine's GPU in six minutes, see docs/gpu.md; BENCH_ARGS="--device cpu" rehearses
	@tests/gpu/run.sh $(BENCH_ARGS)

kernels-aot: $(STAMP) ## compile every Triton kernel in every configuration, without a GPU, and print what each needs
	@TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m maniple_kernels.gpu.aot --all $(BENCH_ARGS)

clean: ## remove .venv and caches (not the fetched models)
	rm -rf clients/{go,java,cpp}/build clients/go/gen clients/{node,web}/node_modules clients/web/build
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache ./*.egg-info
