# make serve   runs the server in the foreground          make test    runs every test
# make lint    ruff and mypy                              make bench   runs what measures
# Each installs what it needs into .venv first, and again only when pyproject.toml has changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= serve_config.yaml

.PHONY: serve test lint bench clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	@exec $(BIN)/python -m deployments.launch $(CONFIG)

# The servers of tests/e2e want the machine for themselves; the others run beside each other.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/e2e --numprocesses 2 --dist worksteal
	$(BIN)/python -m pytest tests/e2e

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy --strict engine kernels deployments

bench: $(VENV)/.installed-test
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.gpu.check --out benchmarks/results/check.json
	$(BIN)/python -m benchmarks.kv_utilization --out benchmarks/results/kv_utilization.json

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "pagoda: $(PYTHON) is not Python 3.11 or 3.12; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "pagoda: installing into $(VENV) (about 1.6 GB; a minute or two the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.installed
