# Every developer action has one name, and CI runs the same names. V=1 shows the commands.
PYTHON ?= /usr/bin/python3
VENV := .venv
BUILD := build
PY := $(VENV)/bin/python
V ?= 0
ifeq ($(V),0)
Q := @
QUIET := >$(BUILD)/last.log 2>&1 || { tail -40 $(BUILD)/last.log; exit 1; }
else
Q :=
QUIET :=
endif
say = @printf '  %-10s %s\n' '$(1)' '$(2)'

APT := python3 python3-venv python3-dev python3-bpfcc gcc g++ make libc6-dev linux-libc-dev libbpf-dev clang llvm clang-format \
       bpftool bpftrace libcap2-bin iproute2 binutils podman runc conmon debootstrap
PROBES := $(wildcard probes/*.h probes/*.c) native/wire.h
BPF_OBJECT := $(BUILD)/probes/stallscope.bpf.o
NO_COOKIES_OBJECT := $(BUILD)/probes/stallscope.nocookies.bpf.o
MULTIARCH = $(shell gcc -print-multiarch 2>/dev/null)
SHIM := $(BUILD)/shim/libstallscope.so
BPF_ARCH := $(if $(filter aarch64 arm64,$(shell uname -m)),arm64,x86)

.PHONY: help build generate demo test test-unit test-root test-libs test-pythons test-torch test-inject test-culprit test-shim test-daemon test-unseen test-gpu test-packages natives dist lint fuzz bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BUILD)/apt.stamp: Makefile
	@mkdir -p $(BUILD)
	@missing=; for p in $(APT); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then echo "missing packages:$$missing (install them, or run make as root on Debian)" >&2; exit 1; fi; \
	  printf '  %-10s %s\n' apt "$$missing (a few minutes)"; \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; } >$(BUILD)/apt.log 2>&1 \
	    || { tail -20 $(BUILD)/apt.log; exit 1; }; fi
	@touch $@

$(VENV)/installed.stamp: $(BUILD)/apt.stamp pyproject.toml setup.py
	$(call say,venv,$(VENV) and what pyproject.toml names (about a minute))
	$(Q)[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(Q){ $(PY) -m pip install -q --disable-pip-version-check 'setuptools>=68' wheel cffi && \
	  $(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev]'; } $(QUIET)
	@touch $@

$(BUILD)/drain.stamp: $(VENV)/installed.stamp $(wildcard native/drain/* native/inject/*) native/wire.h native/shim/segment.h native/shim/control.h
	$(call say,cc,native/drain)
	$(Q)$(PY) native/drain/build_drain.py $(QUIET)
	@touch $@

CLANG_BPF = clang -O2 -g -target bpf -mcpu=v3 -D__TARGET_ARCH_$(BPF_ARCH) -DWIRE_BPF $(NO_COOKIES) -Wall -Wextra -Wno-unused-parameter -Werror \
  -I/usr/include/$(MULTIARCH) -Inative -Iprobes -c probes/stallscope.bpf.c
$(NO_COOKIES_OBJECT): NO_COOKIES := -DNO_COOKIES
$(BPF_OBJECT) $(NO_COOKIES_OBJECT): $(BUILD)/apt.stamp $(PROBES)
	$(call say,clang,$@)
	@mkdir -p $(@D)
	$(Q)$(CLANG_BPF) -o $@
	$(Q)llvm-strip -g $@ 2>/dev/null || true

$(SHIM): $(BUILD)/apt.stamp $(wildcard native/shim/*) native/wire.h probes/hooks.def probes/gen_hooks.py probes/gen_shim.py
	$(call say,make,native/shim)
	$(Q)$(MAKE) -s -C native/shim OUT=../../$(BUILD)/shim PYTHON=$(PYTHON) V=$(V)

# By another machine's clang: where its registers are is all that differs.
AARCH64_OBJECT := $(BUILD)/aarch64/stallscope.bpf.o
$(AARCH64_OBJECT): BPF_ARCH := arm64
$(AARCH64_OBJECT): $(BUILD)/apt.stamp $(PROBES)
	$(call say,clang,$@)
	@mkdir -p $(@D)
	$(Q)$(CLANG_BPF) -o $@
	$(Q)llvm-strip -g $@ 2>/dev/null || true

natives: $(SHIM) $(BPF_OBJECT) $(NO_COOKIES_OBJECT) ## what a wheel holds besides Python: setup.py asks for it
	$(Q)$(MAKE) -s -C native/sim OUT=../../$(BUILD)/sim V=$(V)

dist: build ## sdist, and from it a wheel, in dist/
	$(call say,build,dist)
	$(Q)rm -rf dist && $(PY) -m build --no-isolation --outdir dist . $(QUIET)
	@ls -l dist | sed 1d

build: $(BUILD)/drain.stamp $(SHIM) $(BPF_OBJECT) $(NO_COOKIES_OBJECT) $(AARCH64_OBJECT) ## everything that is compiled
	$(call say,make,native/sim tests/targets)
	$(Q)$(MAKE) -s -C native/sim OUT=../../$(BUILD)/sim V=$(V)
	$(Q)$(MAKE) -s -C tests/targets OUT=../../$(BUILD)/targets V=$(V)

generate: ## write the hook table again from probes/hooks.def
	$(Q)$(PYTHON) probes/gen_hooks.py

demo: build ## a simulated job of 8 ranks that one of them blocks, traced
	$(Q)$(VENV)/bin/stallscope demo --ranks 8 --fault never

# These mostly wait, and set no unfiltered probes, which the programs of the other tests would meet.
BESIDE := $(patsubst %,tests/integration/test_%.py,attach_shim inject late_shim run shim_sites sidecar sidecar_containers \
  steps threads workers)
test: build lint ## all tests that a machine without a GPU can run
	@# Tests without privileges keep one core busy, the others mostly wait: side by side they take 20 minutes, not 35.
	$(Q){ code=0; nice -n 19 $(PY) -m pytest tests/unit tests/sim tests/model tests/fuzz || code=1; \
	  $(PY) -m pytest -m "not quiet" tests/shim tests/culprit || code=1; exit $$code; } >$(BUILD)/test-unit.log 2>&1 & first=$$!; \
	$(PY) -m pytest $(BESIDE) >$(BUILD)/test-beside.log 2>&1 & second=$$!; code=0; \
	$(PY) -m pytest tests/integration $(addprefix --ignore=,$(BESIDE)) || code=1; \
	wait $$first || code=1; wait $$second || code=1; cat $(BUILD)/test-unit.log $(BUILD)/test-beside.log; \
	$(PY) -m pytest -m quiet tests/culprit || code=1; exit $$code

test-unit: build ## only what needs no privileges
	$(Q)$(PY) -m pytest tests/unit tests/sim tests/shim tests/fuzz

test-root: build ## all tests; a privileged one that can't run is a failure
	$(Q)STALLSCOPE_ROOT_TESTS=1 $(PY) -m pytest tests/unit tests/sim tests/model tests/integration tests/shim tests/culprit tests/fuzz

test-shim: build ## the preloaded library: all its tests, with sanitizers and 100 million records (5 minutes)
	$(Q)STALLSCOPE_LONG_TESTS=1 $(PY) -m pytest tests/shim

test-libs: build ## real libcudart and libnccl in every supported version
	$(Q)STALLSCOPE_ROOT_TESTS=1 STALLSCOPE_ALL_LIBS=1 $(PY) -m pytest tests/integration/test_real_libraries.py tests/integration/test_real_communicators.py

# What tests/torch runs in. TORCH_PYTHON: a Python 3.11.
TORCH_PYTHON ?= python3.11
TORCH_VENV := $(BUILD)/torch-venv
$(TORCH_VENV)/installed.stamp: tests/torch/requirements.txt
	$(call say,venv,$(TORCH_VENV) with PyTorch (5.5 GB; a minute from a disk, else a download of 3 GB))
	@mkdir -p $(BUILD)
	@free=$$(df --output=avail -BG $(BUILD) | tail -1 | tr -dc 0-9); [ -x $(TORCH_VENV)/bin/python ] || [ "$$free" -ge 8 ] || \
	  { echo "PyTorch needs 8 GB of disk, $$free GB are free" >&2; exit 1; }
	$(Q)[ -x $(TORCH_VENV)/bin/python ] || $(TORCH_PYTHON) -m venv $(TORCH_VENV)
	$(Q){ $(TORCH_VENV)/bin/python -m pip install -q --disable-pip-version-check -r tests/torch/requirements.txt; } $(QUIET)
	@touch $@

ROOTS ?=
RELEASES := trixie sid
test-pythons: build ## call sites on every CPython from 3.9 on that pyenv, the system or build/roots has; ROOTS=1 makes roots of Debian's newer ones (15 minutes)
	$(if $(filter 1,$(ROOTS)),$(call say,debootstrap,$(RELEASES) (0.6 GB in $(BUILD)/roots)))
	$(Q)$(if $(filter 1,$(ROOTS)),sh tests/integration/make_roots.sh $(BUILD)/roots $(RELEASES))
	$(Q)STALLSCOPE_ROOT_TESTS=1 STALLSCOPE_ALL_PYTHONS=1 $(PY) -m pytest -v -s tests/unit/test_stacks.py tests/integration/test_sites.py \
	  tests/integration/test_shim_sites.py tests/integration/test_site_soak.py

test-torch: build $(TORCH_VENV)/installed.stamp ## real PyTorch on the simulated stack (about 10 minutes)
	$(Q)$(PY) -m pytest tests/torch --durations=5

test-inject: build $(TORCH_VENV)/installed.stamp ## the library put into running programs and out again, 100 times each, with PyTorch (3 minutes)
	$(Q)STALLSCOPE_ROOT_TESTS=1 STALLSCOPE_INJECT_TIMES=100 $(PY) -m pytest -s -v tests/integration/test_inject.py tests/torch/test_inject_torch.py

test-culprit: build ## every fault, hosts in step and ahead, three seeds, attached early and late; a healthy job (1.5 hours)
	$(Q)code=0; $(PY) -m tests.culprit --mode all --seeds 3 || code=1; $(PY) -m tests.culprit --via shim --seeds 3 || code=1; \
	STALLSCOPE_ROOT_TESTS=1 STALLSCOPE_LONG_TESTS=1 STALLSCOPE_HEALTHY_SECONDS=600 $(PY) -m pytest -v tests/culprit/test_long.py tests/culprit/test_losses.py || code=1; \
	STALLSCOPE_MODEL_SEEDS=100 $(PY) -m pytest -v tests/model || code=1; exit $$code

test-daemon: build ## the daemon: all its tests, with 500 processes that start and stop within a minute (3 minutes)
	$(Q)STALLSCOPE_ROOT_TESTS=1 STALLSCOPE_DAEMON_PROCESSES=500 STALLSCOPE_DAEMON_SECONDS=60 $(PY) -m pytest -v -s tests/integration/test_daemon.py --durations=0

test-packages: dist ## the wheel on Debian 12 and 13 without compilers, the sdist, the manifests (10 minutes; debootstrap, 600 MB)
	$(Q){ $(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[packages]'; } $(QUIET)
	$(Q)STALLSCOPE_ROOT_TESTS=1 $(PY) -m pytest -v -s tests/packages

test-unseen: build ## programs that those who wrote the lineage of processes had not seen: what is said of them (3 minutes)
	$(Q)$(PY) -m tests.lineage_unseen

test-gpu: ## on a machine with a GPU: writes docs/gpu-findings.md
	$(Q)sh tests/gpu/run.sh

lint: build ## formatting, types, import direction
	$(call say,lint,ruff mypy clang-format hook table)
	$(Q)$(PYTHON) probes/gen_hooks.py --check
	$(Q)$(VENV)/bin/ruff check -q . && $(VENV)/bin/ruff format -q --check .
	$(Q)$(VENV)/bin/mypy --no-error-summary
	$(Q)clang-format --dry-run --Werror native/*.h $$(find native probes tests -name '*.[ch]' -not -path '*/include/*')
	$(Q)$(PY) -m pytest -q tests/unit/test_imports.py

bench: build ## cost per call against bpftrace, and the rest of the promised figures
	$(Q)code=0; $(PY) bench/run.py || code=1; $(PY) bench/shim.py || code=1; exit $$code

fuzz: build ## the hostile-input suites, longer
	$(Q)STALLSCOPE_FUZZ_SECONDS=300 $(PY) -m pytest tests/fuzz

clean: ## remove what make made
	$(Q)rm -rf $(BUILD) $(VENV) dist agent/*.egg-info .hypothesis .mypy_cache .ruff_cache
	$(Q)find agent native probes tests bench \( -name '__pycache__' -o -name '*.so' -o -name '*.o' \) -prune -exec rm -rf {} +
