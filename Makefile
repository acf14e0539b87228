# The targets of development. Needs Python 3.11+ (with venv) and make.

PYTHON ?= python3
MODE ?= sync
PSERVERS ?= 2
TRAINERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench
ADAPTERS_STAMP := $(VENV)/.adapters
SUITES ?= tests
JOBS ?= 2
# The tests of a file run in one process, as they share a cluster.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile
# Campaigns replace samples (tests/soaking.py) and take longer.
AT_LENGTH := --hypothesis-profile soak -o timeout=600
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help install train test check test-all soak test-gpu chaos golden reference audit bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with the exact versions of requirements.lock, and this project in it

# The lock has all packages, so that pip resolves nothing, neither for the project nor for its build.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.lock into $(VENV): torch and 124 other packages, 2 GB (several more with CUDA). This takes minutes."
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

train: install ## train a small network on a local cluster (MODE, PSERVERS, TRAINERS)
	$(BIN)/gradpost up --mode $(MODE) --pservers $(PSERVERS) --trainers $(TRAINERS) -- python examples/digits.py

check: install ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check ## check, and the tests not marked extended, which need neither root nor Debian packages
	$(BIN)/python -m pytest $(SUITES) -m "not extended and not soak" $(SIDE_BY_SIDE)

test-all: test $(ADAPTERS_STAMP) ## test, and the tests marked extended, which take longer or need more; CI runs it
	$(BIN)/python -m pytest $(SUITES) -m "extended and not soak and not alone" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest $(SUITES) -m "extended and not soak and alone"

# Additional packages of a target: .bench, .adapters.
$(VENV)/.%: requirements-%.lock $(STAMP)
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

# The parts end after 25, 15 and 15 minutes, after the current test.
soak: install ## full matrices, fuzzing, attacks and chaos, which test-all samples; at most an hour (ARGS="--seed 1")
	$(BIN)/python -m pytest $(SUITES) -m "(soak or hypothesis) and not alone" $(AT_LENGTH) --session-timeout 1500 $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest tests/attacks tests/chaos -m alone $(AT_LENGTH) --session-timeout 900
	$(BIN)/python -m tests.chaos --minutes 15 $(ARGS)

test-gpu: install ## test on this machine's GPU; without one the tests are skipped
	$(BIN)/python -m pytest tests/gpu -rs

chaos: install ## check real clusters under random faults (ARGS="--minutes 3 --seed 1"); docs/reliability.md
	$(BIN)/python -m tests.chaos $(ARGS)

golden: install ## train short seeded runs and compare every bit with tests/golden/digests.json
	$(BIN)/python -m pytest tests/golden

reference: install ## generate the reference in docs: settings, metrics, error codes, commands
	$(BIN)/python -m tests.docs.reference

audit: install ## look up known vulnerabilities of the packages in requirements.lock
	$(BIN)/python .ci/audit.py

bench: $(BENCH_STAMP) ## measure rounds beside torch.distributed.rpc, gloo, Ray and raw sockets (ARGS=--quick)
	$(BIN)/python -m benchmarks.comparison $(ARGS)

clean: ## remove generated files
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
