# Two commands for a fresh machine: `make demo` and `make test`. Everything is installed in .venv and .engines.
PYTHON ?= python3
# One test process more than the cores that the tests are measured on: they wait for disks, servers and each other.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINE := .engines/deepspeed/.installed
ORBAX := .engines/orbax/.installed
VLLM := .engines/vllm/.installed
TITAN := .engines/torchtitan/.installed
MEGATRON := .engines/megatron/.installed
CHECKPOINTING := .engines/torch_checkpointing/.installed
AUTOMODEL := .engines/automodel/.installed
ZARRITA := .engines/zarrita/.installed
BROWSER := .engines/browser/.installed
# Tests start thousands of processes, which would compile the package anew where Python may not write bytecode itself.
COMPILE := $(BIN)/python -m compileall -q ucformat
# The two environments are made side by side, and what is ready is checked meanwhile.
MAKEFLAGS += --jobs=2

.PHONY: demo test test-all model fuzz check resolve bench docs engines clean

$(STAMP): pyproject.toml constraints.txt ucformat/_native.c ucformat/_native_chunks.c ucformat/_native_fingerprint.c ucformat/_native_pack.c ucformat/_native_pickle.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

$(ENGINE): tests/engines/install_deepspeed.sh pyproject.toml constraints.txt
	PYTHON=$(PYTHON) bash tests/engines/install_deepspeed.sh
	touch $@

# Orbax, JAX and optax; tests have them beside the packages of .venv
$(ORBAX): tests/engines/install_orbax.sh
	PYTHON=$(PYTHON) bash tests/engines/install_orbax.sh
	touch $@

# 3 GB, and so installed only on demand: `make .engines/vllm/.installed`
$(VLLM): tests/engines/install_vllm.sh
	PYTHON=$(PYTHON) bash tests/engines/install_vllm.sh
	touch $@

# 300 MB beside what .venv has; also only on demand
$(TITAN): tests/engines/install_torchtitan.sh $(STAMP)
	PYTHON=$(PYTHON) bash tests/engines/install_torchtitan.sh
	touch $@

# 45 MB beside what .venv has
$(MEGATRON): tests/engines/install_megatron.sh $(STAMP)
	PYTHON=$(PYTHON) bash tests/engines/install_megatron.sh
	touch $@

# 1 MB beside what .venv has
$(CHECKPOINTING): tests/engines/install_torch_checkpointing.sh $(STAMP)
	PYTHON=$(PYTHON) bash tests/engines/install_torch_checkpointing.sh
	touch $@

# 20 MB beside what .venv has
$(AUTOMODEL): tests/engines/install_automodel.sh $(STAMP)
	PYTHON=$(PYTHON) bash tests/engines/install_automodel.sh
	touch $@

# 6 MB of npm, for which node must be there; also only on demand
$(ZARRITA): tests/engines/install_zarrita.sh
	bash tests/engines/install_zarrita.sh
	touch $@

# 3 MB of npm and 130 MB of Playwright, for which Chromium must be there; also only on demand
$(BROWSER): tests/engines/install_browser.sh $(STAMP)
	bash tests/engines/install_browser.sh
	touch $@

engines: $(ENGINE) $(ORBAX) $(MEGATRON) $(CHECKPOINTING)

## demo: train with DeepSpeed ZeRO-3, convert, read slices under other layouts, compare
demo: $(STAMP) $(ENGINE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.demo

## check: linter, formatter, types
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## test: the first tier, in about 30 minutes on two cores: every behaviour and every family once from end to end
test: check $(ENGINE) $(ORBAX) $(MEGATRON) $(CHECKPOINTING)
	$(COMPILE)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not matrix"

## test-all: both tiers (hours): also PostgreSQL, processes on S3, 4 ranks and more, every kill, schedule, power failure
## and mutated input, all configurations of engines, and other random examples each time
test-all: check $(ENGINE) $(ORBAX) $(MEGATRON) $(CHECKPOINTING)
	$(COMPILE)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=explore

## model: each fault at each call of a command, every order of commands at once that is worth trying (hours; goes on
## where it was stopped), power failures, and memory that ends at each allocation of a command that reads
model: $(STAMP)
	$(BIN)/python -m tests.schedules faults --out model-faults.jsonl
	$(BIN)/python -m tests.schedules pairs --out model-pairs.jsonl
	$(BIN)/python -m tests.schedules three 0 100000 --out model-three.jsonl
	$(BIN)/python -m tests.power
	$(BIN)/python -m tests.memory

## fuzz: what strangers write, mutated to reach as much code as possible: 10 million inputs (hours)
fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz --runs 800000 --out .fuzz/done.jsonl

## resolve: whether all extras resolve without constraints.txt, with the releases of today; installs nothing
resolve: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed -e '.[test]' torch==2.13.0

## bench: every benchmark, each printing ratios measured in one run
bench: $(STAMP) $(ENGINE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt s3fs
	$(BIN)/python -m bench.run

## docs: the documentation as a web site, in build/site, with all links checked; it opens without a network
docs: $(STAMP)
	$(BIN)/python docs/site.py

clean:
	rm -rf $(VENV) .engines demo-out bench/out
