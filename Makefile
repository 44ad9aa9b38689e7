# SPDX-License-Identifier: Apache-2.0
# A small front for CMake: `make help` lists the targets. Everything here can be done with cmake presets by hand.

JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
BUILD   = build

.PHONY: all command cuda demo demo-page check test test-all test-cuda bench bundle wheel docs format install \
    clean help setup-build

all: setup-build
	@cmake --preset release -DESA_CUDA=AUTO -DCMAKE_INSTALL_PREFIX="$(PREFIX)" >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target esa_product

# The command without the CUDA plugin, which takes minutes where nvcc is found.
command: setup-build
	@cmake --preset release -DCMAKE_INSTALL_PREFIX="$(PREFIX)" >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target esa_cli

setup-build:
	@scripts/setup.sh build

# A prompt becomes two videos with the bundled model, dense and sparse, side by side. `build/esa demo` prints the table
# for attention alone. With an NVIDIA driver the plugin is built too, if nvcc is found: the command takes the GPU and
# says so, or says why it does not.
NVIDIA = $(wildcard /proc/driver/nvidia/version)
demo:
	@scripts/setup.sh video
	@$(MAKE) --no-print-directory $(if $(NVIDIA),all,command)
	@mkdir -p demo
	@$(BUILD)/esa generate --compare dense --dtype auto \
	    --dense-out demo/dense.mp4 --out demo/sparse.mp4 --beside-out demo/side-by-side.mp4 --json demo/demo.json

# The same in a browser: the server makes videos with the bundled model until Ctrl-C.
demo-page:
	@scripts/setup.sh video
	@$(MAKE) --no-print-directory $(if $(NVIDIA),all,command)
	@mkdir -p demo
	@$(BUILD)/esa serve --dtype auto --output-dir demo/videos

# Libraries without the CUDA plugin and a part of the tests, with few cases each.
check: setup-build
	@cmake --preset release >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target esa_check
	@ESA_TEST_SMALL=1 ctest --test-dir $(BUILD) -L '^check$$' -j $(JOBS) --output-on-failure

test:
	@scripts/setup.sh test
	@JOBS=$(JOBS) scripts/test.sh short

test-all:
	@scripts/setup.sh test-all
	@JOBS=$(JOBS) scripts/test.sh all

# The plugin has a build folder of its own: it takes minutes, and everything else works without it.
cuda: setup-build
	@cmake --preset release -B build-cuda -DESA_CUDA=ON >/dev/null
	@cmake --build build-cuda -j $(JOBS)

test-cuda: cuda
	@scripts/test-cuda.sh build-cuda

bench: command
	@scripts/setup.sh bench
	@cmake --build $(BUILD) -j $(JOBS) --target session_overhead
	@bench/cpu.sh

bundle:
	@scripts/setup.sh test
	@JOBS=$(JOBS) scripts/bundle.sh

# The release wheel (docs/install.md). ESA_CUDA=OFF leaves the plugin out, CUDACXX names the nvcc.
wheel: setup-build
	@JOBS=$(JOBS) scripts/wheel.sh

# The pages of docs/ as a site, in build/site/ (mkdocs.yml). Every warning is an error.
docs:
	@NO_MKDOCS_2_WARNING=1 ESA_REQUIREMENTS=docs/requirements-docs.txt scripts/in-env.sh mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Writes C and CUDA as clang-format does, and Python as ruff's fixes do. tests/tree/check_style.py checks both.
format:
	@git ls-files -z '*.c' '*.h' '*.cu' '*.cuh' '*.def' ':!third_party' ':!tests/golden' ':!compat/third_party' | \
	    xargs -0 scripts/in-env.sh clang-format -i --style=file
	@scripts/in-env.sh ruff check --fix --quiet .

install: all
	@cmake --install $(BUILD)

clean:
	rm -rf build build-* bundle demo dist

help:
	@echo 'make            build the libraries (and the CUDA plugin if nvcc is found) and the command, build/esa'
	@echo 'make demo       turn a prompt into a video, dense and sparse, on the GPU if there is one: demo/*.mp4'
	@echo 'make demo-page  the same in a browser: prints the address of a page to type prompts into'
	@echo 'make check      build libesa and run its fast tests: under a minute on two cores'
	@echo 'make test       run all tests: release, sanitizers, NEON under qemu, short fuzzing, Python'
	@echo 'make test-all   also thread sanitizer, clang, long fuzzing, fresh clone; writes docs/results/test-all.md'
	@echo 'make cuda       build everything with the CUDA plugin in build-cuda/ (needs nvcc 12.4 or newer)'
	@echo 'make test-cuda  run the tests on the GPU of this machine, also under compute-sanitizer'
	@echo 'make bench      measure dense and sparse attention beside sgemm on the CPU; JSON in build/bench/'
	@echo 'make bundle     pack binaries, tests and libraries for a machine without package installs'
	@echo 'make wheel      build a wheel for any Linux with glibc 2.28 or newer in dist/ (its CUDA plugin needs nvcc)'
	@echo 'make docs       build the documentation as a site: build/site/index.html'
	@echo 'make format     write C, CUDA and Python in the style that the tests check'
	@echo 'make install    install headers, libraries, pkg-config and CMake files, command (PREFIX, DESTDIR)'
	@echo 'make clean      remove all build folders'
	@echo 'Variables: JOBS=n, PREFIX=dir, ESA_FUZZ_SECONDS=n (make test: 30, make test-all: 1200)'
