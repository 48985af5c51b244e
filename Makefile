# Two commands do everything: make demo, make test. make docs builds the site, make dist the packages.
PYTHON ?= python3
BIN := .venv/bin
# --no-deps: the requirement files are complete, and a resolver could pull a CUDA build of torch.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-kills mutation test-vllm-versions test-lowest test-newest check docs dist format clean

demo: .venv/demo.done
	$(BIN)/eyas run -c recipes/smollm2-cpu.yaml

test: .venv/test.done
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not kills"

# A kill before each change of a file, in every stage.
test-kills: .venv/test.done
	$(BIN)/python -m pytest -n 2 -m kills

# Plants faults in modules whose faults are silent; the score is in docs/reliability.md.
mutation: .venv/test.done
	$(BIN)/python tests/support/mutation.py --limit-s 3000 $(MODULES)

# Each version in an environment of its own under .venv-vllm, removed after its tests; gigabytes of downloads.
test-vllm-versions: .venv/test.done
	$(BIN)/python tests/support/vllm_matrix.py $(VERSIONS)

# The tiny run on the lowest versions that pyproject.toml allows (python3.11), and on the newest (python3.13).
test-lowest test-newest:
	$(PYTHON) tests/support/version_bounds.py $(@:test-%=%)

check: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Broken links are errors.
docs: .venv/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/test.done
	$(BIN)/python -m build --no-isolation

format: .venv/test.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.done: requirements/demo.txt pyproject.toml | .venv/bin/python
	$(PIP) torch==2.13.0
	$(PIP) --no-deps -r requirements/demo.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv/test.done: requirements/test.txt .venv/demo.done
	$(PIP) --no-deps -r requirements/test.txt
	@touch $@

.venv/docs.done: requirements/docs.txt .venv/demo.done
	$(PIP) --no-deps -r requirements/docs.txt
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-lowest .venv-newest build dist site
