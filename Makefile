# `make demo` and `make test` need Python 3.11 or newer, a C++20 compiler and
# make; everything else is installed into $(VENV) on the first call.
#
#   make demo      train the example language model
#   make test      run the test suite       (make test PYTEST_ARGS="-k plan")
#   make test-gpu  run all that this machine's GPUs can run, several tests at a
#                  time (make test-gpu GPU_ARGS="--parts 'ranks-8.*'")
#   make docs      make the site of docs/ in out/docs (open index.html)
#   make lint      check every source file as CI does
#   make format    rewrite them as `make lint` wants them
#   make install   only make $(VENV)
#   make clean     remove what was built
#
# Another Python or JAX goes into an environment of its own:
#   make test PYTHON=python3.12 JAX=0.11.2 VENV=.venv-jax-0.11.2
#
# CUDA kernels are compiled for the GPUs of this machine; without a driver they are
# left out. For every kind of GPU, as in CI and in wheels: make install KERNELS=all

PYTHON ?= python3
VENV ?= .venv
# The version of jax and jaxlib; empty: the one that requirements/ pins.
JAX ?=
# Extra that brings GPU support: cuda12 or cuda13, or none. By default the one
# for this machine's driver, and nothing where there is no driver.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n \
	's/.*CUDA Version: \([0-9]*\)\..*/cuda\1/p' | head -n 1)
# What CUDA kernels are compiled for: `native` or `all`.
KERNELS ?= $(if $(CI),all,native)
# Empty: install a wheel, as users get it; the sources are not used in place.
EDITABLE ?= -e
PYTEST_ARGS ?=
GPU_ARGS ?=
DEMO_ARGS ?=
BUILDIFIER_VERSION := 8.2.1

BIN := $(VENV)/bin
# A stamp for each choice of JAX: another one makes the environment anew.
DEPENDENCIES := $(VENV)/.dependencies$(addprefix -,$(JAX))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
comma := ,
EXTRAS := test,examples$(if $(filter cuda12 cuda13,$(CUDA)),$(comma)$(CUDA))

# 9.0 is 90a: those two have instructions that only they understand.
CAPABILITIES := $(sort $(shell nvidia-smi --query-gpu=compute_cap \
	--format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p'))
ARCHITECTURES := $(addsuffix -real,\
	$(patsubst 100,100a,$(patsubst 90,90a,$(CAPABILITIES))))
empty :=
space := $(empty) $(empty)
ifeq ($(KERNELS),all)
  KERNEL_ARGS :=
else ifneq ($(ARCHITECTURES),)
  KERNEL_ARGS := -DCMAKE_CUDA_ARCHITECTURES=$(subst $(space),;,$(ARCHITECTURES))
  KERNEL_NOTE := CUDA kernels are compiled for $(ARCHITECTURES)
else
  KERNEL_ARGS := -DJAX_EP_CUDA=OFF
  KERNEL_NOTE := No NVIDIA driver here: CUDA kernels are left out
endif
# A stamp for each choice of kernels: another one builds anew.
INSTALLED := $(VENV)/.installed-$(KERNELS)

sources = $(shell find $(1) -type f \( $(2) \) 2>/dev/null | sort)
NATIVE := CMakeLists.txt $(call sources,cc xla_ffi,\
	-name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
CPP := $(call sources,cc xla_ffi benchmarks,\
	-name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
PY := jax_ep tests examples benchmarks
BAZEL := $(wildcard MODULE.bazel BUILD.bazel) \
	$(call sources,cc xla_ffi requirements $(PY),-name 'BUILD.bazel' -o -name '*.bzl')

.PHONY: demo test test-gpu docs lint lint-python lint-types lint-cpp lint-bazel format \
	install clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_moe_lm.py $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(INSTALLED)
	$(BIN)/python tests/run_gpu.py $(GPU_ARGS)

docs: $(INSTALLED) $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs out/docs

install: $(INSTALLED)

# `make -k lint` goes on after a part that fails.
lint: lint-python lint-types lint-cpp lint-bazel

lint-python: $(VENV)/.lint
	$(BIN)/ruff check $(PY) docs
	$(BIN)/ruff format --check $(PY) docs

lint-types: $(VENV)/.lint
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python \
	  --min-severity error --summary=none

lint-cpp: $(VENV)/.lint
	$(BIN)/clang-format --dry-run --Werror $(CPP)

lint-bazel: $(VENV)/.lint
	@$(call buildifier,-mode=check -lint=warn)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only --exit-zero $(PY)
	$(BIN)/ruff format $(PY) docs
	$(BIN)/clang-format -i $(CPP)
	@$(call buildifier,-mode=fix -lint=fix)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache

# npm brings buildifier's binary. A machine without npm checks the rest; in CI
# that is an error.
buildifier = \
	if [ -x $(VENV)/node_modules/.bin/buildifier ]; then \
	  echo "buildifier $(1) $(BAZEL)"; \
	  $(VENV)/node_modules/.bin/buildifier $(1) $(BAZEL); \
	else \
	  echo "NOT CHECKED: BUILD.bazel files. buildifier comes through npm," \
	    "which this machine lacks: install Node.js with npm, then" \
	    "remove $(VENV)/.lint and try again." >&2; \
	  [ -z "$$CI" ]; \
	fi

# The environment with every dependency, without the package itself.
$(DEPENDENCIES): requirements/test.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jax_ep needs Python 3.11 or newer and $(PYTHON) is not:" \
	    "name another one, make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; Debian and Ubuntu" \
	    "have it in the package python3-venv" >&2; exit 1; }
	$(PIP) install --no-compile -r requirements/test.txt
	$(if $(JAX),$(PIP) install --no-compile jax==$(JAX) jaxlib==$(JAX))
	@touch $@

# Editable: Python sources are used where they are, and the native modules are
# built again when one of their sources is newer than the stamp.
$(INSTALLED): $(DEPENDENCIES) pyproject.toml $(NATIVE) \
	$(if $(EDITABLE),,$(call sources,jax_ep,-name '*.py'))
	$(if $(KERNEL_ARGS),@echo "$(KERNEL_NOTE); make KERNELS=all compiles all")
	CMAKE_ARGS="$(KERNEL_ARGS) $$CMAKE_ARGS" \
	  $(PIP) install --no-compile $(EDITABLE) '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.docs: $(DEPENDENCIES) requirements/docs.txt
	$(PIP) install --no-compile -r requirements/docs.txt
	@touch $@

$(VENV)/.lint: $(DEPENDENCIES) requirements/lint.txt Makefile
	$(PIP) install --no-compile -r requirements/lint.txt
	@if command -v npm >/dev/null; then \
	  echo "npm install @bazel/buildifier@$(BUILDIFIER_VERSION)"; \
	  npm install --silent --no-save --no-package-lock --prefix $(VENV) \
	    @bazel/buildifier@$(BUILDIFIER_VERSION); \
	fi
	@touch $@
