# Two commands for newcomers: `make quickstart` (see it work) and `make test` (change it safely).
# All targets build .venv first where something is missing; nothing is installed outside it.

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
INSTALL = $(PYTHON) scripts/install.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
# Without the flags of make, which the makefiles of cmake would take for their own.
IN_VENV = MAKEFLAGS= PATH="$(CURDIR)/.venv/bin:$$PATH"
# A file's tests stay in one process, which makes what they share once.
PYTEST = python -m pytest -n $(JOBS) --dist loadfile
SOURCES = mdata trainer cli tests benchmarks scripts fuzz examples

# Tests start hundreds of processes; without bytecode each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help quickstart test check soak fuzz docs wheel sdist clean install lint types cluster-test megatron-test cpp cpp-plain cpp-sanitized core-sanitized

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=python3.12, TORCH_INDEX=<package index that torch comes from>, JOBS=2, SOAK=20, SECONDS=600"

quickstart: ## install, then text -> tokens -> blend -> training -> report.html, under 4 minutes
	@$(INSTALL) train
	@$(IN_VENV) python -m cli.quickstart

# mypy has one thread, so it runs beside the compilers. By default xdist begins files with few tests last, and one of
# them, of 35 s, ran alone at the end.
test: install ## everything but the soak tests, under 20 minutes on 2 cores
	@$(MAKE) --jobs $(JOBS) lint types cpp-sanitized core-sanitized
	$(IN_VENV) $(PYTEST) --no-loadscope-reorder
	$(IN_VENV) python fuzz/run.py --replay --jobs $(JOBS)

check: install lint types cpp-plain ## the quick part of make test, in 60 % of its time
	$(IN_VENV) $(PYTEST) -m "not slow and not soak"

SOAK ?= 20
soak: install ## all rows and kills, and 4 x SOAK times as many drawn cases (hours on 2 cores), then the fuzzers
	$(IN_VENV) MDATA_SOAK=$(SOAK) $(PYTEST) -m "soak or scaled or hypothesis" --timeout 7200
	@$(MAKE) fuzz

# Ray and what it brings lie in an environment of their own, which sees .venv behind them.
CLUSTER = build/cluster
CLUSTER_TESTS = tests/cluster tests/mdata/launching tests/trainer/run/test_faults.py::test_a_fault_of_each_kind
IN_CLUSTER = PATH="$(CURDIR)/$(CLUSTER)/bin:$$PATH"
cluster-test: install ## real Slurm and Ray on this machine: install them (as root, Debian) and run their tests
	@command -v slurmctld >/dev/null || apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
	@test -x $(CLUSTER)/bin/python || $(IN_VENV) python -m venv $(CLUSTER)
	@$(IN_CLUSTER) python scripts/see_environment.py .venv
	$(IN_CLUSTER) python -m pip install --quiet -c constraints.txt ray
	$(IN_CLUSTER) python -m pytest -m "soak or not soak" $(CLUSTER_TESTS) --timeout 900 -rs

# megatron-core lies in an environment of its own, which has the torch of .venv.
MEGATRON = $(CURDIR)/build/megatron
megatron-test: install ## install megatron-core and run the tests of its checkpoints
	@test -x $(MEGATRON)/bin/python || $(IN_VENV) python -m venv $(MEGATRON)
	@$(MEGATRON)/bin/python scripts/see_environment.py .venv
	$(MEGATRON)/bin/python -m pip install --quiet -c constraints.txt megatron-core==0.16.1 psutil
	$(IN_VENV) MTRAIN_MEGATRON_PYTHON=$(MEGATRON)/bin/python python -m pytest tests/trainer/convert/test_megatron_core.py -rs

SECONDS ?= 600
fuzz: install ## fuzz each reader of foreign bytes for SECONDS
	$(IN_VENV) pip install --quiet -c constraints.txt atheris
	$(IN_VENV) python fuzz/run.py --seconds $(SECONDS) --jobs $(JOBS)

docs: ## the docs site in build/site; a broken link is an error
	@$(INSTALL) train docs
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

wheel: install ## a wheel in dist/
	$(IN_VENV) python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

sdist: install ## a source archive in dist/, with docs and tests
	$(IN_VENV) python -c "from scikit_build_core.build import build_sdist; print('dist/' + build_sdist('dist'))"

clean: ## remove what building, testing and the quickstart made; .venv stays (rm -r .venv to start afresh)
	rm -rf build dist quickstart *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

install:
	@$(INSTALL) train dev

lint:
	$(IN_VENV) ruff check $(SOURCES)
	$(IN_VENV) ruff format --check $(SOURCES)

types:
	$(IN_VENV) mypy

cpp: cpp-plain cpp-sanitized

cpp-plain:
	$(call build_and_run,build/cpp-plain,-DMDATA_SANITIZE=OFF)

cpp-sanitized:
	$(call build_and_run,build/cpp-sanitized,-DMDATA_SANITIZE=ON)

# The extension itself under the sanitizers, in tests that give it wrong and hostile arguments.
core-sanitized: install
	@$(IN_VENV) cmake -S . -B build/core-sanitized -DMDATA_SANITIZE=ON -DMDATA_WERROR=ON --log-level=WARNING
	@$(IN_VENV) cmake --build build/core-sanitized --parallel $(JOBS)
	$(IN_VENV) python -m tests.helpers.sanitized build/core-sanitized --jobs $(JOBS)

define build_and_run
	@$(IN_VENV) cmake -S . -B $(1) -DMDATA_BUILD_TESTS=ON -DMDATA_BUILD_MODULE=OFF $(2) --log-level=WARNING
	@$(IN_VENV) cmake --build $(1) --parallel $(JOBS)
	@$(IN_VENV) ctest --test-dir $(1) --parallel $(JOBS) --output-on-failure
endef
