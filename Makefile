# Two words do everything on a fresh machine with Python 3.11 and make: `make bench`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_OUT ?= runs/digits

.PHONY: bench test check lint types layers docs clean
.DEFAULT_GOAL := help

help:
	@echo "make bench   set up, then score every detector and calibrator on the embedded digits suite"
	@echo "make test    set up, then run the whole test suite"
	@echo "make check   what CI runs: lint, types, layering, tests, documentation examples"

$(BIN)/ood-bench: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ood-toolkit needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

bench: $(BIN)/ood-bench
	$(BIN)/ood-bench --detectors all --calibrators all --out $(RUN_OUT)

# one process per core, one thread each: more threads than cores only spin
test: $(BIN)/ood-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: $(BIN)/ood-bench
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(BIN)/ood-bench
	$(BIN)/pyright

layers: $(BIN)/ood-bench
	$(BIN)/lint-imports

check: lint types layers test

clean:
	rm -rf $(VENV) build dist *.egg-info
