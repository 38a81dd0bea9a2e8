"""Write frozen dataclasses as JSON objects, and read them back as their fields' types say.

    json.dumps(to_json(record))                        # one line of metrics.jsonl
    from_json(StepRecord, json.loads(line))            # and back

A field's ``metadata`` says how: ``"json": False`` is not written; ``"absent": True`` is no key where the field is None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

FORMAT = 1
"""Of the lines of metrics.jsonl and events.jsonl. Keys and kinds are added to it; one that would be read wrongly by a
reader of this version, because it means something else now, would make it 2 and stand in the line."""


def newer_version(line: Mapping[str, Any]) -> int | None:
    """The version of a line that this one would read wrongly; None where it reads it."""
    version = line.get("version")
    return version if type(version) is int and version > FORMAT else None


def lines_of(path: str | Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line of a file begins, and the line, but no empty one; of one that is too long, no JSON.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        offset = 0
        while line := file.readline(longest):
            length, whole = len(line), line
            while len(whole) == longest and not whole.endswith(b"\n"):
                whole, line = file.readline(longest), b"\0"
                length += len(whole)
            if line.strip():
                yield offset, line
            offset += length


def to_json(value: Any) -> Any:
    """The JSON form of a record: dataclasses to objects, tuples to lists, non-finite floats to strings.

    Args:
        value: a record, or a value found inside one.

    Returns:
        dicts, lists, str, int, finite float, bool and None only, so that ``json.dumps(..., allow_nan=False)`` passes.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        written = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.metadata.get("json", True)}
        absent = {f.name for f in dataclasses.fields(value) if f.metadata.get("absent") and written[f.name] is None}
        return {name: to_json(item) for name, item in written.items() if name not in absent}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


R = TypeVar("R")


def from_json(kind: type[R], value: Any) -> R:
    """The record behind a JSON object written by :func:`to_json`; each number comes back as it was.

    Keys that this version does not know are left out. Keys that an older version did not write get the field's
    default, or None where None is a value of theirs. What is not written as JSON gets its default.

    Raises:
        ValueError: it is no such record, or of a version that means something else by it.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a {kind.__name__} is an object, got {type(value).__name__}")
    if newer := newer_version(value):
        raise ValueError(f"a {kind.__name__} of version {newer} is newer than this ds_silent reads ({FORMAT})")
    found = {}
    for name, hint, has_default in _fields(kind):  # type: ignore[arg-type]  # a class is hashable
        if name in value or not has_default:
            found[name] = _from_json(hint, value.get(name))
    return kind(**found)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether there is a default, of each field that is written as JSON."""
    hints = get_type_hints(kind)
    defaults = (dataclasses.MISSING, dataclasses.MISSING)
    return tuple(
        (f.name, hints[f.name], (f.default, f.default_factory) != defaults)
        for f in dataclasses.fields(kind)
        if f.metadata.get("json", True)
    )


def _from_json(hint: Any, value: Any) -> Any:
    """``value`` as a field's type says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):  # the only unions here are "or None"
        return None if value is None else _from_json(arguments[0], value)
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]  # of a class, not of a record
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_from_json(arguments[0], item) for item in value)
        return tuple(_from_json(one, item) for one, item in zip(arguments, value, strict=True))
    if origin is Mapping and isinstance(value, dict):  # the only keys here are ranks
        return {int(key): _from_json(arguments[1], item) for key, item in value.items()}
    if hint is float and (type(value) in (int, float) or value in _NOT_FINITE):
        return float(value)
    if hint in (int, bool) and type(value) is hint:
        return value
    if (hint is str or origin is Literal) and isinstance(value, str):  # a newer version may know more words
        return value
    raise ValueError(f"{value!r} is no {hint}")


_NOT_FINITE = ("nan", "inf", "-inf")
