"""What the reduced run leaves out: cases of a table, never a table, and as few whole tests as told here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def _conftest() -> Any:
    spec = importlib.util.spec_from_file_location("ridgeline_reduced", TESTS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cases_are_spread_over_their_table() -> None:
    spread = _conftest().spread
    assert spread(10, 1) == {0}
    assert spread(10, 2) == {0, 9}
    assert spread(10, 4) == {0, 3, 6, 9}
    assert spread(3, 5) == {0, 1, 2}
    for length in range(1, 40):
        for keep in range(1, length + 1):
            assert len(spread(length, keep)) == keep


def test_few_tests_are_left_to_the_whole_run() -> None:
    """A promise whose only test CI does not run can be broken by any change."""
    marked = [
        (path, name)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(
            r"^@pytest\.mark\.thorough\n(?:@.*\n)*def (\w+)", path.read_text(), re.MULTILINE
        )
    ]
    assert 0 < len(marked) < 25, marked


class _Item:
    def __init__(self, name: str, **marks: dict[str, int]) -> None:
        self.path, self.originalname, self.name, self._marks = Path("x.py"), name, name, marks

    def get_closest_marker(self, mark: str) -> Any:
        found = self._marks.get(mark)
        return None if found is None else type("Mark", (), {"kwargs": found})


def test_what_is_not_marked_stays() -> None:
    plain = [_Item("plain") for _ in range(6)]
    table = [_Item("table", table={"keep": 2}) for _ in range(6)]
    whole = [_Item("whole", thorough={})]
    dropped = _conftest().left_out([*plain, *table, *whole])
    assert dropped == {*table[1:5], *whole}
