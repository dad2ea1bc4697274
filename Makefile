# make repro: set up .venv if it is not right yet, then `dvc repro`. make test: the same set-up, then linters and tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
PY := .venv/bin/python

# The environment is right for one state of these files, one Python and one place on disk: the stamp's name says which.
KEY := $(shell (cat constraints.txt pyproject.toml; $(PYTHON) --version; pwd) | git hash-object --stdin | cut -c1-16)
READY := .venv/.ready-$(KEY)

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: repro test lint setup clean

repro: setup
	dvc repro

test: lint
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Setting up .venv: about four minutes and 7 GB"
	rm -f .venv/.ready-*
	# An environment of another Python is made anew, one of this Python brought up to date.
	if [ "$$($(PY) --version 2>&1)" != "$$($(PYTHON) --version 2>&1)" ]; then $(PYTHON) -m venv --clear .venv; fi
	$(PY) -m pip install --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

clean: # the environment and the running state of trainings; DVC's outs and cache stay
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache
