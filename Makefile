# make demo: from a clean clone to a debiased SmolLM2-135M.  make test: everything green.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := .cache/SmolLM2-135M-Instruct

.PHONY: demo test lint clean
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

$(BIN)/lpes-bake: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(SMOLLM2)/config.json: | $(BIN)/lpes-bake
	$(BIN)/python examples/smollm2.py $(SMOLLM2)

demo: $(BIN)/lpes-bake $(SMOLLM2)/config.json
	$(BIN)/python examples/demo.py $(SMOLLM2) runs/demo

lint: $(BIN)/lpes-bake
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(SMOLLM2)/config.json
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
