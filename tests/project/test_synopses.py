"""Usage lines in module docstrings are true: what they call exists and takes these arguments."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import textwrap
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import ds_silent
from ds_silent.extras import MissingExtra

MODULES = [
    module.name for module in pkgutil.walk_packages(ds_silent.__path__, "ds_silent.") if "__main__" not in module.name
]
_UNKNOWN = inspect.Parameter.empty  # what a name holds that a synopsis takes for granted


def usage(docstring: str) -> Iterator[ast.stmt]:
    """Statements of the paragraphs that are Python, behind the first one; a sentence is none."""
    for paragraph in inspect.cleandoc(docstring).split("\n\n")[1:]:
        text = textwrap.dedent(paragraph)
        for part in (text,) if _parses(text) else text.splitlines():
            yield from ast.parse(part).body if _parses(part) else ()


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def wrong_usage(module: Any, docstring: str) -> list[str]:
    """What cannot be called so, in the order of the docstring."""
    held: dict[str, Any] = {"ds_silent": ds_silent}
    wrong = []
    for statement in usage(docstring):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                wrong += [f"{ast.unparse(node)}: {why}" for why in _why_not(node, held, module)]
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                alone = isinstance(statement, ast.Assign) and statement.targets == [node]
                held[node.id] = _value(statement.value, held, module) if alone else _UNKNOWN  # type: ignore[attr-defined]
    return wrong


def _why_not(call: ast.Call, held: dict[str, Any], module: Any) -> list[str]:
    try:
        called = _object(call.func, held, module)
        given = [_UNKNOWN for _ in call.args]
        if called is _UNKNOWN or any(isinstance(a, ast.Starred | ast.Constant) and _open(a) for a in call.args):
            return []
        inspect.signature(called).bind(*given, **{k.arg: None for k in call.keywords if k.arg})
    except (LookupError, AttributeError, TypeError) as error:
        return [str(error)]
    except ValueError:  # a builtin without a signature
        return []
    return []


def _open(argument: ast.expr) -> bool:
    """``*several`` or ``...``: any number of arguments."""
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and argument.value is ...)


def _object(node: ast.expr, held: dict[str, Any], module: Any) -> Any:
    """What an expression of names and dots is; of an instance, its methods come bound."""
    if isinstance(node, ast.Name):
        for place in (held, vars(module), vars(builtins), everything()):
            if node.id in place:
                return place[node.id]
        raise LookupError(f"there is no {node.id}")
    if not isinstance(node, ast.Attribute):
        return _value(node, held, module)
    try:
        owner = _object(node.value, held, module)
    except (LookupError, AttributeError):  # a variable that the synopsis takes for granted, an attribute of an instance
        return _UNKNOWN
    if owner is _UNKNOWN or inspect.isfunction(owner) or node.attr in _fields(type(owner)):
        return _UNKNOWN
    return getattr(owner, node.attr)


def _fields(kind: type) -> set[str]:
    """What instances hold beside methods."""
    return {name for base in kind.__mro__ for name in inspect.get_annotations(base)}


def imported(name: str) -> Any:
    """A module; an empty one where an extra that it needs is not installed."""
    try:
        return importlib.import_module(name)
    except MissingExtra:
        return ModuleType(name)


@functools.cache
def everything() -> dict[str, Any]:
    """Classes and functions of the package whose names are those of one thing only."""
    named: dict[str, set[Any]] = {}
    for name in MODULES:
        for key, value in vars(imported(name)).items():
            if inspect.isclass(value) or inspect.isfunction(value):
                named.setdefault(key, set()).add(value)
    return {name: values.pop() if len(values) == 1 else _UNKNOWN for name, values in named.items()}


def _value(node: ast.expr, held: dict[str, Any], module: Any) -> Any:
    """An object of the class that a call makes or is annotated to return, without running it."""
    if not isinstance(node, ast.Call):
        return _UNKNOWN
    try:
        called = _object(node.func, held, module)
        kind = called if inspect.isclass(called) else typing.get_type_hints(called).get("return")
        return object.__new__(kind) if inspect.isclass(kind) and kind.__module__.startswith("ds_silent") else _UNKNOWN
    except (LookupError, AttributeError, TypeError, NameError):
        return _UNKNOWN


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_says_of_its_use_is_true(name: str) -> None:
    module = imported(name)
    assert wrong_usage(module, module.__doc__ or "") == []


def test_a_wrong_synopsis_is_seen() -> None:
    from ds_silent.distributed import parts

    told = "Ranks.\n\n    parts = parts_of(values)\n    {}\n\nProse (with a call) is no usage."
    assert wrong_usage(parts, told.format("outvoted(parts)  # ((1,),)")) == []
    for line in ("outvoted(parts, 4)", "outvoted(groups=parts)", "minority(parts)", "parts = parts_of()"):
        assert len(wrong_usage(parts, told.format(line))) == 1
