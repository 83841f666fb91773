# make ablation   set up and run the scaling ablation        make test   set up and pass the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: ablation test slow lint clean

ablation: $(VENV)/train.installed
	$(BIN)/python scripts/train.py experiment=scaling_ablation

test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2

slow: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/%.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
