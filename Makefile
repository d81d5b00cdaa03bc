# make serve        runs the server in the foreground
# make status       shows the replicas of the running server
# make lint         ruff (files are read as UTF-8 by name, too), mypy, and the length of the new commits' subjects
# make test         runs the tests, except those marked `long` or `exhaustive`
# make test-long    runs those marked `long`: restarts, losses, other configurations
# make test-all     runs both, then those marked `exhaustive`, those of the rehearsal included, and test-clients
# make test-clients runs the tests with client libraries whose dependencies exclude the server's
# make test-gpu-rehearsal   runs the GPU path on a machine without a GPU: the engine computes on tensors that say they
#                   are on cuda:0, and each step's waits, copies, launches and compilations are checked
# make bench        runs the benchmarks
#
# Each installs what it needs into .venv first, and again only when pyproject.toml has changed. The client libraries and
# the rehearsal, which needs torch's CUDA build (4.8 GB), have environments of their own in build/.
# The generated tests of the official client libraries, which test-exhaustive runs, are downloaded there, too.
# .ci/run runs lint, test, test-long and test-gpu-rehearsal.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= serve_config.yaml
BENCH_MODEL ?= build/qwen3-0.6b
REHEARSAL := build/gpu-rehearsal
CLIENTS := build/clients
CONFORMANCE := build/conformance
# Python compiles a module when it is first imported; of 22,000 installed files most never are.
QUICKLY := --quiet --disable-pip-version-check --no-compile

# Hundreds of the tests' processes would each compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve status test test-long test-exhaustive test-all test-clients test-gpu-rehearsal \
  test-gpu-rehearsal-exhaustive lint bench clean
.DELETE_ON_ERROR:

# In the locale's encoding the launcher could not name, or would name otherwise, files that the server finds in UTF-8.
serve: $(VENV)/.installed
	@PYTHONUTF8=1 exec $(BIN)/python -m deployments.launch $(CONFIG)

# Ray's dashboard requires Ray's token, which `serve status` sends in this mode only. RAY_DASHBOARD_ADDRESS changes where.
status:
	@RAY_AUTH_MODE=token no_proxy='*' $(BIN)/serve status || \
	  { echo "pagoda: no server answers; start one with make serve, or set RAY_DASHBOARD_ADDRESS" >&2; exit 1; }

# The tests of tests/e2e run one after the other, because their servers need the whole machine; the others run in
# parallel. Each test is in one of the three targets. .ci/run has a PYTEST of its own, which runs a failed test again.
PYTEST ?= -m pytest
test: $(VENV)/.installed-test
test-long test-exhaustive: $(VENV)/.installed-clients
test-exhaustive: $(CONFORMANCE)/.downloaded
test test-long test-exhaustive:
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --ignore tests/e2e -m $(MARKED) --numprocesses 2 --dist worksteal
	$(BIN)/python $(PYTEST) tests/e2e -m $(MARKED)
test: MARKED := "not long and not exhaustive"
test-long: MARKED := "long and not exhaustive"
test-exhaustive: MARKED := exhaustive

test-all:
	$(MAKE) test
	$(MAKE) test-long
	$(MAKE) test-exhaustive
	$(MAKE) test-clients
	$(MAKE) test-gpu-rehearsal-exhaustive

test-clients: $(VENV)/.installed-clients $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/e2e/test_client_libraries.py

test-gpu-rehearsal test-gpu-rehearsal-exhaustive: $(REHEARSAL)/.installed
	PAGODA_GPU_REHEARSAL=1 OMP_NUM_THREADS=1 $(REHEARSAL)/bin/python $(PYTEST) --numprocesses 2 --dist loadfile \
	  -m $(MARKED) tests/gpu_rehearsal
test-gpu-rehearsal: MARKED := "not exhaustive"
test-gpu-rehearsal-exhaustive: MARKED := exhaustive

lint: $(VENV)/.installed-test
	@$(BIN)/python .ci/commit_subjects.py
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select PLW1514 --exclude tests .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict engine kernels deployments k8s benchmarks demo .ci/*.py

# On a model with random weights, which it writes first (1.2 GB), or on yours: make bench BENCH_MODEL=DIR.
# benchmarks/README.md describes the measurements and the comparison with peers.
bench: $(VENV)/.installed-bench $(BENCH_MODEL)/config.json
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.gpu.check --deadline 1800 --out benchmarks/results/check.json
	$(BIN)/python -m benchmarks.kv_utilization --out benchmarks/results/kv_utilization.json
	$(BIN)/python -m benchmarks.roofline --model $(BENCH_MODEL) --out benchmarks/results/roofline.json
	$(BIN)/python -m benchmarks.throughput --model $(BENCH_MODEL) w1 w16 wshare --out benchmarks/results/throughput.json
	$(BIN)/python -m benchmarks.step_profile --model $(BENCH_MODEL) w1 w16 wshare --out benchmarks/results/step_profile.json
	$(BIN)/python -m benchmarks.latency --model $(BENCH_MODEL) --out benchmarks/results/latency.json
	$(BIN)/python -m benchmarks.startup --model $(BENCH_MODEL) --out benchmarks/results/startup.json
	$(BIN)/python -m benchmarks.kv_cache_curves --model $(BENCH_MODEL) --out benchmarks/results/kv_cache_curves.json \
	  --plot benchmarks/results/kv_cache_curves.png
	$(BIN)/python -m benchmarks.serve --model $(BENCH_MODEL) --out benchmarks/results/serve.json
	$(BIN)/python -m benchmarks.front.cost --out benchmarks/results/front_cost.json

build/qwen3-0.6b/config.json: | $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.checkpoints $(@D)

clean:
	rm -rf $(VENV) $(REHEARSAL) $(CLIENTS) $(CONFORMANCE) *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python $(REHEARSAL)/bin/python $(CLIENTS)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "pagoda: $(PYTHON) is not Python 3.11 or 3.12; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "pagoda: installing into $(VENV) (1.6 GB with torch's CPU build, else 5 GB; minutes the first time) ..."
	$(BIN)/python -m pip install $(QUICKLY) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(QUICKLY) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-clients: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(QUICKLY) -e '.[test,clients]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(QUICKLY) -e '.[test,bench]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(REHEARSAL)/.installed: tests/gpu_rehearsal/requirements.txt | $(REHEARSAL)/bin/python
	@echo "pagoda: installing torch's CUDA build into $(REHEARSAL) (4.8 GB; some minutes the first time) ..."
	$(REHEARSAL)/bin/python -m pip install $(QUICKLY) -r $<
	@touch $@

$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt | $(CLIENTS)/bin/python
	@echo "pagoda: installing client libraries into $(CLIENTS) (0.6 GB; some minutes the first time) ..."
	$(CLIENTS)/bin/python -m pip install $(QUICKLY) -r $<
	@touch $@

# The sources of client libraries, for their generated tests (tests/e2e/test_conformance.py); 4 MB.
$(CONFORMANCE)/.downloaded: tests/e2e/conformance/requirements.txt | $(BIN)/python
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary anthropic,openai \
	  --dest $(@D) --requirement $<
	for sources in $(@D)/*.tar.gz; do tar -xzf "$$sources" -C $(@D) || exit 1; done
	@touch $@
