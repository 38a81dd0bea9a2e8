"""What the shape of the package is, in numbers: ``make house``.

    python benchmarks/house.py              # the table; and every import that runs up, every circle
    python benchmarks/house.py --arrows     # which room imports which, and what for

A room is a folder of ``ds_silent/`` or a module at its top. ``FLOORS`` lists them, lowest first: a room imports from
those before it only. ``tests/project/test_house.py`` holds the house to that.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ds_silent"
FLOORS = (
    *("text", "json_form", "trace", "records", "metrics", "extras", "device", "patches"),
    *("config", "maths", "comparison", "testing"),
    *("distributed", "kernels"),
    *("exchange", "replicas", "framework"),
    *("ordered", "sinks", "alerts", "runs"),
    *("preflight", "rules", "capture", "measure", "detectors", "respond"),
    "observing",
    *("frameworks", "__init__", "integrations"),
    *("practice", "commands", "drill", "numerics"),
    *("__main__", "cli"),
)
"""Rooms, lowest first."""
LONGEST_FILE, LONGEST_CLASS = 400, 200


@dataclass(frozen=True)
class Import:
    """``file`` takes ``names`` from ``target``, both relative to the package."""

    file: str
    target: str
    names: tuple[str, ...]

    @property
    def rooms(self) -> tuple[str, str]:
        return room_of(self.file), room_of(self.target)


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(types: bool = True) -> list[Import]:
    """Every import of the package by the package, within functions too.

    Args:
        types: also those that only a type checker makes.
    """
    found = []
    for path in files():
        tree = ast.parse(path.read_text())
        skipped = set() if types else {id(inner) for node in _type_checking(tree) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) not in skipped:
                found += [
                    Import(path.relative_to(PACKAGE).as_posix(), target, names) for target, names in _targets(node)
                ]
    return found


def _type_checking(tree: ast.Module) -> Iterator[ast.If]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING"))


def _targets(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(file, names) of the package's own that a statement imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE.name:
                yield _file_of(alias.name.split(".")[1:]), ()
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
        parts = (node.module or "").split(".")[1:]
        own: list[str] = []
        for alias in node.names:
            if _module(parts, alias.name):
                yield _file_of([*parts, alias.name]), ()
            else:
                own.append(alias.name)
        if own:
            yield _file_of(parts), tuple(own)


def _module(parts: list[str], name: str) -> bool:
    path = PACKAGE.joinpath(*parts, name)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _file_of(parts: list[str]) -> str:
    path = PACKAGE.joinpath(*parts)
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).relative_to(PACKAGE).as_posix()


def upward(found: list[Import]) -> list[Import]:
    """Those from a room to one that is not below it."""
    floor = {room: number for number, room in enumerate(FLOORS)}
    between = [one for one in found if one.rooms[0] != one.rooms[1]]
    return [one for one in between if floor.get(one.rooms[1], len(floor)) >= floor.get(one.rooms[0], -1)]


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two and more that reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return found


def between_rooms(found: list[Import]) -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = defaultdict(set)
    for one in found:
        if one.rooms[0] != one.rooms[1]:
            arrows[one.rooms[0]].add(one.rooms[1])
    return arrows


def between_files(found: list[Import]) -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = defaultdict(set)
    for one in found:
        arrows[one.file].add(one.target)
    return arrows


def repeated_names() -> tuple[list[str], list[str]]:
    """(classes, modules) whose name stands for several."""
    classes: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    for path in files():
        if path.name != "__init__.py":
            modules[path.stem] += 1
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
    return [f"{n} x{c}" for n, c in classes.items() if c > 1], [f"{n} x{c}" for n, c in modules.items() if c > 1]


def lengths() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of each file, and of each class."""
    by_file, by_class = {}, {}
    for path in files():
        text = path.read_text()
        by_file[path.relative_to(PACKAGE).as_posix()] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                by_class[f"{path.stem}.{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    return by_file, by_class


def main(
    arrows: Annotated[bool, typer.Option(help="also what each room imports from each other")] = False,
) -> None:
    """Print the table, then what is wrong."""
    console, found = Console(), imports()
    by_file, by_class = lengths()
    classes, modules = repeated_names()
    rooms = circles(between_rooms(found))
    long_files = {name: count for name, count in by_file.items() if count > LONGEST_FILE}
    long_classes = {name: count for name, count in by_class.items() if count > LONGEST_CLASS}
    tests = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    table = Table("what", "aim", "today")
    for what, aim, today in (
        ("lines of ds_silent/", "31,000", f"{sum(by_file.values()):,}"),
        ("files", "180", str(len(by_file))),
        ("files over 400 lines", "0", str(len(long_files))),
        ("classes over 200 lines", "0", str(len(long_classes))),
        ("modules at the top", "10", str(sum("/" not in name and not name.startswith("__") for name in by_file))),
        ("imports that run up", "0", str(len(upward(found)))),
        ("rooms in circles", "0", str(sum(map(len, rooms)))),
        ("circles of files", "0", str(len(circles(between_files(imports(types=False)))))),
        ("class names for several", "0", str(len(classes))),
        ("module names for several", "0", str(len(modules))),
        ("lines of tests/", "26,000", f"{tests:,}"),
    ):
        table.add_row(what, aim, today)
    console.print(table)
    for title, names in (("over 400 lines", long_files), ("over 200 lines", long_classes)):
        console.print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in names.items()), highlight=False)
    console.print("several classes: " + ", ".join(classes), highlight=False)
    console.print("several modules: " + ", ".join(modules), highlight=False)
    for circle in rooms:
        console.print("circle of rooms: " + ", ".join(circle), highlight=False)
    for circle in circles(between_files(imports(types=False))):
        console.print("circle of files: " + ", ".join(circle), highlight=False)
    for one in upward(found):
        console.print(f"up: {one.file} -> {one.target}: {', '.join(one.names)}", markup=False, highlight=False)
    if arrows:
        grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
        for one in found:
            if one.rooms[0] != one.rooms[1]:
                grouped[one.rooms].append(f"{one.file} -> {one.target}: {', '.join(one.names)}")
        for (room, other), lines in sorted(grouped.items()):
            console.print(f"{room} -> {other} ({len(lines)})", markup=False, highlight=False)
            for line in lines:
                console.print(f"    {line}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
