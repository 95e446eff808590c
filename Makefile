# The workflow. `make demo` and `make test` do everything that they need, from a fresh clone on.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FOLDERS := conf graph kernels passes runtime serve
TYPING := build/typing/treadle
DEMO ?=
BENCH ?=
TESTS ?= tests

# ./kernels would shadow the package of that name from the registry: never put the current folder on the import path.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help dev demo test test-gpu lint types contract format bench golden check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

dev: $(STAMP)  ## make .venv and install treadle into it

# torch first and alone, so that the build that pip is configured for stays; uv solves the rest in seconds.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]' \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## fetch the default model, serve it, stream an answer, show the curl line
	@$(BIN)/python -m treadle.serve.demo $(DEMO)

test: $(STAMP)  ## run the tests that need no GPU
	$(BIN)/python -m pytest -q -m "not gpu and not multigpu" $(TESTS)

test-gpu: $(STAMP)  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m "gpu or multigpu" $(TESTS)

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) $(TYPING)  ## mypy, strict
	$(BIN)/python -m mypy $(FOLDERS:%=-p treadle.%)

contract: $(STAMP) $(TYPING)  ## imports point one way
	PYTHONPATH=$(dir $(TYPING)) $(BIN)/lint-imports

# Type checkers and import-linter read files, not the editable install's finder: show them the package as a folder.
$(TYPING): Makefile
	@mkdir -p $@
	@for folder in $(FOLDERS); do ln -sfn "$(CURDIR)/$$folder" "$@/$$folder"; done
	@touch $@

format: $(STAMP)  ## put the code into its form
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure this machine; another recipe: make bench BENCH="bench=llama3-8b"
	$(BIN)/treadle bench bench=cpu --output build/bench $(BENCH)

golden: $(STAMP)  ## write anew what tests compare with
	$(BIN)/python -m treadle.conf.document > docs/configuration.md
	$(BIN)/python tests/readme_map.py

check: lint types contract test  ## all that a change must pass

clean:  ## remove what was made, the virtual environment included
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
