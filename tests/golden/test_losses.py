"""The first losses of the recipes are what they were; `make.py` says how to renew them."""

import json
import runpy
from pathlib import Path

import pytest

MAKE = runpy.run_path(str(Path(__file__).parent / "make.py"))
KEPT = json.loads(MAKE["GOLDEN"].read_text(encoding="utf-8"))


def test_every_shrunk_recipe_is_kept():
    assert set(KEPT) == set(MAKE["SHRUNK"])


@pytest.mark.parametrize("name", sorted(MAKE["SHRUNK"]))
def test_losses_are_the_golden_ones(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    losses = MAKE["first_losses"](name)
    assert losses == pytest.approx(KEPT[name], rel=1e-6), (
        "losses changed; if that is intended, run `python tests/golden/make.py` and commit"
    )
