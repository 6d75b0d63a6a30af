"""The fixture `ranks`: run a function on n gloo ranks that stay warm for the whole session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAME = "ridgeline_dist_pool"


def _load_pool() -> Any:
    """`pool.py` beside this file; tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("pool.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # where dataclasses look for the module they are defined in
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """`results = ranks(4, function, *args)`: a list of the function's results, by rank.

    The function is a top-level one of the test module. What a rank raises is raised here as
    `ranks.Failure`, with the rank and its traceback; a call that does not end within `timeout=`
    seconds raises `ranks.Hang` with every rank's stack.
    """
    pool = _load_pool().RankPool()
    yield pool
    pool.close()
