# make demo   train, evaluate and report a small Nemotron 3 Nano on this machine
# make test   run the tests
# make lint   ruff, mypy, import directions, command files
#
# Each target first makes .venv, which takes minutes once and nothing after that.
# PYTHON=python3.12 chooses the interpreter; PIP_FLAGS="--extra-index-url URL" chooses, for example, another build of torch.

SHELL     := /bin/sh
VENV      := .venv
SKYPILOT  := .venv-skypilot
GYM       := .venv-gym
VERIFIERS := .venv-verifiers
EVALUATOR := .venv-evaluator
MODELOPT  := .venv-modelopt
AUTOMODEL := .venv-automodel
DESIGNER  := .venv-designer
BIN       := $(VENV)/bin
TESTED    := src/nemotron/constraints.txt
TESTED_CLUSTER := src/nemotron/constraints-cluster.txt
PIP_FLAGS ?=
PYTHON    ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
               if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; \
               then echo $$p; break; fi; done)
PIP       := $(BIN)/python -m pip --disable-pip-version-check

# Idle OpenMP workers sleep (after a few microseconds) instead of spinning: for the tests; `nemotron` sets its own.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 5000

.PHONY: help demo test test-gpu test-all test-cluster test-ecosystem contracts docs docs-serve lint format install install-dev clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train, evaluate and report a small Nemotron 3 Nano on this machine"
	@echo "make test      run the tests;  make test-all  also the slow ones"
	@echo "make test-gpu   tests on a CUDA GPU; needs a build of torch for it"
	@echo "make test-cluster   tests on a real Slurm, sshd and Ray here; as root on Debian or Ubuntu, whose packages it installs"
	@echo "make test-ecosystem   tests on NeMo Gym and five more libraries, which it installs (8.4 GB); a Python 3.12 or 3.13"
	@echo "make contracts   the published-size scripts and configs against the sources of the libraries that they call"
	@echo "make docs      the documentation as a site, in build/site;  make docs-serve  on http://127.0.0.1:8000, while you write"
	@echo "make lint      ruff, mypy, import directions, command files;  make format  let ruff rewrite"
	@echo "make install   only make .venv;  make clean  remove .venv and caches (output/ stays)"

demo: $(VENV)/installed
	$(BIN)/nemotron nano3 pipe -c tiny

# worksteal: each worker begins with one half (of two) of the files, so most fixtures of a module are made once.
test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not e2e and not whole and not cluster" $(PYTEST_FLAGS)

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

# Also replaces four packages of .venv by the older ones that nemo-run wants (constraints-cluster.txt).
test-cluster: $(VENV)/installed-cluster $(SKYPILOT)/installed
	@sh tests/cluster/install-engines.sh
	$(BIN)/python -m pytest -m cluster tests/cluster tests/e2e $(PYTEST_FLAGS)

test-ecosystem: $(VENV)/installed-dev $(patsubst %,%/installed,$(GYM) $(VERIFIERS) $(EVALUATOR) $(MODELOPT) $(AUTOMODEL) $(DESIGNER))
	$(BIN)/python -m pytest tests/ecosystem $(PYTEST_FLAGS)

# Fetches wheels once, and reads them; nothing of them is installed.
contracts: $(VENV)/installed-dev
	@$(BIN)/python tests/contracts/sources.py
	$(BIN)/python -m pytest tests/contracts $(PYTEST_FLAGS)

# A link or an anchor that leads nowhere, and a page that is in no menu, fail (with --quiet they would not).
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

docs-serve: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(VENV)/installed-dev
	$(BIN)/ruff check src tests benchmarks examples docs/site
	$(BIN)/ruff format --check src tests benchmarks examples docs/site
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/lint_commands.py

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix src tests benchmarks examples docs/site
	$(BIN)/ruff format src tests benchmarks examples docs/site

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(VENV)/created:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "error: no Python 3.11, 3.12 or 3.13 found (tried python3.13, python3.12, python3.11, python3, python)" >&2; \
	  echo "hint: install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 2; fi
	@if ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then \
	  echo "error: PYTHON=$(PYTHON) is not a working Python 3.11, 3.12 or 3.13" >&2; exit 2; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "error: $(PYTHON) has no venv module" >&2; \
	  echo "hint: on Debian and Ubuntu it is the package $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; \
	  exit 2; fi
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The stamps: installed again only when the dependencies change.
$(VENV)/installed: pyproject.toml $(TESTED) | $(VENV)/created
	@echo "installing (about 1.1 GB with a CPU build of torch)"
	@$(PIP) install --quiet $(PIP_FLAGS) -c $(TESTED) -e ".[train]"
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(TESTED) | $(VENV)/created
	@echo "installing with the tools for tests and lint"
	@$(PIP) install --quiet $(PIP_FLAGS) -c $(TESTED) -e ".[dev]"
	@touch $@ $(VENV)/installed

$(VENV)/installed-cluster: pyproject.toml $(TESTED_CLUSTER) | $(VENV)/created
	@echo "installing with NeMo-Run, Ray and moto"
	@$(PIP) install --quiet $(PIP_FLAGS) -c $(TESTED_CLUSTER) -e ".[dev,launch,ray,s3,gs,cluster]"
	@touch $@ $(VENV)/installed $(VENV)/installed-dev

# For tests/cluster/test_fork_skypilot.py, which calls the program sky: it wants an older click than typer does.
$(SKYPILOT)/installed: | $(VENV)/created
	@echo "installing SkyPilot in $(SKYPILOT) (about 360 MB)"
	@$(PYTHON) -m venv $(SKYPILOT)
	@$(SKYPILOT)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) skypilot==0.14.1 uv
	@touch $@

# For tests/ecosystem: the Gym that belongs to NeMo-RL 0.7.0; later ones want a Python from 3.13.14 on.
$(GYM)/installed:
	@p=$$(for p in $(PYTHON) python3.13 python3.12; do \
	    if $$p -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then echo $$p; break; fi; done); \
	  if [ -z "$$p" ]; then echo "error: NeMo Gym 0.4.0 wants a Python 3.12 or 3.13, and there is none" >&2; \
	    echo "hint: name one: make PYTHON=/path/to/python3.12 test-ecosystem" >&2; exit 2; fi; \
	  echo "installing NeMo Gym in $(GYM) (1.4 GB)"; $$p -m venv $(GYM)
	@$(GYM)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) nemo-gym==0.4.0
	@touch $@

# uv: verifiers starts the program of a rollout with it. This one and the next are made with the Python of Gym's.
$(VERIFIERS)/installed: | $(GYM)/installed
	@echo "installing verifiers in $(VERIFIERS) (700 MB)"
	@$(GYM)/bin/python -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) verifiers==0.4.0 uv==0.13.9
	@touch $@

# lm-eval and this project: the harness of examples/ecosystem/evaluator.
$(EVALUATOR)/installed: | $(GYM)/installed
	@echo "installing NeMo Evaluator in $(EVALUATOR) (1.2 GB)"
	@$(GYM)/bin/python -m venv $(EVALUATOR)
	@$(EVALUATOR)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) \
	  nemo-evaluator-launcher==0.2.6 nemo-evaluator==0.2.8 'lm-eval[api]==0.4.13' -e .
	@touch $@

# transformers: ModelOpt 0.47.0 takes one below 5.15, AutoModel 0.7.0 one of its own; .venv has a later one.
$(MODELOPT)/installed: | $(VENV)/created
	@echo "installing ModelOpt in $(MODELOPT) (1.5 GB with a CPU build of torch)"
	@$(PYTHON) -m venv $(MODELOPT)
	@$(MODELOPT)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) \
	  nvidia-modelopt==0.47.0 torch==2.13.0 transformers==5.12.1 accelerate requests -e '.[train]'
	@touch $@

# triton: from 3.9 on it refuses AutoModel's kernels when these are imported.
$(AUTOMODEL)/installed: | $(VENV)/created
	@echo "installing AutoModel in $(AUTOMODEL) (2.8 GB with a CPU build of torch)"
	@$(PYTHON) -m venv $(AUTOMODEL)
	@$(AUTOMODEL)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) \
	  nemo-automodel==0.7.0 torch==2.13.0 "triton<3.9; sys_platform == 'linux'"
	@touch $@

$(DESIGNER)/installed: | $(VENV)/created
	@echo "installing Data Designer in $(DESIGNER) (780 MB)"
	@$(PYTHON) -m venv $(DESIGNER)
	@$(DESIGNER)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) data-designer==0.9.7 'typer<0.26'
	@touch $@

clean:
	rm -rf $(VENV) $(SKYPILOT) $(GYM) $(VERIFIERS) $(EVALUATOR) $(MODELOPT) $(AUTOMODEL) $(DESIGNER) .venv-mlflow .contracts build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
