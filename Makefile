# One set of commands for people and for CI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WARM := $(VENV)/.warm
CODE := dynadapt tests examples benchmarks
PROSE := README.md CONTRIBUTING.md CHANGELOG.md docs
DIST := build/dist

# Tests run on CPU, one thread a rank, whatever the machine offers.
TEST_ENV := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/$(VENV)/torch_extensions

# DeepSpeed compiles its CPU operator with the ninja of this environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test check lint types imports spelling wheel format bench pictures nightly matrix faults clean

help:
	@echo "make setup    environment in $(VENV), with every extra"
	@echo "make demo     a migration on this machine, watched"
	@echo "make test     the unit tests"
	@echo "make check    ruff, mypy, import-linter, codespell, wheel contents"
	@echo "make format   rewrite the code in the project's format"
	@echo "make bench    the benchmarks          make pictures  the docs' figures, drawn anew"
	@echo "make matrix   all pairs of layouts, and their page in docs"
	@echo "make nightly  the long tests        make faults  the tests that break things"

setup: $(READY) $(WARM)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]'
	@touch $@

# The first DeepSpeed engine on a machine compiles an operator (half a minute). Done here, once, it
# does not look like a hang in a test or in the demo.
$(WARM): $(READY)
	@rm -rf $(VENV)/torch_extensions
	@$(TEST_ENV) $(BIN)/python -c "from deepspeed.accelerator import get_accelerator as a; \
	a().create_op_builder('ShareMemCommBuilder').load()" >$(VENV)/warm.log 2>&1 \
	|| echo "DeepSpeed could not compile its CPU operator (needs a C++ compiler): see $(VENV)/warm.log"
	@touch $@

demo: setup
	$(TEST_ENV) $(BIN)/dynadapt demo

# Two processes: most tests wait for ranks or for time to pass.
test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup

nightly: setup
	$(TEST_ENV) HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m nightly

# PAIRS=missing walks only what docs/matrix.json does not have: pairs of kinds that are new.
matrix: setup
	$(TEST_ENV) MATRIX=docs PAIRS=$(PAIRS) $(BIN)/python -m pytest -m nightly tests/live/test_matrix.py -k all_pairs

faults: setup
	$(TEST_ENV) $(BIN)/python -m tests.faults --write

bench: setup
	$(BIN)/python benchmarks/run.py

pictures: setup
	$(BIN)/python docs/pictures/make.py

check: lint types imports spelling wheel

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(READY)
	$(BIN)/mypy --strict dynadapt examples/adapter_package/src

imports: $(READY)
	$(BIN)/lint-imports

spelling: $(READY)
	$(BIN)/codespell $(CODE) $(PROSE)

# The wheel is built from the sdist, as an installer without a wheel would do it.
wheel: $(READY)
	@rm -rf $(DIST) && mkdir -p $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST) . >build/wheel.log 2>&1 \
	|| { cat build/wheel.log; exit 1; }
	$(BIN)/check-wheel-contents $(DIST)/*.whl

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
