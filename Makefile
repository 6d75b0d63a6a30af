# Every target sets itself up in .venv first; the second time that costs nothing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TORCH_FREE := ridgeline/errors.py ridgeline/named.py ridgeline/composition.py ridgeline/layout.py ridgeline/typed.py ridgeline/tuning.py ridgeline/augmenting.py ridgeline/config.py \
	ridgeline/rundir.py ridgeline/facts.py ridgeline/shipped.py ridgeline/train/checks.py ridgeline/train/said.py ridgeline/launch ridgeline/plan ridgeline/report ridgeline/cli.py ridgeline/cli_shared.py ridgeline/cli_answers.py ridgeline/cli_checkpoint.py \
	ridgeline/cli_data.py ridgeline/cli_doctor.py ridgeline/cli_export.py ridgeline/export/request.py ridgeline/cli_jobs.py ridgeline/cli_launch.py ridgeline/cli_machine.py ridgeline/cli_network.py ridgeline/cli_plan.py ridgeline/cli_planned.py ridgeline/cli_scale.py ridgeline/cli_search.py ridgeline/search ridgeline/cli_validate.py ridgeline/cli_watch.py $(addprefix ridgeline/machine/,mount.py quota.py disk_io.py storage.py verdict.py record.py show.py picture.py roofline.py links.py link_show.py groups.py power.py gauges.py room.py) \
	$(addprefix ridgeline/doctor/,measured.py kernels.py trace.py timeline.py verdict.py clock.py finished.py pictures.py show.py request.py choice.py combined.py ahead.py ending.py climb.py ladder.py losses.py race.py processes.py states.py interface.py seen.py recommend.py) \
	$(addprefix ridgeline/scaling/,measured.py request.py curves.py show.py simulate.py noise.py) \
	$(addprefix ridgeline/data/,dataset.py pack.py work.py formats stage) \
	$(addprefix ridgeline/checkpoint/,boxes.py damage.py describe.py find.py manifest.py retain.py text.py)

.PHONY: setup demo test lint check bench parity chaos system clean

setup: $(READY)

# torch goes first and alone, so that nothing else decides which build of it is taken.
$(READY): pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[demo,images,data,report,models,dev]'
	touch $(READY)

demo: setup
	$(BIN)/ridgeline train digits -n 2

# All cases of every table; `.ci/run` takes some of each.
test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TORCH_FREE)

check: lint
	$(BIN)/python -m pytest tests/rules

# Every kind of model in every layout that the table allows, on 1 to 8 processes.
parity: setup
	$(BIN)/python tests/parity/table.py

# Fifty runs that are killed, hung, starved and lied to.
chaos: setup
	$(BIN)/python benchmarks/chaos.py --rounds 50

# On a real Slurm, under Open MPI and MPICH, and over ssh, all on this machine: takes root and Debian's packages.
system: setup
	RIDGELINE_INSTALL=1 $(BIN)/python -m pytest tests/system

bench: setup
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
