# Everything a contributor or CI runs. Each target puts what it needs into .venv first; `test-store` and `test-cluster` need Go as well.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# Give PYTHON=/path/to/python3.12 to choose the interpreter that .venv is made with.
PYTHON ?=
GPU_PYTHON ?= 3.12
BIN := .venv/bin
# Left to itself a maths library starts a thread per core in every process, and the processes then wait for each other.
export OMP_NUM_THREADS ?= 2
export MKL_NUM_THREADS ?= 2

# One maths thread per process of tests; where a test asks for two, they wait for each other asleep. A file stays in one
# process, with what it sets up; in the order of the folders, so that the last files are not those of one long test each,
# beside which the other cores would wait.
SPREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 \
	--dist loadfile --no-loadscope-reorder

SGLANG_SAMPLE := tests/engines/test_contract.py tests/engines/test_plain_sglang.py::test_plain_sglang_gives_the_trainers_logprobs \
	tests/engines/test_plain_sglang.py::test_as_noisy_as_bf16_on_a_gpu \
	tests/engines/test_sglang_faults.py::test_a_server_killed_in_mid_generation_loses_and_doubles_nothing[SGLang] \
	"tests/engines/test_families.py::test_a_publish_is_proven_and_samples_have_the_policys_log_probs[kimi_k25-LoRA-SharedOuter]" \
	tests/engines/test_ranks_run.py::test_a_rank_that_is_killed_is_named_nothing_stays_and_one_process_goes_on

PURE := agents api errors types seeds spec storage ports workers model_info planner algorithms data environments observability
# Types of these are checked too, except what they get from torch.
TORCH := loop rollout sides training
# What is run by long commands alone; a name that is gone would otherwise be found on the day when it is needed.
RARELY_RUN := benchmarks tools tests/engines tests/gpu tests/megatron tests/ranks
PURE_PATHS = $(wildcard $(PURE:%=orbit_runtime/%.py) $(PURE:%=orbit_runtime/%))

.PHONY: help install dev quickstart test test-busy test-long test-models real-model test-real test-megatron test-rank-faults test-store test-ray test-bridges test-sglang test-engines test-bisect test-proofs fuzz test-cluster test-cluster-flagship cluster-programs check-chart images images-push check crds docs site pictures vendor-table constraints same-bits same-behaviour gpu-wheels gpu-proof bench bench-table release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install: ## make .venv and install what `orbit run` needs
	@tools/install.sh train "$(PYTHON)"

dev:
	@tools/install.sh train,dev "$(PYTHON)"

quickstart: install ## train the shipped model with LoRA on its INT4 base (two cores, no GPU)
	$(BIN)/orbit run examples/quickstart.yaml --out runs/quickstart

test: dev ## the run, its parts, the operator's logic (Python only; the structure: make check)
	$(SPREAD) -m "not long"

test-busy: dev ## the same beside eight busy loops, which end with it: load alone fails no test (an hour on two cores)
	for each in 1 2 3 4 5 6 7 8; do while kill -0 $$$$; do :; done 2>/dev/null & done; $(SPREAD) -m "not long"

test-long: dev ## what the other tests of this list leave out: every benchmark at its smallest size, examples, precisions and notebooks that learn, the guide of SFT, the pages for Python, kills under load (long)
	$(SPREAD) -m long tests/integration tests/models
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/ranks
	ORBIT_BRIDGES_PYTHON="$$(tools/bridges_python.sh)" && OMP_NUM_THREADS=1 "$$ORBIT_BRIDGES_PYTHON" -m pytest -m long tests/bridges

test-models: dev ## every model family and format: kernels, whole small models, conversion, merging (Python only)
	ORBIT_REAL_MODEL="$$(tools/smollm2.sh || true)" && export ORBIT_REAL_MODEL && $(SPREAD) -m "not long" tests/models tests/real

real-model: dev ## fetch a real pretrained model of 135 million parameters (98 MB, once) and print its folder
	@tools/smollm2.sh

test-real: dev ## that model through every format, adapter, algorithm and engine, and what learns from it (long; also SGLang's environment)
	ORBIT_REAL_MODEL="$$(tools/smollm2.sh)" && ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_REAL_MODEL ORBIT_SGLANG_PYTHON && OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/real

test-megatron: dev ## a model divided among ranks against one process: real processes over gloo (Python only)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/megatron

test-rank-faults: dev ## twelve faults of publishing in one rank of a divided trainer, a stale rank, a wrong offset of experts: each must be named (Python only)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.megatron.planted

test-store: dev ## storage and resume against a real S3 server (needs Go)
	ORBIT_TEST_VERSITYGW="$$(tools/versitygw.sh)" && export ORBIT_TEST_VERSITYGW && $(SPREAD) tests/store

test-ray: dev ## ranks of a trainer as Ray's actors: the faults that they can have (Linux; the rest of them: test-long)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m "not long" tests/ranks

test-bridges: dev ## environments of Gymnasium, SkyRL-Gym and verifiers, from manifests (makes an environment with these packages, once)
	ORBIT_BRIDGES_PYTHON="$$(tools/bridges_python.sh)" && OMP_NUM_THREADS=1 "$$ORBIT_BRIDGES_PYTHON" -m pytest --numprocesses logical --maxprocesses 2 -m "not long" tests/bridges

test-sglang: dev ## a sample of test-engines: the contract with LoRA and OFT, SGLang without our plug-in, Kimi-K2.6 as published, a killed server (Linux; the same environment)
	ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_SGLANG_PYTHON && $(BIN)/python -m pytest $(SGLANG_SAMPLE)

test-engines: dev ## the engine contract against a real SGLang server (Linux; makes an environment of 10 GB, once)
	ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_SGLANG_PYTHON && $(BIN)/python -m pytest tests/engines

test-bisect: dev ## every fault of every layer, planted in running SGLang servers: each must be named (five minutes; the same environment)
	ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_SGLANG_PYTHON && $(BIN)/python -m tests.engines.bisect_matrix $(MODELS)

test-proofs: dev ## twelve faults of publishing and 500 healthy publishes against SGLang servers as noisy as a GPU (half an hour; the same environment)
	ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_SGLANG_PYTHON && $(BIN)/python -m tests.engines.proof_matrix $(SERVERS)

fuzz: dev ## ten minutes of hostile manifests, rows, checkpoints, requests, rewards and run folders: nothing may crash, hang or pass in silence (ARGUMENTS="--seconds 60 --kinds rows")
	$(BIN)/python -m tests.fuzz $(ARGUMENTS)

test-cluster: ## the chart, and the operator on a real Kubernetes cluster of three nodes (needs root, Go and Debian; starts and removes it)
	tools/cluster_packages.sh
	@# On a new machine Go compiles for minutes; Python's packages come meanwhile.
	@$(MAKE) --no-print-directory -j2 dev cluster-programs
	ORBIT_TEST_PROGRAMS="$$(tools/cluster_programs.sh)" && export ORBIT_TEST_PROGRAMS && tools/test_cluster.sh $(BIN)/python

test-cluster-flagship: ## the shape of a large run, ranks over Megatron-Core and SGLang, in a pod of that cluster (needs also SGLang's environment)
	tools/cluster_packages.sh
	@$(MAKE) --no-print-directory -j2 dev cluster-programs
	ORBIT_TEST_PROGRAMS="$$(tools/cluster_programs.sh)" && ORBIT_SGLANG_PYTHON="$$(tools/sglang_python.sh)" && export ORBIT_TEST_PROGRAMS ORBIT_SGLANG_PYTHON && tools/test_cluster.sh $(BIN)/python tests/cluster/test_flagship.py

cluster-programs:
	@tools/cluster_programs.sh >/dev/null

check-chart: dev ## the Helm chart by Helm 3 and 4, kubeconform and promtool (needs root, Go and Debian)
	tools/cluster_packages.sh
	ORBIT_TEST_PROGRAMS="$$(tools/cluster_programs.sh helm helm3 kubeconform)" && export ORBIT_TEST_PROGRAMS && $(BIN)/python -m pytest tests/chart

images: ## build both images with buildah; BASE_IMAGE, OPERATOR_BASE_IMAGE and VERSION choose what
	tools/images.sh build

images-push: ## push both to REGISTRY=registry.example.com/team
	tools/images.sh push "$(REGISTRY)"

check: dev ## lint, types, import layers, budgets, stale generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PURE_PATHS) $(TORCH:%=orbit_runtime/%) operator/orbit_operator
	MYPYPATH=. $(BIN)/mypy --explicit-package-bases $(RARELY_RUN)
	$(BIN)/lint-imports
	$(call generate,--check)
	$(BIN)/python -m pytest tests/architecture
	@# Tells; a result that is old fails nothing.
	$(BIN)/python -m benchmarks.programs

# Files that are made from the code; with --check a generator fails where one is stale. The first writes crds/, which the chart's reads.
GENERATORS = tools.reference.generate $(filter-out tools.reference.generate,$(subst /,.,$(basename $(wildcard tools/*/generate.py))))
generate = @set -e; for module in $(GENERATORS); do echo "python -m $$module $(1)"; $(BIN)/python -m $$module $(1); done

crds docs: dev ## regenerate crds/, docs/reference/ and the generated files of charts/ from the code
	$(call generate,)

site: ## build the documentation site into build/website/site, links and anchors checked; it works from a file, without a network
	@tools/install.sh train,docs "$(PYTHON)"
	$(BIN)/python -m tools.website

pictures: dev ## take the documentation's pictures anew: a run of the quickstart and its pages, by Chromium
	$(BIN)/python -m tools.pictures

vendor-table: dev ## other libraries on our formats' bytes: measures them (in .venv-vendors) and writes docs/reference/formats.md
	tools/vendor_table.sh

constraints: dev ## recompile images/constraints/ from pyproject.toml (needs the package index)
	tools/compile_constraints.sh

same-bits: dev ## 100 runs of a manifest in FP32 and of one in BF16, and four manifests killed ten times each, on a busy machine: the same bits? (hours)
	$(BIN)/python -m tools.same_bits runs --out runs/same_bits/FP32
	$(BIN)/python -m tools.same_bits runs --out runs/same_bits/BF16 --manifest "LoRA in BF16"
	$(BIN)/python -m tools.same_bits kills

same-behaviour: dev ## after a change that should change nothing: digests, plans, messages, arguments, help, manifest against tests/data/same_behaviour (GROUPS="plan help" chooses; GROUPS=--take records)
	$(BIN)/python -m tools.same_behaviour $(GROUPS)

gpu-wheels: dev ## gather the small wheels that `make gpu-proof` needs on a machine without a network, into wheels/gpu (GPU_PYTHON=3.12: its Python there)
	$(BIN)/python -m tools.gpu_proof.wheels --python "$(GPU_PYTHON)"

gpu-proof: ## what only a CUDA device can show, on a machine that has one, torch, and maybe no network (PYTHON: the one with torch; PROOF="--stage quickstart": options)
	tools/gpu_proof.sh "$(PYTHON)" $(PROOF)

bench: dev ## every benchmark: prints tables, writes benchmarks/results/*.json, and says at the end which were not measured, and why (BENCH="--repetitions 5": their options)
	$(BIN)/python -m benchmarks $(BENCH)

bench-table: dev ## write the tables of README.md, benchmarks/README.md and the guides from the committed results, marking those that are older than the code
	$(BIN)/python -m benchmarks.programs --tables

release-check: dev ## build sdist and wheel, install them in clean environments, run the quickstart from the wheel
	tools/release_check.sh

clean: ## remove what the other targets made, .venv included; runs/ stays
	rm -rf .venv .venv.installing .venv-gpu wheels dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
