# make bench      measure this machine: dpbench.db and reports/latest/index.html
# make test       the test suite, as CI runs it: the tests of the engine run on the schedules reference, the default and
#                 the top one, and a sample of them on the others
# make test-all   the test suite with all schedules everywhere
# make test-fast  the tests that start no process and take about a second at most, for use between two edits: a test that
#                 starts a process is skipped, one with a mark slow, alone or browser is left out, and of one with many
#                 parameters 6 sets are taken
# make faults     plants a fault for each law in a copy of the checkout, and reports which of them the tests catch;
#                 ARGS="NAME..." takes some of them, ARGS=--list prints all
# make hardening  damages 20 stores, kills 60 runs at random moments, lets processes share a store in 200 rounds in
#                 which they are killed, crafts 20 stores, removes 12 runs from other containers and after clock steps,
#                 overwrites 24 stores, fills 5 disks, and makes 300 inputs of each kind, or N= of each, and lists what
#                 went wrong
# make ci-versions  the fast tests with the lowest versions that pyproject.toml declares, torch 2.11 among them, and with
#                 torch 2.14.1; CUDA builds are downloaded (3 GB each); VERSIONS="2.11.0 2.15.0" takes others. With
#                 integrations, the tests of transformers, accelerate, lightning, mlflow, tensorboard and wandb, none of
#                 which may skip; with free-threaded, where python3.14t or python3.13t is found (or FREE=COMMAND), the
#                 fast tests and the engine's without the interpreter's lock; msgspec has wheels for 3.14t only
# make check      ruff and mypy
# make history    asv over the last COMMITS=3 commits, published in .asv/html/index.html, which opens from a file; a
#                 second run measures only the missing results, or all with AGAIN=1; BENCH=REGEX selects benchmarks.
#                 The commits take turns in ROUNDS=5 rounds, and it prints which differences these decide
# make docs       the documents as a site, build/site/index.html; a broken link is an error
# make gate       decide whether this checkout's engine is slower than BASE=main: slower, not slower, or cannot tell;
#                 ARGS= are further options of dpbench gate
# make test-gpu   on any Linux machine: torch's CUDA build on fake GPUs, in the virtual environment .venv-gpu (1.8 GB).
#                 tests/fakegpu/README.md says what this shows and what it does not; the stages of an earlier torch,
#                 which end in -2.11, install it in .venv-gpu-211 (1.2 GB)
# make gpu-check  on a machine with GPUs: whether its figures are true, the tests that need GPUs and a short run, as one
#                 page gpu-check.txt to send back; benchmarks/scripts/gpu_check.py does the same without make
#
# Each target makes the .venv it needs; a second run reuses it. TORCH=system takes torch and all other packages from the
# Python that runs make, and downloads nothing; it is the default on a machine with a GPU. TORCH=pinned installs a torch
# for CPUs.

PYTHON ?= python3
# the pinned torch is a build for CPUs, so that a machine with a GPU takes that of its Python; /dev/kfd alone says little,
# because processors of AMD have it too
GPU    := $(or $(firstword $(wildcard /dev/nvidia[0-9]*)),$(shell nvidia-smi -L 2>/dev/null),\
  $(shell rocm-smi --showid 2>/dev/null | grep '^GPU'))
TORCH  ?= $(if $(GPU),system,pinned)
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
COMMITS ?= 3
BASE   ?= main
JOBS   ?= 4
VENV_GPU ?= .venv-gpu
VENV_GPU_211 := .venv-gpu-211
VERSIONS ?= lowest 2.14.1 integrations free-threaded
# the tests that need one of LIBRARIES in tests/versions.py
INTEGRATED := tests/api/test_trackers.py tests/observe/test_integrations.py tests/observe/test_watching_libraries.py \
  tests/models/test_own.py::test_the_examples_and_the_libraries_verify
FREE   ?= $(firstword $(foreach one,python3.14t python3.13t,$(shell command -v $(one))))

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests run in JOBS processes where pytest-xdist is installed, which TORCH=system does not promise. Many tests wait for
# other processes, so that four processes use two cores better than two or three do. Each process takes
# a run of neighbouring tests, so that it builds the fixtures of a file once, and at the end takes over from slower
# ones: the files differ too much in length to be dealt out whole. ARGS=-n0 runs all tests in one process.
SPREAD = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && echo "--numprocesses=$(JOBS) --dist=worksteal")

.DEFAULT_GOAL := bench
.PHONY: bench test test-all test-fast test-gpu faults hardening ci-versions check docs history gate gpu-check clean

ifeq ($(TORCH),system)
# No registry is asked: the Python that runs make lends its packages, after a check that all are there.
$(VENV)/base.stamp: pyproject.toml
	$(if $(GPU),@echo "This machine has a GPU ($(GPU)): torch is that of $(PYTHON) (TORCH=system).")
	$(PYTHON) benchmarks/scripts/system_torch.py $(VENV)
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	@touch $@
else
$(VENV)/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) -e ".[dev]"
	@touch $@
endif

bench: $(VENV)/base.stamp
	$(BIN)/dpbench run $(ARGS)

# The tests start some hundred Python processes: without files of bytecode, each would compile what it imports.
test test-all test-fast: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-all: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --all $(SPREAD) $(ARGS)

test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --fast -rfE $(SPREAD) $(ARGS)

faults: $(VENV)/dev.stamp
	$(BIN)/python tests/faults.py $(ARGS)

hardening: $(VENV)/dev.stamp
	$(BIN)/python -m tests.hardening stores $(or $(N),20)
	$(BIN)/python -m tests.hardening kills $(or $(N),60)
	$(BIN)/python -m tests.hardening writers $(or $(N),200)
	$(BIN)/python -m tests.hardening foreign $(or $(N),20)
	$(BIN)/python -m tests.hardening guards $(or $(N),12)
	$(BIN)/python -m tests.hardening overwritten $(or $(N),24)
	$(BIN)/python -m tests.hardening disks $(or $(N),5)
	FUZZ=$(or $(N),300) $(BIN)/python -m pytest -q tests/cli/test_fuzz.py

# What is declared is installed, without constraints: a version of torch stands for itself.
.venv-versions/%/dev.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PYTHON) tests/versions.py $* > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(@D)/base.stamp $@

.venv-versions/free-threaded/dev.stamp: override PYTHON = $(FREE)

# a Python that has no lock to switch off does not start with PYTHON_GIL=0
FOUND = $(if $(FREE),$(VERSIONS),$(filter-out free-threaded,$(VERSIONS)))
ci-versions: $(FOUND:%=.venv-versions/%/dev.stamp)
	$(if $(filter-out $(FOUND),$(VERSIONS)),@echo "free-threaded is left out: no python3.14t or python3.13t is found")
	for version in $(filter-out free-threaded,$(FOUND)); do \
	  case $$version in \
	    integrations) set -- test "$(INTEGRATED) --no-skips $(ARGS)";; \
	    *) set -- test-fast "$(ARGS)";; \
	  esac; \
	  $(MAKE) $$1 TORCH=pinned VENV=.venv-versions/$$version ARGS="$$2" || exit 1; \
	done
	$(if $(filter free-threaded,$(FOUND)),\
	  PYTHON_GIL=0 $(MAKE) test TORCH=pinned VENV=.venv-versions/free-threaded ARGS="tests/engine $(ARGS)" && \
	  PYTHON_GIL=0 $(MAKE) test-fast TORCH=pinned VENV=.venv-versions/free-threaded ARGS="$(ARGS)")

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# sphinx with furo and myst: a maintained generator whose site needs no network
$(VENV)/docs.stamp: $(VENV)/dev.stamp
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

history: $(VENV)/dev.stamp
	PATH="$(abspath $(BIN)):$$PATH" COMMITS=$(COMMITS) BENCH='$(BENCH)' AGAIN=$(AGAIN) ROUNDS=$(ROUNDS) sh benchmarks/history.sh

gate: $(VENV)/dev.stamp
	$(BIN)/dpbench --no-config gate --base $(BASE) --models mlp,resnet18 --strategies 'dp[reference],dp[local]' \
	  --devices 2 --device-kind cpu --batch-sizes 16 --budget 600 $(ARGS)

gpu-check: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/scripts/gpu_check.py $(ARGS)

# torch comes without the packages of NVIDIA that it asks for; its other dependencies are among GPU_PACKAGES. Installed
# last, it lets pip find no conflict.
PIP_GPU := $(VENV_GPU)/bin/python -m pip install --quiet --disable-pip-version-check
PIP_GPU_211 := $(VENV_GPU)/bin/python -m pip --python $(VENV_GPU_211)/bin/python install --quiet \
  --disable-pip-version-check
GPU_PACKAGES := filelock fsspec jinja2 networkx sympy typing-extensions \
  click matplotlib msgspec numpy nvidia-ml-py pandas psutil rich scipy \
  hypothesis pytest pytest-timeout pytest-xdist

$(VENV_GPU)/base.stamp: constraints.txt constraints-gpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV_GPU)
	sed '/^torch==/d' constraints.txt > $(VENV_GPU)/constraints.txt
	$(PIP_GPU) -c $(VENV_GPU)/constraints.txt $(GPU_PACKAGES)
	$(PIP_GPU) --no-deps -r constraints-gpu.txt -e .
	@touch $@

# an earlier torch, beside the packages of $(VENV_GPU) and this checkout
SITE = $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
$(VENV_GPU_211)/base.stamp: constraints-gpu-211.txt $(VENV_GPU)/base.stamp
	$(PYTHON) -m venv --without-pip $(VENV_GPU_211)
	$(PIP_GPU_211) --no-deps -r constraints-gpu-211.txt
	printf '%s\n' "$(call SITE,$(VENV_GPU))" "$(CURDIR)" > "$(call SITE,$(VENV_GPU_211))/shared.pth"
	@touch $@

# stages that ARGS names need only their own torch; without names, all run
STAGES  := $(or $(filter-out --% 0% 1% 2% 3% 4% 5% 6% 7% 8% 9%,$(ARGS)),all -2.11)
EARLIER := $(if $(findstring -2.11,$(STAGES)),$(VENV_GPU_211)/base.stamp)

test-gpu: $(VENV_GPU)/base.stamp $(EARLIER)
	$(VENV_GPU)/bin/python -m tests.fakegpu.build
	$(if $(EARLIER),$(VENV_GPU_211)/bin/python -m tests.fakegpu.build --clock-alone)
	$(VENV_GPU)/bin/python -m tests.fakegpu.check $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_GPU) $(VENV_GPU_211) .venv-versions .asv build *.egg-info
