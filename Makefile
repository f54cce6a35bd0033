# `make run` and `make test` do all the set-up they need, from a fresh clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help run test test-system test-enforcement test-vm lint bench format clean
help:
	@echo "make run    install into $(VENV), run four real SAC trainings through a private queue"
	@echo "make test   install, run all tests"
	@echo "make test-system       as root: try the service in a booted systemd, thrown away after"
	@echo "make test-enforcement  the same of the kernel's limits, where it has the controllers"
	@echo "make test-vm           the limits again in a virtual machine that brings them (minutes)"
	@echo "make lint   install, check style, types and import rules"
	@echo "make bench  install, measure rlq on this machine (minutes)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rlq needs Python 3.11 or later; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[sac,dev]'
	@touch $@

run: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/first-sweep.sh

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-system: $(STAMP)
	$(BIN)/python -m tests.system -q

# For a machine, such as a virtual one, whose kernel has the controllers of cgroup version 2.
test-enforcement: $(STAMP)
	$(BIN)/python -m tests.system -v -rs -k scopes

# For a machine that has them not: a virtual one, by qemu, whose processors are emulated.
test-vm: $(STAMP)
	$(BIN)/python -m tests.system.vm

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
