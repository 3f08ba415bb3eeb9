# Everything sets itself up: `make demo` and `make test` need python3 (>= 3.10, with venv and headers),
# a C++20 compiler, make and git. CMake and ninja come from pip.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# A caller's module path or user site must not stand in for what is installed here.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find csrc python -type f \
  \( -name '*.cpp' -o -name '*.mm' -o -name '*.m' -o -name '*.h' -o -name '*.py' -o -name '*.pyi' -o -name '*.json' -o -name py.typed \))
CPP     := $(shell find csrc tests/cpp tests/apple -type f \
  \( -name '*.cpp' -o -name '*.mm' -o -name '*.m' -o -name '*.h' \))

.PHONY: help demo test cpp-test cpp-test-aarch64 check-apple check-apple-link lint format bench clean

help:
	@echo "make demo              generate text with the example model, through mlx_moe's layers"
	@echo "make test              install and run the tests (C++ unit tests too where doctest is found)"
	@echo "make cpp-test          C++ unit tests under ASan and UBSan (needs doctest)"
	@echo "make cpp-test-aarch64  the same tests cross-built and run by qemu-aarch64"
	@echo "make check-apple       the Objective-C++ on Linux: types for macOS, and tests on our own Core ML"
	@echo "make check-apple-link  the whole extension cross-compiled and linked for macOS, in minutes"
	@echo "make lint | format     ruff, mypy and clang-format: check | rewrite"
	@echo "make bench             run the benchmarks, against other engines where they install"

demo: $(VENV)/.installed
	$(BIN)/mlx_moe generate --model examples/tiny-qwen3-moe --prompt - --max-tokens 80 \
	  --temp 0.6 --top-p 0.9 --seed 3 --compare < examples/prompt.txt

test: $(VENV)/.installed
	@if echo '#include <doctest/doctest.h>' | $(or $(CXX),c++) -x c++ -E - >/dev/null 2>&1; then \
	  $(MAKE) --no-print-directory cpp-test; \
	else echo "doctest not found: C++ unit tests skipped"; fi
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile tests

CPP_TEST := -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
  -DMLX_MOE_PYTHON=OFF -DMLX_MOE_TESTS=ON

# Where the machine has no tiles, the AMX kernel runs on emulated ones.
EMULATE := $(shell grep -qs amx_bf16 /proc/cpuinfo || echo -DMLX_MOE_EMULATE_AMX=ON)

cpp-test: $(VENV)/.dev
	$(BIN)/cmake $(CPP_TEST) -B build/asan -DMLX_MOE_SANITIZE=address,undefined $(EMULATE)
	$(BIN)/cmake --build build/asan
	$(BIN)/ctest --test-dir build/asan --parallel 2 --output-on-failure --no-tests=error

cpp-test-aarch64: $(VENV)/.dev
	$(BIN)/cmake $(CPP_TEST) -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=tests/cpp/aarch64.cmake
	$(BIN)/cmake --build build/aarch64
	$(BIN)/ctest --test-dir build/aarch64 --parallel 2 --output-on-failure --no-tests=error

check-apple: $(VENV)/.apple
	tests/apple/check.sh $(BIN) build/apple

check-apple-link: $(VENV)/.apple
	tests/apple/link.sh $(BIN) build/apple-link

lint: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

# Left out: quality, which takes an hour, and floor, whose figures layer prints.
BENCHMARKS := bucket routing dispatch tiers schedule npumoe gpu_ndp simulate_check store overhead \
  calibrate precision agreement memory packed split_expert ranks layer model

# A forced OpenBLAS core type would slow the numpy that we compare with.
bench: $(VENV)/.installed $(VENV)/.bench
	@failed=; for name in $(BENCHMARKS); do \
	  echo "== $$name"; \
	  env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python benchmarks/$$name.py \
	    || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10; set PYTHON=... to a newer one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installed as a user would have it, not editable: what the tests see is what the wheel holds. Python
# compiles what is imported, when it is; pip would compile five times as much first.
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-compile '.[test]'
	@touch $@

# These add an extra's packages to the installed package; nothing is built again.
$(VENV)/.dev: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile 'mlx-npumoe[dev]'
	@touch $@

# A compiler for macOS with the headers of its C library.
$(VENV)/.apple: | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'ziglang>=0.15' 'cmake>=3.21' ninja 'nanobind>=3.1'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.installed
	-$(BIN)/python -m pip install --quiet --prefer-binary 'mlx-npumoe[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
