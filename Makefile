# Everything runs from a fresh clone: each target makes what it needs. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OP ?= edge
MODEL ?= camoxpert
DEMO ?= full
PYTEST_ARGS ?=
# camoxpert's report lies in demo/, every other one in a folder of its own in there.
DEMOS = $(if $(filter all,$(MODEL)),$(filter-out common,$(patsubst examples/%/demo.py,%,$(wildcard examples/*/demo.py))),$(MODEL))
# One GPU architecture is enough for the tests; a wheel has all.
CAMOX_CUDA_ARCHS ?= sm_80

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check --no-input
# One stamp for each choice of torch, so that another choice is installed.
INSTALLED := $(VENV)/installed-$(shell printf %s "$(TORCH)" | tr -c "A-Za-z0-9." _)
OF_EXAMPLES := $(wildcard examples/*/requirements.txt)
# Without optimisation where this machine cannot run the kernels; a wheel is for others.
CAMOX_QUICK_BUILD ?= 1
# The tree holds one build: that of other choices is made again.
BUILT := $(VENV)/built-$(shell printf %s "$(CAMOX_CUDA_ARCHS)-$(CAMOX_QUICK_BUILD)" | tr -c "A-Za-z0-9" _)
AUDITORS := $(VENV)/installed-auditors
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
FORMATTED = $(shell find csrc tests -name '*.[ch]' -o -name '*.cpp' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

export CAMOX_CUDA_ARCHS CAMOX_QUICK_BUILD
.DELETE_ON_ERROR:
.PHONY: help setup build test demo bench targets lint format wheel audit budget break sanitize clean

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

$(INSTALLED): requirements/dev.txt $(OF_EXAMPLES) scripts/check_machine.sh
	@sh scripts/check_machine.sh "$(PYTHON)"
	@$(PY) -c pass 2>/dev/null || { echo "creating $(VENV)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing $(TORCH) and what requirements/dev.txt and the examples list"
	@$(PIP) install "$(TORCH)" -r requirements/dev.txt $(OF_EXAMPLES:%=-r %)
	@rm -rf $(VENV)/installed-* $(VENV)/built* build
	@touch $@

# In place, and found from everywhere by a .pth file: an editable install would compile everything anew at each change.
$(BUILT): $(INSTALLED) $(SOURCES)
	@echo "building camox_ops"
	@rm -f $(VENV)/built*
	@$(PY) setup.py -q build_ext --inplace
	@$(PY) -c "import sysconfig; open(sysconfig.get_path('purelib') + '/camox_ops_checkout.pth', 'w').write('$(CURDIR)\n')"
	@touch $@

setup: $(INSTALLED) ## .venv with torch (TORCH=torch==2.13.0) and the tools, made by PYTHON=python3

build: $(BUILT) ## the extension, in place

# The tests start interpreters: bytecode is kept for them also where the environment forbids it.
test: $(BUILT) ## the tests but the slow ones (PYTEST_ARGS="-k edge")
	@command -v nvcc >/dev/null && echo "nvcc: $$(command -v nvcc)" || echo "nvcc: not found, the CUDA sources are not compiled"
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist loadfile -m "not slow" $(PYTEST_ARGS)

# All of them, whichever fail. MODEL=all: every example that has a demo.
demo: $(BUILT) ## trains an example with stock PyTorch and with camox_ops, writes a report (DEMO=full|quick, MODEL=camoxpert|vision_bdh|k1|emberformer|moe_text|all)
	@failed=; for model in $(DEMOS); do \
	  out=demo/$$model; test $$model != camoxpert || out=demo; \
	  echo "$(PY) examples/$$model/demo.py --mode $(DEMO) --out $$out"; \
	  $(PY) examples/$$model/demo.py --mode $(DEMO) --out $$out || failed="$$failed $$model"; \
	done; \
	test -z "$$failed" || { echo "demo: failed:$$failed" >&2; exit 1; }

bench: $(BUILT) ## measures one op on a quiet machine (OP=edge, or OP=all)
	$(PY) benchmarks/run.py --op $(OP)

targets: $(BUILT) ## holds the committed measurements against every target
	$(PY) benchmarks/targets.py

# All of them, whichever fail.
lint: $(INSTALLED) ## ruff, clang-format, layout of the tree
	@failed=; \
	$(VENV)/bin/ruff check . || failed="$$failed, ruff check"; \
	$(VENV)/bin/ruff format --check . || failed="$$failed, ruff format"; \
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED) || failed="$$failed, clang-format"; \
	$(PY) scripts/check_layout.py || failed="$$failed, scripts/check_layout.py"; \
	test -z "$$failed" || { echo "lint: failed:$${failed#,}" >&2; exit 1; }

format: $(INSTALLED) ## rewrites the sources as lint wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

$(AUDITORS): $(INSTALLED) requirements/audit.txt
	@$(PIP) install -r requirements/audit.txt
	@touch $@

wheel: $(AUDITORS) ## dist/*.whl for every GPU architecture, its size and build time
	@CAMOX_CUDA_ARCHS=all CAMOX_QUICK_BUILD=0 $(PY) scripts/build_wheel.py

audit: wheel ## the stable ABIs of the wheel (abi3audit, torch-abi-audit)
	@$(PY) scripts/audit.py

budget: wheel ## registers, spills, accesses and modelled speed of the wheel's kernels against csrc/cuda_*.json
	@$(PY) scripts/cuda_budget.py --binary dist/camox_ops-*.whl
	@$(PY) scripts/cuda_model.py --check --binary dist/camox_ops-*.whl

break: $(INSTALLED) ## builds OP wrong by 1e-3 and demands that its tests turn red (OP=edge)
	$(PY) scripts/check_break.py $(OP)

sanitize: $(INSTALLED) ## the C kernels under ASan and UBSan, no Python in between
	$(PY) scripts/sanitize.py

clean: ## removes what was built, keeps .venv
	rm -rf build dist demo *.egg-info camox_ops/*.so $(VENV)/built*
