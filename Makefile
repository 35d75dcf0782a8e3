# Two commands are all the set-up there is: `make demo` and `make test`.
VENV := .venv
PYTHON := $(VENV)/bin/python
# The test extra brings the CUDA plugin as a compiler; without a GPU jax must not try to run it.
export JAX_PLATFORMS ?= $(if $(shell command -v nvidia-smi),cuda$(,)cpu,cpu)
export TOKENIZERS_PARALLELISM ?= false

, := ,

.PHONY: demo test test-all lint clean

demo: $(VENV)/.run
	$(PYTHON) scripts/demo.py

test: $(VENV)/.test
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Everything a machine without a GPU can run: all 164 prompts, the recorded reference runs.
test-all: $(VENV)/.test
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu"

lint: $(VENV)/.test
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

$(VENV)/.run: pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.test: pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -e ".[scripts,test]"
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .cache *.egg-info
