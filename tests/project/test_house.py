"""The package has one direction: a room imports from the floors below it only, and nothing runs in a circle."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import ds_silent
from benchmarks import house, unchanged

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> list[house.Import]:
    """Every import of the package by the package."""
    return house.imports()


def test_rooms_import_from_the_floors_below_them_only(found: list[house.Import]) -> None:
    assert len(found) > 500  # it reads them
    assert [f"{one.file} -> {one.target}: {one.names}" for one in house.upward(found)] == []
    assert {room for one in found for room in one.rooms} == set(house.FLOORS), "a room that FLOORS does not name"


def test_nothing_runs_in_a_circle(found: list[house.Import]) -> None:
    assert house.circles(house.between_rooms(found)) == []
    assert house.circles(house.between_files(house.imports(types=False))) == []


def test_every_public_name_is_there() -> None:
    assert all(getattr(ds_silent, name) is not None for name in ds_silent.__all__)


def test_an_import_that_runs_up_and_a_circle_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, text in {
        "text.py": "def f():\n    from ds_silent.maths.sums import total\n",
        "maths/__init__.py": "",
        "maths/sums.py": "from ds_silent.text import f\nfrom ds_silent.maths import parts\n",
        "maths/parts.py": "import ds_silent.maths.sums\n",
    }.items():
        (tmp_path / "ds_silent" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ds_silent" / file).write_text(text)
    monkeypatch.setattr(house, "PACKAGE", tmp_path / "ds_silent")
    found = house.imports()
    assert [(one.file, one.target, one.names) for one in house.upward(found)] == [
        ("text.py", "maths/sums.py", ("total",))
    ]
    assert house.circles(house.between_rooms(found)) == [["maths", "text"]]
    assert house.circles({"maths/parts.py": {"maths/sums.py"}, "maths/sums.py": {"maths/parts.py", "text.py"}}) == [
        ["maths/parts.py", "maths/sums.py"]
    ]


def test_a_record_that_changed_is_seen_and_a_time_is_no_change(tmp_path: Path) -> None:
    def lines(*records: str) -> list[str]:
        (tmp_path / "events.jsonl").write_text("".join(f"{record}\n" for record in records))
        return list(unchanged.lines_of(tmp_path / "events.jsonl", str(tmp_path)))

    before = lines('{"step": 1, "seconds": 0.1, "loss": 2.0}', '{"step": 2, "seconds": 0.2, "loss": 1.0}')
    later = lines('{"step": 1, "seconds": 0.3, "loss": 2.0}', '{"step": 2, "seconds": 0.1, "loss": 1.0}')
    wrong = lines('{"step": 1, "seconds": 0.1, "loss": 2.0}', '{"step": 2, "seconds": 0.2, "loss": 1.0000001}')
    assert list(unchanged.differing({"a": before}, {"a": later})) == []
    assert list(unchanged.differing({"a": before}, {"a": wrong})) == ["a: line 2 differs (2 lines before, 2 now)"]
    assert list(unchanged.differing({"a": before, "b": []}, {"a": before[:1], "c": []})) == [
        "a: line 2 differs (2 lines before, 1 now)",
        "b: is gone",
        "c: is new",
    ]


@pytest.mark.parametrize("folder", ["benchmarks", "launch"])
def test_what_stands_outside_of_the_package_imports_names_that_it_has(folder: str) -> None:
    """Also within functions, which run in benchmarks of an hour alone."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {
        (node.module, name.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ds_silent"
        for name in node.names
    }
    missing = [
        f"{module}.{name}"
        for module, name in sorted(named)
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert len(named) > 5
    assert missing == []
