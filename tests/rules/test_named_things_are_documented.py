"""Whatever a recipe can name stands in the documents, with every argument it takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from ridgeline.data.build import SOURCES
from ridgeline.models.build import MODELS
from ridgeline.models.llama_sizes import SIZES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models-and-data.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]


def row_of(name: str) -> str:
    found = [row for row in ROWS if f"`{name}`" in row.split("|")[1]]
    assert len(found) == 1, f"{name} should have one row, has {len(found)}"
    return found[0]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(name: str) -> None:
    row = row_of(name)
    for argument in inspect.signature(MODELS[name]).parameters:
        assert argument in row, f"{name} takes {argument}"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_sources(name: str) -> None:
    row = row_of(name)
    for argument in inspect.signature(SOURCES[name]).parameters:
        assert argument == "seed" or argument in row, f"{name} takes {argument}"


def test_sizes() -> None:
    for size in SIZES:
        assert size in PAGE
