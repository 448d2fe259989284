# make bench      measure this machine: dpbench.db and reports/latest/index.html
# make test       the whole test suite, as CI runs it
# make check      ruff and mypy
# make history    asv over the last 3 commits, published in .asv/html
#
# Each target makes the .venv it needs; a second run reuses it. TORCH=system takes torch, and whatever else is
# installed, from the Python that runs make (a GPU machine with its own build).

PYTHON ?= python3
TORCH  ?= pinned
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
COMMITS ?= 3

ifeq ($(TORCH),system)
VENV_FLAGS := --system-site-packages
CONSTRAINTS :=
else
VENV_FLAGS :=
CONSTRAINTS := -c constraints.txt
endif

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: bench test check history clean

$(VENV)/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) $(CONSTRAINTS) -e ".[dev]"
	@touch $@

bench: $(VENV)/base.stamp
	$(BIN)/dpbench run $(ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

history: $(VENV)/dev.stamp
	PATH="$(abspath $(BIN)):$$PATH" COMMITS=$(COMMITS) sh benchmarks/history.sh

clean:
	rm -rf $(VENV) .asv build *.egg-info
