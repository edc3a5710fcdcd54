# Every target sets up what it needs from nothing: a fresh clone and Python >= 3.11 are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo browser litellm test test-fast check wheel format bench models measure results docs docs-version mutants clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[plots,dev,docs]'
	@touch $@

demo: $(STAMP) ## stories of the embedded models and their measured quality; writes demo/index.html
	$(BIN)/fsdfm demo --out demo

# The tests of the server's page want a browser; where none can be installed they are skipped and say so.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update >/dev/null 2>&1 && \
	    apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null 2>&1; } || \
	  echo "no chromium here; the tests that need it are skipped"

# The contract with litellm wants its own pins: a folder beside the environment, which only that test sees.
litellm: $(STAMP)
	@[ -d $(VENV)/litellm/litellm ] || $(BIN)/pip install --quiet --no-deps --target $(VENV)/litellm -r tests/serve/litellm.txt || \
	  { rm -rf $(VENV)/litellm; echo "no litellm here; the test that needs it is skipped"; }

test: $(STAMP) browser litellm ## all tests with coverage
	$(BIN)/pytest --numprocesses auto --cov --cov-report=term

test-fast: $(STAMP) ## the fast suite only
	$(BIN)/pytest --numprocesses auto -m 'not slow'

check: $(STAMP) ## lint, types, import layers, docs build, the wheel in a clean environment
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	$(BIN)/python tools/check_wheel.py

wheel: $(STAMP) ## build the wheel, check it, and use it in a clean environment
	$(BIN)/python tools/check_wheel.py

mutants: $(STAMP) ## edits that make the code wrong: which does no fast test notice? JOBS=2: two at a time
	$(BIN)/python tools/mutants.py --jobs $(or $(JOBS),1)

format: $(STAMP) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## every benchmark; writes bench-results/*.json
	mkdir -p bench-results
	$(BIN)/fsdfm bench jump --json bench-results/jump.json
	$(BIN)/fsdfm bench train --json bench-results/train.json
	$(BIN)/fsdfm bench generate --json bench-results/generate.json
	$(BIN)/fsdfm bench serve --json bench-results/serve.json

# Both models from public parts. STORIES is a folder with train.txt, synthetic.txt, valid.txt (stories parted by
# <|endoftext|>) and llama2.c's stories15M.bin and tokenizer.bin. What was interrupted resumes. About four hours of one core
# for the parent and an hour and a quarter for each of the child's two runs; PARENT=parent begins them from the embedded parent.
STORIES ?= stories
PARENT  ?= models/parent
models: $(STAMP) ## parent and child by their recipes, from the files in STORIES; hours
	cd $(STORIES) && $(abspath $(BIN))/fsdfm train stories-dfm 'data.inputs=["train.txt", "synthetic.txt"]' data.max_documents=none
	cd $(STORIES) && $(abspath $(BIN))/fsdfm export runs/stories-dfm --out models/parent --half
	cd $(STORIES) && $(abspath $(BIN))/fsdfm train stories-causal model.parent=$(PARENT)
	cd $(STORIES) && $(abspath $(BIN))/fsdfm export runs/stories-causal --out models/causal --half
	cd $(STORIES) && $(abspath $(BIN))/fsdfm train stories-onpolicy model.parent=models/causal
	cd $(STORIES) && $(abspath $(BIN))/fsdfm export runs/stories-onpolicy --out models/fewstep --half

# What is measured with is not part of the package: say where it is. The same command resumes; EXTRA="--processes 2" halves it.
# Result files of weights that no longer ship are removed first, so that new weights need no other command. What no weights
# have a say in (real text, controls, autoregressive models) is measured once, kept in RESULTS/beside and taken over. For the parent:
# make measure MODEL=parent SWEPT=8 EXTRA="--threads 1 --jump spaced --precision bfloat16"
MODEL ?= fewstep
NAME = $(notdir $(MODEL))
NUM ?= 32
FEW ?= 12
POINT ?= 24
MANY ?= 215
SWEPT ?= 1
HELD_OUT ?= valid.txt
TRAINING ?= train.txt
FEATURES ?= trunk,judge
ALTERNATIVE ?= stories15m:stories15M.bin $(wildcard runs/stories-next/model)
COOL ?= 0.8,0.9,1,1.1,1.2
RESULTS ?= src/fsdfm/assets/demo/results
EXTRA ?= --threads 1
EVALUATE = $(BIN)/fsdfm evaluate $(MODEL) --held-out $(HELD_OUT)
MEASURE = $(EVALUATE) --name $(NAME) $(EXTRA)
BESIDE = $(RESULTS)/beside/two-judges.json
BESIDE_MANY = $(RESULTS)/beside/many.json
JUDGES ?= --judge smollm2 --second-judge gemma3
ONE_JUDGE ?= --judge smollm2
TEXTS ?= perplexity,diversity,distances,copying,mauve
EVIDENCE ?= --training $(TRAINING) --mauve minilm --features $(FEATURES)
ALTERNATIVES = $(addprefix --alternative ,$(ALTERNATIVE)) --alternative-frontier $(COOL)

measure: $(STAMP) ## everything about a model that ships, MODEL=fewstep: two judges, controls, autoregressive models
	$(BIN)/fsdfm results --prune --from $(RESULTS)
	$(EVALUATE) --name beside --threads 1 $(ALTERNATIVES) $(JUDGES) $(EVIDENCE) --metrics $(TEXTS),brier --steps none --num $(NUM) --json $(BESIDE)
	$(MEASURE) --beside $(BESIDE) $(JUDGES) $(EVIDENCE) --metrics $(TEXTS) --frontier none --steps 1,2,4,8 --num $(NUM) --json $(RESULTS)/$(NAME).json
	$(MEASURE) $(JUDGES) --metrics perplexity,diversity --no-controls --frontier none --steps 16,32,64 --num $(FEW) --json $(RESULTS)/$(NAME)-more.json
	$(MEASURE) --metrics brier --steps 1,8 --num $(NUM) --no-controls --json $(RESULTS)/$(NAME)-brier.json
	$(MEASURE) $(ONE_JUDGE) --metrics perplexity,diversity --no-controls --frontier 0.8,0.9,1 --steps $(SWEPT) --num $(POINT) --json $(RESULTS)/sweeps/$(NAME).json
	$(EVALUATE) --name beside --threads 1 $(ONE_JUDGE) --metrics perplexity --steps none --num $(MANY) --json $(BESIDE_MANY)
	$(MEASURE) --beside $(BESIDE_MANY) $(ONE_JUDGE) --metrics perplexity --frontier none --steps 1,8 --num $(MANY) --json $(RESULTS)/many/$(NAME).json
	$(BIN)/fsdfm results --from $(RESULTS)

results: $(STAMP) ## numbers of result files into README, docs, their pictures and cards; CHECK=1 only compares
	$(BIN)/fsdfm results $(if $(CHECK),--check)

docs: $(STAMP) ## serve the documentation on localhost
	$(BIN)/mkdocs serve

docs-version: $(STAMP) ## commit the documentation of VERSION=0.1 to the branch gh-pages, beside the earlier ones
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike set-default latest

clean: ## remove what the targets made
	rm -rf $(VENV) site demo bench-results .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants
