# make repro: set up .venv unless it is right already, then run the graph.
# make test: the same set-up, then linters, types and tests.
# make ui: the same set-up, then the pipeline in Prefect's UI, served until Ctrl-C; PORT=4300 takes another port.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
PORT ?= 4200
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

# The environment is right for one state of these files, one Python and one place on disk: the stamp's name says which.
KEY := $(shell (cat constraints.txt pyproject.toml; $(PYTHON) --version; pwd) | git hash-object --stdin | cut -c1-16)
READY := .venv/.ready-$(KEY)
OLD_PYTHON := Python 3.11 or newer is needed; name one with: make PYTHON=python3.11 ...

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: repro test lint setup ui

repro: setup
	$(IN_VENV) swaralign check
	$(IN_VENV) dvc repro

test: lint
	$(IN_VENV) python -m pytest

lint: setup
	$(IN_VENV) ruff check .
	$(IN_VENV) mypy

ui: setup
	exec "$(CURDIR)/.venv/bin/python" -m flows.serve --port $(PORT)

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD_PYTHON)")'
	@echo "Setting up .venv: two to four minutes and 7 GB"
	rm -f .venv/.ready-*
	# An environment of another Python, or one that was moved here, is made anew; otherwise it is brought up to date.
	if [ "$$(.venv/bin/python --version 2>&1)" != "$$($(PYTHON) --version 2>&1)" ] \
		|| ! grep -qF "$(CURDIR)/.venv/" .venv/bin/pip; then $(PYTHON) -m venv --clear .venv; fi
	.venv/bin/python -m pip install --constraint constraints.txt --editable '.[demo,dev]'
	.venv/bin/python -m pip install --constraint constraints.txt --no-deps resemblyzer
	touch $@
