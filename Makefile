# make ablation   set up, run the quick grid with and without 1/√d_k, write its report
# make test       set up and run the quick tests; ARGS='tests/nn -k sinks' runs some of them
# make slow       the tests before a release: several devices, the compiler, the browser, adopted families, wheel and clone
# make lattice    generated tests of the day: SEED=7 another draw, STRENGTH=3 every triple of values, LIMIT=10 so many points
# make lint       ruff (lint and format) and mypy, strict on minitx.nn
# make coverage   lines and branches of minitx/nn that its tests run, at least 98 %
# make mutation   faults seeded one by one (hours, goes on where it stopped)
# make bench      measure beside others, docs/dev/performance.md (at most 15 minutes on two quiet cores; published rows: PAIRS=20)
# make bench-quality TEXT=tinyshakespeare.txt   time and tokens to a loss (25 minutes on two cores)
# make docs       write the generated pages again: configuring, performance
# make site       the page to play with, the pages and the docstrings, as a web site: site/index.html
# make clean      remove the environment and all that was built
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export HF_HUB_OFFLINE := 1
unexport PYTHONDONTWRITEBYTECODE  # each process would compile all modules anew: 8 s for the tests alone

.PHONY: ablation help test slow lattice lint coverage mutation bench bench-quality docs site clean

ablation: $(VENV)/train.installed
	$(BIN)/python scripts/train.py experiment=scaling_ablation

help:
	@sed -n 's/^# make/make/p' Makefile

test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

slow: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or release"

PAIRS ?= 8
bench: $(VENV)/dev.installed
	$(BIN)/python benchmarks/step.py --pairs $(PAIRS)                  # NANOGPT=FOLDER in the environment: over nanoGPT, too
	$(BIN)/python benchmarks/attention.py --pairs $(PAIRS)
	$(BIN)/python benchmarks/decode.py --pairs $(PAIRS) --new 32       # the target speaks of 256 + 256 tokens: python benchmarks/decode.py, 10 minutes
	$(BIN)/python benchmarks/data.py --pairs $(PAIRS) --megabytes 32   # the target speaks of 1 GB: python benchmarks/data.py
	$(BIN)/python benchmarks/start.py --pairs 4                        # a minute a pair
	$(BIN)/python benchmarks/report.py

bench-quality: $(VENV)/dev.installed
	$(BIN)/python benchmarks/quality.py --text "$(TEXT)"
	$(BIN)/python benchmarks/report.py

docs: $(VENV)/dev.installed
	$(BIN)/python tests/docs/configuring_page.py
	$(BIN)/python benchmarks/report.py

# a rendered notebook requests nothing from other hosts
OFFLINE := $(foreach script,mathjax require_js jquery,--HTMLExporter.$(script)_url=)
site: $(VENV)/train.installed $(VENV)/docs.installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@mkdir -p site/benchmarks && cp -r benchmarks/results site/benchmarks/ && cp -r configs examples minitx README.md README.zh.md CONTRIBUTING.md site/
	@find site -name __pycache__ -prune -exec rm -r {} +
	@$(BIN)/jupyter-nbconvert --log-level ERROR --to html $(OFFLINE) --output-dir site/examples examples/*.ipynb
	@find site/docs -name '*.html' -exec sed -i.bak -E 's#(examples/[a-z.]*)\.ipynb"#\1.html"#g' {} +
	@sed -i.bak -E 's#"(\.\./docs/[^"]*)\.md#"\1.html#g; s#/README\.html#/index.html#g' site/examples/*.html
	@find site -name '*.bak' -delete
	@$(BIN)/python scripts/view_attention.py --play output=site/index.html pages=docs/index.html > /dev/null
	@echo "$(CURDIR)/site/index.html"
	@echo "Its search box needs a server: $(BIN)/python -m http.server --directory site, then http://localhost:8000"

SEED ?= $(shell date +%Y%m%d)
STRENGTH ?= 2
lattice: $(VENV)/dev.installed
	$(BIN)/python tests/lattice/calls.py --seed $(SEED) --strength $(STRENGTH) $(if $(LIMIT),--limit $(LIMIT))
	$(BIN)/python tests/lattice/models.py --seed $(SEED) --strength $(STRENGTH) $(if $(LIMIT),--limit $(LIMIT))
	$(BIN)/python tests/lattice/runs.py --seed $(SEED) --strength $(STRENGTH) $(if $(LIMIT),--limit $(LIMIT))

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(VENV)/dev.installed
	$(BIN)/coverage run -m pytest --doctest-modules tests/nn minitx/nn --ignore tests/nn/test_equivalence.py --ignore tests/nn/test_compile.py
	$(BIN)/coverage report --fail-under=98

mutation: $(VENV)/dev.installed
	$(BIN)/python tests/tools/mutation.py
	$(BIN)/python tests/tools/mutation.py --record

# dev contains train
$(VENV)/%.installed: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[$*]"
	touch $@ $(if $(filter dev,$*),$(VENV)/train.installed)

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
