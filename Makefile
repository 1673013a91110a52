# Every command a person or a check needs. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# every path here is relative to the checkout: `make -f` from elsewhere would find neither servers nor repositories
ifeq ($(wildcard setup.sh),)
$(error this is $(CURDIR), which is no checkout. Run the command there: make -C $(dir $(firstword $(MAKEFILE_LIST))) $(MAKECMDGOALS))
endif

# the interpreter of every command; setup.sh makes .venv with PYTHON, from the environment or the command line
PY := .venv/bin/python
DATA ?= online-retail
PROFILE ?= cpu
# ensemble: a model per stage; fused: one model that runs the four stages
LAYOUT ?= ensemble
# of the merlin profile: 24.03 (merlin-hugectr:24.06, the last image with HPS) or modern (any current one)
TRITON ?=
REPO ?= model_repository
# settings of the export (docs/settings.md lists every key); empty = the defaults
CONFIG ?=
GRPC_PORT ?= 8001
HTTP_PORT ?= 8000
METRICS_PORT ?= 8002
GATEWAY_PORT ?= 8080
# settings of the gateway (docs/gateway.md); empty = the defaults
GATEWAY_CONFIG ?=
# folder of PEM files with which gRPC speaks TLS (docs/operating.md); empty = plain
TLS ?=
# make splits at spaces: paths are names of targets, and arguments without quotes
refuse_space = $(if $(word 2,$($(1))),$(error $(1) is "$($(1))", and make takes no path with a space. Rename the folder, or link to it))
ifneq ($(filter-out help stop,$(or $(MAKECMDGOALS),help)),)
$(foreach name,REPO DATA CONFIG GATEWAY_CONFIG TLS,$(call refuse_space,$(name)))
endif
# address the server listens at: this machine only, or 0.0.0.0 for everybody who reaches it. Not taken from the environment, where
# some shells put the machine's name
HOST = 127.0.0.1

# without bytecode, every start of a process compiles the libraries it imports, which takes longer than the command itself
unexport PYTHONDONTWRITEBYTECODE

URL = $(if $(filter 127.0.0.1 0.0.0.0,$(HOST)),localhost,$(HOST)):$(GRPC_PORT)
RECOMMEND = $(PY) -m clients recommend --url $(URL) --repo $(REPO)
# users `make run` shows; empty: some that the repository knows. The last one is unknown (a cold start)
USERS ?= $(if $(filter online-retail,$(DATA)),17850 12583 14911 999999999)
# a port set by the caller narrows `make stop` to that server; without one it stops all that were started here
ONE_SERVER = $(if $(filter-out file,$(origin GRPC_PORT)),--grpc-port $(GRPC_PORT))
as_name = $(subst =,-,$(subst :,_,$(subst /,_,$(1))))
# a server runs without a gateway where nobody chose its port and that port is taken
GATEWAY_OPTIONS = --gateway-port $(GATEWAY_PORT) $(if $(GATEWAY_CONFIG),--gateway-config $(GATEWAY_CONFIG)) \
	$(if $(filter file,$(origin GATEWAY_PORT)),--gateway-optional)
# only where the caller chose: a server that runs with another address is then named instead of kept
HOST_OPTION = $(if $(filter command,$(origin HOST)),--host $(HOST))
# written by a finished export; `make run` exports again with other variables, newer settings, data or code, or without the repository
EXPORTED = .run/exported/$(call as_name,$(REPO)-$(PROFILE)-$(LAYOUT)-$(DATA)$(if $(TRITON),-$(TRITON))$(if $(CONFIG),-$(CONFIG)))
SOURCES = requirements/export.txt $(CONFIG) $(shell find export repository training serving hps_config $(wildcard $(DATA) data/$(DATA)) -type f -not -path '*/__pycache__/*' 2>/dev/null)

.PHONY: help setup run test lanes test-unit coverage stop export serve check perf baseline bounds bounds-tables soak live tune eval check-feast check-deploy audit docs lint

help: ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: DATA=$(DATA) PROFILE=$(PROFILE) LAYOUT=$(LAYOUT) REPO=$(REPO) GRPC_PORT=$(GRPC_PORT) HTTP_PORT=$(HTTP_PORT) METRICS_PORT=$(METRICS_PORT) GATEWAY_PORT=$(GATEWAY_PORT) HOST=$(HOST)"

setup: ## on a fresh machine: apt packages and .venv (PYTHON=/path/to/python: CPython 3.11 or 3.12; without one, uv downloads it)
	@./setup.sh

run: setup ## from a bare machine to served recommendations: setup, training, export, tritonserver, answers with titles
	@$(MAKE) --no-print-directory $(EXPORTED) serve
	@users=($(USERS)); \
	if [ $${#users[@]} = 0 ]; then \
		known="$$($(PY) -m clients users --repo $(REPO))"; mapfile -t users <<< "$$known"; users+=(999999999); \
	fi; \
	for user_id in "$${users[@]}"; do $(RECOMMEND) --user-id "$$user_id" -k 5; done; \
	$(PY) -m clients buy --url $(URL) --repo $(REPO) --user-id "$${users[0]}"; \
	printf '\nCall it:  %s --user-id %q -k 10    (add --json for machines)\n' "$(RECOMMEND)" "$${users[0]}"
	@echo "Stop it:  make stop$(if $(ONE_SERVER), GRPC_PORT=$(GRPC_PORT))"

export: setup ## data set (folder or bundled name) to repository: DATA=… PROFILE=cpu|merlin LAYOUT=ensemble|fused TRITON=24.03|modern REPO=… CONFIG=…
	@rm -f .run/exported/$(call as_name,$(REPO))-*
	@$(PY) -m export build --data $(DATA) --profile $(PROFILE) --layout $(LAYOUT) --repo $(REPO) $(if $(TRITON),--triton $(TRITON)) $(if $(CONFIG),--config $(CONFIG))
	@mkdir -p .run/exported && touch $(EXPORTED)

$(EXPORTED): $(if $(wildcard $(REPO)/recommend),$(SOURCES),missing)
	@$(MAKE) --no-print-directory export

.PHONY: missing
missing:

serve: setup ## tritonserver and gateway on a repository, returns when every model is ready: REPO=… GRPC_PORT=… HTTP_PORT=… METRICS_PORT=… GATEWAY_PORT=… GATEWAY_CONFIG=… HOST=… TLS=…
	@$(PY) -m server start --repo $(REPO) --grpc-port $(GRPC_PORT) --http-port $(HTTP_PORT) --metrics-port $(METRICS_PORT) $(HOST_OPTION) $(GATEWAY_OPTIONS) $(if $(TLS),--tls $(TLS))

stop: ## stop the servers that make run or make serve started (GRPC_PORT=… stops that one)
	@if [ -x $(PY) ]; then $(PY) -m server stop $(ONE_SERVER); else echo "nothing to stop: .venv does not exist"; fi

check: setup ## say what will fail in a repository and how to fix it, without starting anything: REPO=…
	@$(PY) -m export check --repo $(REPO)

eval: setup ## quality of the pipeline, stage by stage and through a real server, beside four baselines: DATA=…
	@$(PY) -m export evaluate --data $(DATA) $(if $(CONFIG),--config $(CONFIG))

perf: setup ## sweep, report, SLO verdict (against the server at GRPC_PORT)
	@$(PY) -m perf --url $(URL) --repo $(REPO)

baseline: setup ## NVIDIA's multi-stage recommender and ours on the same tritonserver, interleaved; exports synthetic:reference first
	@$(PY) -m experiments.merlin

# repository of synthetic:reference that make baseline exports
REFERENCE = .run/merlin/reference

bounds: setup ## every speed that has a bound, on synthetic:reference: baseline, overhead at C = 200 and 1,000, growth, each model, smaller rankers
	@status=0; \
	$(PY) -m experiments.merlin || status=1; \
	$(PY) -m experiments.overhead --repo $(REFERENCE) --candidates 200 || status=1; \
	$(PY) -m experiments.overhead --repo $(REFERENCE) --candidates 1000 || status=1; \
	$(PY) -m experiments.growth --repo $(REFERENCE) || status=1; \
	$(PY) -m perf models --repo $(REFERENCE) || status=1; \
	$(PY) -m experiments.compression --data synthetic:reference || status=1; \
	exit $$status

# of the table that is larger than its RAM (50,000,000: 12 GB of disk, and 4 GB of shared memory for the comparison)
ROWS ?= 50000000
# exponent of the keys' popularity at which a tenth of these rows is hit by 95 % of the keys; empty: the one of 50,000,000
ZIPF ?=

# repository whose rows are as wide as those of the large table
WIDE = .run/perf/wide-$(notdir $(EXPORTED))

$(WIDE).exported: experiments/wide.toml $(SOURCES)
	@$(PY) -m export build --data $(DATA) --repo $(WIDE) --config $<
	@touch $@

bounds-tables: setup $(WIDE).exported ## every speed of the embedding tables that has a bound, over a repository of its own: DATA=… ROWS=…
	@$(PY) -m experiments.tables hits misses growth updates large --rows $(ROWS) $(if $(ZIPF),--zipf $(ZIPF)) --repo $(WIDE)

# of make live: the repository of the log without its last weeks; MINUTES: how long it may take, beside the export
LIVE = .run/live/$(call as_name,$(DATA))

$(LIVE).exported: $(SOURCES)
	@$(PY) -m experiments.replay export --data $(DATA) --repo $(LIVE)
	@touch $@

live: MINUTES ?= 3
live: setup $(LIVE).exported ## the last weeks of the log replayed as live events: frozen and live quality side by side: DATA=… MINUTES=…
	@$(PY) -m experiments.replay run --data $(DATA) --repo $(LIVE) --minutes $(MINUTES)

soak: MINUTES ?= 60
soak: setup ## the service under load, faults and moves for MINUTES; then each fault alone, embedding tables and live events under kills: REPO=… MINUTES=…
	@status=0; \
	$(PY) -m experiments.gateway_soak --repo $(REPO) --minutes $(MINUTES) || status=1; \
	$(PY) -m experiments.recovery --repo $(REPO) --rounds $$(( ($(MINUTES) + 19) / 20 )) || status=1; \
	$(PY) -m experiments.soak --seconds $$(( $(MINUTES) * 10 )) || status=1; \
	$(PY) -m experiments.live_kills --repo $(REPO) || status=1; \
	exit $$status

tune: setup ## search batching, instances, threads and the index's effort under the SLO; writes tuned.toml for CONFIG=…: REPO=…
	@$(PY) -m perf.tune --repo $(REPO)

# a worker per core, four at most, each computing on one thread; a file's tests stay together, as they share what it builds
PYTEST = $(PY) -m pytest -q --numprocesses logical --maxprocesses 4 --dist loadfile

# of check-deploy: schemas and kubectl, 170 MB, which nothing else needs
DEPLOY_TOOLS = .run/deploy-tools

test lanes: export FOR_TESTS = 1

# mypy has one thread, so the lanes begin beside it; they take far longer, so that their verdict comes last. Nothing stops the other
test: setup ## everything the tests need, then make lint and all lanes: unit, long, contract, server, gpu
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint lanes

lanes: setup # without the flags of this make, which tests would pass on to the commands that they run
	@MAKEFLAGS= MFLAGS= $(PY) -m tests.lanes $(PYTEST)

test-unit: setup ## the fast lane: no tritonserver, nothing that takes minutes; more workers than cores, because some tests wait
	@OMP_NUM_THREADS=1 $(PYTEST) --numprocesses 4 tests/unit

# loops that are compiled to machine code count as missed, because nothing traces them
coverage: setup ## branch coverage of what trains, publishes and serves, by the lanes that need no server; a quarter of an hour
	@$(PYTEST) tests/unit tests/long --cov-branch --cov-report=term \
		$(addprefix --cov=,export gateway hps_config live repository server serving training trials)

check-feast: setup ## check the layout of live state in Redis against the real Feast, in an environment of its own
	@$(PY) -m experiments.feast_layout

check-deploy: setup ## render and validate deploy/ offline: Kubernetes, Istio, KEDA, KServe, alerts and their tests, systemd
	@[ -x $(DEPLOY_TOOLS)/bin/python ] || .venv/bin/uv venv -q --python $(PY) $(DEPLOY_TOOLS)
	@VIRTUAL_ENV=$(DEPLOY_TOOLS) .venv/bin/uv pip install -q --no-deps --require-hashes -r requirements/deploy.txt
	@$(DEPLOY_TOOLS)/bin/python deploy/check.py

# names packages to PyPI's list of vulnerabilities: the one command here that needs the internet beside setup
audit: setup ## look all pinned packages up in the list of known vulnerabilities (needs the internet)
	@mkdir -p .run && grep -hoE '^[A-Za-z0-9._-]+==[^ ;\\+]+' requirements/dev.txt requirements/deploy.txt | sort -u > .run/audited.txt  # no hashes, no +cpu
	@.venv/bin/uv tool run --from pip-audit==2.10.1 pip-audit --strict --progress-spinner off --no-deps --disable-pip -r .run/audited.txt

docs: setup ## what is generated in docs/ (settings, results, sizing, API), and the summary in README.md
	@$(PY) -m export settings-doc
	@$(PY) -m gateway openapi-doc
	@$(PY) -m experiments.results
	@$(PY) -m experiments.sizing page

# every check runs even when an earlier one failed
lint: setup ## style and format (ruff), types (mypy), shell scripts (shellcheck)
	@status=0; \
	.venv/bin/ruff check . || status=1; \
	.venv/bin/ruff format --check . || status=1; \
	.venv/bin/mypy || status=1; \
	.venv/bin/shellcheck setup.sh .ci/run .ci/audit requirements/pin.sh deploy/*.sh || status=1; \
	exit $$status
