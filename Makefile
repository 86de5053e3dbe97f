# `make quickstart` trains, evaluates and exports a real model on this machine; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
FLOOR_PYTHON ?= python3.12
export OMP_NUM_THREADS ?= 1

.PHONY: install quickstart quickstart-generation test test-changed test-device test-floor check docs wheel bench clean

install: $(VENV)/installed

# torch and torchvision first: the CPU builds are taken where they are offered, and nothing asks for another one later.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 2 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch torchvision -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@echo "installed; now: source $(VENV)/bin/activate"
	@touch $@

quickstart: install
	$(BIN)/mm quickstart

# Pictures, then clips: two generators trained from scratch and judged, two to three minutes of one core each.
quickstart-generation: install
	$(BIN)/python examples/quickstart_generation.py

# One worker more than the cores that the tests are made for: ranks of one test wait for each other.
WORKERS ?= 3
PYTEST_WORKERS := -n $(WORKERS) --dist loadfile

# Test files and the package are compiled once, not by each worker and by each command that a test starts.
test test-floor: export PYTHONDONTWRITEBYTECODE =

test: install
	$(BIN)/python -m pytest $(PYTEST_WORKERS)

# Those that prove what differs from a commit (`make test-changed SINCE=main`), the slow ones too with SLOW=1.
SINCE ?= HEAD
test-changed: export PYTHONDONTWRITEBYTECODE =
test-changed: install
	@files=$$($(BIN)/python -m tests.changed $(SINCE)); test -n "$$files" || { echo "no test is near the change"; exit 0; }; \
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(if $(SLOW),-m "slow or not slow") $$files

# The same tests at the floors that pyproject.toml declares, in an environment of their own.
test-floor: $(FLOOR)/installed
	$(FLOOR)/bin/python -m pytest $(PYTEST_WORKERS)

$(FLOOR)/installed: pyproject.toml constraints-floor.txt
	$(FLOOR_PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check torch torchvision -c constraints-floor.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints-floor.txt
	touch $@

# The tests on PyTorch's simulated accelerator, in an environment of their own: once torch_openreg is installed, it is the
# accelerator of everything there. `make test-device WHEEL=path/to/torch_openreg-….whl` makes the environment.
DEVICE_VENV := .venv-device

test-device: $(DEVICE_VENV)/installed
	$(DEVICE_VENV)/bin/python -m pytest -m device tests/device

$(DEVICE_VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(WHEEL)" || { echo "say which build: make test-device WHEEL=path/to/torch_openreg-….whl"; exit 2; }
	$(PYTHON) -m venv $(DEVICE_VENV)
	$(DEVICE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch torchvision -c constraints.txt
	$(DEVICE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	$(DEVICE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(WHEEL)
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_words.py tests/test_source_rules.py tests/test_budgets.py

# The documentation as a site, to read from the disk or from any server. It has an environment of its own, without torch.
DOCS_VENV := .venv-docs

docs: $(DOCS_VENV)/installed
	$(DOCS_VENV)/bin/python -m sphinx -q -W --keep-going -b html -c docs/site . build/docs
	@echo "open build/docs/index.html"

$(DOCS_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# What is published: the wheel and the sdist of the package, and the wheel of the shim for `import megatron`.
wheel: install
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	cd megatron_shim && $(abspath $(BIN))/python -m hatchling build -t wheel -d ../dist

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(FLOOR) $(DOCS_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
