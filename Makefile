# Two commands: `make demo` and `make test`. Each makes .venv if there is none, installs attnlib into it, and runs.
#
#   TORCH   what pip is given for torch: a version, an index, or both, for instance
#           make test TORCH=torch==2.13.0
#           make demo TORCH="torch --index-url URL"
#   PYTHON  the interpreter that makes .venv (3.10 to 3.13)
#   CHECK   arguments for ci/check, for instance CHECK="--only lint,types"
#   DEMO    arguments for the demo, for instance DEMO="--repeat 20"

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
CHECK ?=
DEMO ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What an editable install has to be made anew for; Python sources are read where they lie.
BUILD_INPUTS := pyproject.toml $(wildcard CMakeLists.txt) $(shell find csrc/cpu csrc/common csrc/front csrc/host -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test clean

help:
	@echo "make demo   run a pre-trained transformer on attnlib and compare it with PyTorch's own attention"
	@echo "make test   lint, types, tests, conformance and packaging: all that CI checks"
	@echo "make clean  remove .venv and everything built"

demo: $(VENV)/.stamp-demo
	$(BIN)/python -m attnlib.demo $(DEMO)

test: $(VENV)/.stamp-test
	$(BIN)/python ci/check $(CHECK)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and alone, so that what TORCH names is what stays.
$(VENV)/.stamp-torch:
	@echo "--- making $(VENV) with $(TORCH)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar off $(TORCH) numpy
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch $(BUILD_INPUTS)
	@echo "--- installing attnlib and what the demo needs"
	$(PIP) install --progress-bar off -e ".[demo]"
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-torch $(BUILD_INPUTS)
	@echo "--- installing attnlib and what the checks need"
	$(PIP) install --progress-bar off -C cmake.define.ATTNLIB_TEST_FAULTS=ON -e ".[test,demo,bench,cuda]"
	@touch $@ $(VENV)/.stamp-demo
