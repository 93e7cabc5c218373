# Two commands: `make run` trains a parity pair on real text and judges it; `make test` runs the checks and most tests.
# CI runs `make test` and `make test-slow`.
# Elsewhere than where torch's CPU build is the default: make run PIP_ARGS="--extra-index-url <index>" (see README.md).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# What is never imported need not be compiled; what is, Python compiles once, at its first import; but commands would do
# it at each start where PYTHONDONTWRITEBYTECODE is set, as in images of containers.
COMPILED := annotated_types antlr4 attr hydra numpy omegaconf packaging pydantic pydantic_core scipy/special typing_extensions.py \
  typing_inspection yaml
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS)
STUDY := parity_pair
# Workers of the tests: one more than the two cores of CI, as many tests wait. A fourth gained nothing.
WORKERS ?= 3
# Hundreds of processes import the same sources: what they are compiled to is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-slow test-all gpu gpu-wheels checks lint types imports install peers models clean

run: install
	$(BIN)/python run.py -m study=$(STUDY)
	$(BIN)/python -m harness verdict $(STUDY)

test: install
	$(MAKE) --no-print-directory -j 2 peers checks
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not full and not slow'

# The files that take longest: killed processes, a real SLURM, whole studies.
test-slow: install peers
	$(BIN)/python -m pytest -n $(WORKERS) -m 'slow and not full'

# Every product of which `make test` runs a covering part; docs/suite.md has its record.
test-all: install
	$(MAKE) --no-print-directory -j 2 peers checks
	$(MAKE) --no-print-directory models
	$(BIN)/python -m pytest -n $(WORKERS) -m 'full or not full'

# What only a GPU can show, offline and on the image's own torch: nothing is installed here. docs/records/gpu.md has the results.
gpu:
	python3 benchmarks/gpu/acceptance.py $(GPU_ARGS); found=$$?; python3 benchmarks/pages/gpu.py && exit $$found

# What an image with torch for CUDA may lack, for `make gpu` to find beside the sources: some 40 MB, with a network.
GPU_PYTHON ?= 3.12
gpu-wheels: install
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir wheels_gpu antlr4-python3-runtime==4.9.3
	$(BIN)/python -m pip download --quiet --no-deps --dest wheels_gpu --only-binary=:all: --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
	  -c constraints.txt hydra-core omegaconf submitit cloudpickle pyyaml scipy safetensors psutil xxhash packaging jinja2 markupsafe \
	  pydantic pydantic-core annotated-types typing-extensions typing-inspection

# Beside the engines to compare with, which come over the network.
checks: lint types imports

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

install: $(VENV)/.installed

# The engines to compare with, and sweepers and launchers of Hydra's. DeepSpeed's build asks for torch and would fetch another one if it were left alone.
peers: $(VENV)/.peers

$(VENV)/.peers: $(VENV)/.installed
	$(PIP_INSTALL) -c constraints.txt -e '.[peers,hydra]' wheel setuptools
	$(PIP_INSTALL) --no-deps --no-build-isolation deepspeed==0.19.8
	touch $@

# Models of other libraries, for tests of `test-all`, which skip what cannot be imported. A torchvision of another build
# than torch's breaks transformers too, and goes.
models: $(VENV)/.models

$(VENV)/.models: $(VENV)/.installed
	$(PIP_INSTALL) -c constraints.txt -e '.[models]'
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision
	touch $@

# torch first and pinned: a looser request would bring the CUDA build and its gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("this is Python %d.%d, and 3.11 is the oldest that can be used; type: make PYTHON=python3.11" % sys.version_info[:2])'
	"$(PYTHON)" -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt torch==2.13.0 numpy
	$(PIP_INSTALL) -c constraints.txt -e '.[wandb,analysis,dev]'
	$(BIN)/python -m compileall -q -j 0 harness hydra_plugins $(addprefix $(VENV)/lib/python3*/site-packages/,$(COMPILED))
	touch $@

clean:
	rm -rf $(VENV)
