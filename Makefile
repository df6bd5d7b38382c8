# Each has an environment of its own: AIRFLOW=3.1, 3.2 or 3.4; PYTHON=3.10 to 3.14 (any other PYTHON is the interpreter that
# makes the usual one); LOWEST=1, the lowest versions that pyproject.toml allows; PYLANCE=latest, or a version, instead of the locked one;
# RECIPES=1, with the providers of docs/how-to/any-submitter.md, for the tests of its recipes and of Kubernetes; CELERY=1, with the providers of Celery
# and PostgreSQL, for the test of Celery's workers. STORE=azurite runs the tests of an object store on Azurite, in the usual one.
PYTHON_VERSION := $(filter 3.%,$(PYTHON))
VENV := .venv$(AIRFLOW:%=-%)$(LOWEST:%=-lowest)$(RECIPES:%=-recipes)$(CELERY:%=-celery)$(PYLANCE:%=-pylance-%)$(PYTHON_VERSION:%=-py%)
LOCK := requirements/$(if $(RECIPES),recipes,$(if $(CELERY),celery,$(if $(LOWEST),lowest,$(if $(AIRFLOW),airflow-$(AIRFLOW),dev)))).txt
BIN := $(VENV)/bin
LANCEDB := .venv-lancedb/.installed
AZURITE := .venv-azurite/node_modules/.bin
STAMP := $(VENV)/.installed
# Two more than the cores of a small machine: tests that start an Airflow, a Spark or processes mostly wait for them.
WORKERS ?= 4
LOWEST_ALLOWED := sed -n '/^dependencies = \[/,/^]/s/^ *"\([^>]*\)>=\([^",]*\).*/\1==\2/p'
NEWEST_BETA := $(patsubst %,--upgrade-package %,apache-airflow apache-airflow-core apache-airflow-task-sdk)
TESTS := $(if $(RECIPES),tests/airflow/test_recipes.py tests/airflow/test_kubernetes.py)$(if $(CELERY),tests/airflow/test_celery.py)$(if $(STORE),tests/promises/test_object_store.py)
# npm's and Debian's programs for CELERY=1 and STORE=azurite: Debian has those of PostgreSQL in a folder that is not on PATH.
FOUND := $(PATH):$(CURDIR)/$(AZURITE)$(addprefix :,$(lastword $(sort $(wildcard /usr/lib/postgresql/*/bin))))
# A test that hangs ends with the stacks of its threads; the tests after it go on in a new worker.
HUNG := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
HEAVY := spark or airflow or crash or slow
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# SHARE=2/3: the second of three shares of the tests, which take equally long by tests/durations.json.
OF_ALL := $(if $(SHARE),--group $(firstword $(subst /, ,$(SHARE))) --splits $(lastword $(subst /, ,$(SHARE))))
export QUERY
# What Python compiles, and pytest rewrites, is kept: without it each process compiles everything that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-ui test test-all test-rest test-fast durations coverage mutants simulate lint format bench docs soak dist release released publish-docs clean lock servers always

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with the locked versions (with uv, which it gets if missing); skipped when up to date

$(STAMP): pyproject.toml $(LOCK) scripts/setup_env.sh $(if $(PYLANCE),always)
	@scripts/setup_env.sh $(VENV) $(LOCK) $(PYLANCE)
	@touch $@

demo: install ## Embed the verses of a book with Airflow and Spark: make demo QUERY="a time to laugh" SPARK=connect
	@$(BIN)/airflow-geneva doctor --path .demo
	@$(BIN)/python -m dags_examples.demo $${QUERY:+--query "$$QUERY"} $(SPARK:%=--spark %)

demo-ui: install ## Open the Airflow UI on what the demo left
	@$(BIN)/python -m dags_examples.demo --ui

test: install ## Run the tests that a change must pass, 8 minutes: all fast ones, a few with Spark, Airflow and kills; part of them: SHARE=2/3
	@$(BIN)/python -m pytest $(HUNG) $(PARALLEL) -m "core or not ($(HEAVY) or soak)" $(OF_ALL)

test-all: $(if $(TESTS),,test) test-rest ## Run all tests but those of soak; elsewhere: AIRFLOW=3.1, PYTHON=3.13, LOWEST=1, PYLANCE=latest, RECIPES=1, CELERY=1, STORE=azurite

test-rest: $(if $(CELERY),servers) $(if $(STORE),$(AZURITE)) install ## Run what `make test` leaves of them
	@PATH="$(FOUND)" $(STORE:%=GENEVA_STORE=%) $(BIN)/python -m pytest $(HUNG) $(if $(CELERY),-rP,$(PARALLEL)) \
		$(or $(TESTS),-m "($(HEAVY)) and not (core or soak)" $(OF_ALL))

durations: install ## Run all tests, and record what those of a few tenths of a second or more take, for SHARE and the order of files
	@$(BIN)/python -m pytest $(HUNG) $(PARALLEL) --store-durations --clean-durations
	@$(BIN)/python -c 'import json; file = "tests/durations.json"; taken = json.load(open(file)); json.dump({name: round(seconds, 1) for name, seconds in taken.items() if seconds >= 0.25}, open(file, "w"), indent=0, sort_keys=True)'

servers:
	@PATH="$(FOUND)"; missing=; \
	command -v redis-server >/dev/null || missing=" redis-server"; \
	command -v initdb >/dev/null || missing="$$missing postgresql"; \
	test -z "$$missing" || { echo "test: CELERY=1 needs$$missing. Install (Debian, Ubuntu): apt-get install -y$$missing" >&2; exit 1; }

$(AZURITE):
	@command -v npm >/dev/null || { echo "test: STORE=azurite needs npm. Install (Debian, Ubuntu): apt-get install -y npm" >&2; exit 1; }
	@npm install --silent --no-audit --no-fund --prefix .venv-azurite azurite@3.35.0

test-fast: install ## Run the tests that need no Spark, no Airflow and no killing
	@$(BIN)/python -m pytest -m "not ($(HEAVY) or soak)"

soak: install ## Run all tests with many more examples, and kill for GENEVA_SOAK_SECONDS (1800); takes hours
	@GENEVA_SOAK=1 $(BIN)/python -m pytest -m ""

simulate: install ## Run worlds in which a seed decides order, faults and kills: SEEDS=2000 FIRST=0 SCENARIO=view WORKERS=2 BESIDE=v0.3.0
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),2000) $(FIRST:%=--first %) $(SCENARIO:%=--scenario %) $(BESIDE:%=--beside %) --workers $(or $(WORKERS),2)

mutants: install ## Remove guards of the engine one at a time: a test must notice each; only some files: FILES="commit/ plan/"
	@$(BIN)/python -m tests.mutants $(FILES)

coverage: install ## Run the fast tests, and fail if they run too little of the package
	@$(BIN)/python -m pytest -q -m "not ($(HEAVY) or soak)" --cov --cov-report=term --cov-fail-under=66

lint: install ## Check format, lint, types, spelling, the hosted workflows and the fragments of the changelog
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/codespell airflow_geneva bench changes dags_examples docs scripts tests *.md
	@$(BIN)/zizmor --offline --quiet .github
	@$(BIN)/towncrier build --draft --version next >/dev/null

format: install ## Format the code, apply automatic fixes, and copy the code that the docs show into them
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/python scripts/docs_code.py

bench: install $(LANCEDB) ## Measure against pylance alone and LanceDB, and write docs/benchmarks.md
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench $(CASES:%=--cases %)

$(LANCEDB): requirements/bench.txt
	@if command -v uv >/dev/null; then \
		uv venv --quiet --allow-existing --python $(BIN)/python $(@D) && \
			uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $<; \
	else $(BIN)/python -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --require-hashes -r $<; fi
	@touch $@

docs: install ## Build the documentation into site/, warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: install ## Resolve requirements/*.txt again, keeping what still fits (needs uv)
	@command -v uv >/dev/null || { echo "lock: uv is not on PATH. Install it: pip install uv" >&2; exit 1; }
	@for lock in dev airflow-3.1 airflow-3.2 airflow-3.4 lowest recipes celery; do \
		held=requirements/$$lock.in python=3.10 newest=; \
		test $$lock != airflow-3.4 || { python=3.11; newest="$(NEWEST_BETA)"; }; \
		{ test $$lock != lowest || $(LOWEST_ALLOWED) pyproject.toml; } | \
		uv pip compile --generate-hashes pyproject.toml - $$(case $$lock in recipes|celery) echo $$held; esac) --all-extras --group dev --universal --python-version $$python \
			$$(test ! -f $$held || echo --constraint $$held) \
			$$newest --custom-compile-command "make lock" --quiet --output-file requirements/$$lock.txt || exit 1; \
	done
	@for lock in bench uv; do \
		uv pip compile --generate-hashes requirements/$$lock.in --universal --python-version 3.10 \
			--custom-compile-command "make lock" --quiet --output-file requirements/$$lock.txt || exit 1; \
	done

dist: install ## Build the wheel and the sdist, check them, and run the demo from the wheel in an empty environment
	@scripts/check_dist.sh $(BIN)/python

release: install ## Cut a release: VERSION=0.3.0 sets the version, makes its section of CHANGELOG.md, and keeps the ratios of the bench
	@test -n "$(VERSION)" || { echo "release: which one? make release VERSION=0.3.0" >&2; exit 1; }
	@sed -i.before 's/^__version__ = .*/__version__ = "$(VERSION)"/' airflow_geneva/__init__.py && rm airflow_geneva/__init__.py.before
	@$(BIN)/towncrier build --yes --version "$(VERSION)"
	@$(BIN)/python -m bench --cases smoke --record
	@echo "release: look at git diff, commit, and push the tag v$(VERSION)"

released: ## Check that the checkout is the release VERSION: its version, its section of CHANGELOG.md, and nothing left in changes/
	@grep -q '^__version__ = "$(VERSION)"$$' airflow_geneva/__init__.py || { echo "released: __version__ is not $(VERSION)" >&2; exit 1; }
	@grep -q '^## $(VERSION) - ' CHANGELOG.md || { echo "released: CHANGELOG.md has no section $(VERSION)" >&2; exit 1; }
	@test "$$(ls changes)" = README.md || { echo "released: changes/ has more than README.md" >&2; exit 1; }

publish-docs: install ## Publish the documentation as that of this minor version and the latest (pushes the branch gh-pages)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --push --update-aliases \
		"$$(sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' airflow_geneva/__init__.py)" latest
	@$(BIN)/mike set-default --push latest

clean: ## Remove what was built and computed, but not .venv
	rm -rf .demo site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
