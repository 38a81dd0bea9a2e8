"""A ``ds_config`` from wherever people keep it: a dict, a file, or DeepSpeed's base64 form.

A file is read as DeepSpeed does (``DeepSpeedConfig.__init__`` in ``deepspeed/runtime/config.py``): Hjson, which is JSON
with comments, from a path or from a base64 string.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import hjson
from pydantic import TypeAdapter, ValidationError

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.text import shown

_Value = TypeVar("_Value")

LONGEST_PATH = 400
"""Characters: a path that is cut short cannot be looked for; a base64 form that is none is long."""


def load_ds_config(config: str | Path | Mapping[str, Any], called: str = "ds_config") -> dict[str, Any]:
    """A ``ds_config`` as a dict.

    Args:
        config: a dict, a path of a JSON (or Hjson) file, or the base64 form that DeepSpeed accepts on a command line.
        called: what its user calls it, such as the option that named the file.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON, names a key twice, or is not an object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    return _read_object(_text_of(config, called), name_of(config, called))


def no_plain_json(config: str | Path) -> str:
    """Say why what :func:`load_ds_config` has read is no plain JSON, "" where it is: Hjson wants no commas."""
    try:
        json.loads(_text_of(config, "ds_config"))
    except json.JSONDecodeError as error:
        comma = error.msg.startswith("Expecting ',' delimiter")
        what = "a comma is missing before" if comma else f"{error.msg[:1].lower()}{error.msg[1:]} at"
        return f"{what} line {error.lineno}, column {error.colno}"
    return ""


def _text_of(config: object, called: str) -> str:
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"a {called} must be a dict or the path of a JSON file, got {shown(config)}")
    if not os.path.exists(config):
        text = _from_base64(os.fspath(config))
        if text is None:
            raise ConfigError(f"there is no {called} file {shown(os.fspath(config), LONGEST_PATH)}; check the path")
        return text
    name = name_of(config, called)
    try:
        return Path(config).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{name} cannot be read ({reason}); give the path of a JSON file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not text in UTF-8; give the path of a JSON file") from None


def under_its_name(held: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file holds as a ``ds_config``: a block alone is put under its name.

    It is one if at least half of its keys are a block's, of which DeepSpeed has none but ``tensorboard``.
    """
    keys = held.keys() - {"tensorboard"}
    ours = keys & SilentConsistencyConfig.model_fields.keys()
    return {BLOCK: held} if ours and 2 * len(ours) >= len(keys) else held


def name_of(config: object, called: str = "ds_config") -> str:
    """What a sentence calls a ``config`` that :func:`load_ds_config` takes."""
    if not isinstance(config, (str, os.PathLike)):
        return f"the {called}"
    if not os.path.exists(config):
        return f"the base64 {called}"
    return f"the {called} file {shown(os.fspath(config), LONGEST_PATH)}"


def _from_base64(text: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_\-+/\s]+={0,2}\s*", text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _read_object(text: str, name: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ConfigError(f"{name} has the key {shown(twice[0])} twice in one object; keep one of them")
        return dict(pairs)

    try:
        value = hjson.loads(text, object_pairs_hook=refuse_duplicates)
    except ConfigError:
        raise
    except hjson.HjsonDecodeError as error:
        number = _first_no_number(text)
        if number is not None:
            line, found = number
            raise ConfigError(
                f"{name} is not JSON: {found} at line {line} is no number; write a finite one or leave it out"
            ) from None
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; correct it there"
        ) from None
    except Exception as error:  # whatever a parser does with a number of 5,000 digits or a thousand open braces
        raise ConfigError(f"{name} cannot be read as JSON ({type(error).__name__}); correct it") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must hold one object in braces, got {shown(value)}; put braces around it")
    if not value and not re.sub(_IGNORED, "", text, flags=re.DOTALL):
        raise ConfigError(f"{name} is empty; write an object in braces, as in {{}}")
    return value


_IGNORED = r"\ufeff|\s|#[^\n]*|//[^\n]*|/\*.*?\*/"


def _first_no_number(text: str) -> tuple[int, str] | None:
    """(line, what stands there) of the first NaN or Infinity, which Hjson takes for the start of a bare string."""
    for found in re.finditer(rf'"(?:[^"\\\n]|\\.)*"|{_IGNORED}|(-?(?:NaN|Infinity)\b)', text, re.DOTALL):
        if found[1] is not None:
            return text.count("\n", 0, found.start()) + 1, found[1]
    return None


def without_auto(value: Any) -> Any:
    """Return a configuration, or a part of it, whose ``"auto"`` values are left out: the defaults."""
    if isinstance(value, Mapping):
        return {key: without_auto(one) for key, one in value.items() if not (isinstance(one, str) and one == "auto")}
    return [without_auto(one) for one in value] if isinstance(value, list) else value


def section(ds_config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under ``key``; an empty one where there is none, or DeepSpeed will refuse what is."""
    found = ds_config.get(key)
    return found if isinstance(found, Mapping) else {}


def switched_on(section: Mapping[str, Any], key: str) -> bool:
    """A switch as pydantic reads it for DeepSpeed: ``"yes"`` and 1 are true, ``"false"`` is not."""
    return _read(_BOOL, section.get(key), False)


def zero_section(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_optimization`` with its stage as a number, as DeepSpeed reads it: ``true`` is stage 1, ``"2"`` stage 2."""
    zero = dict(section(ds_config, "zero_optimization"))
    stage = 1 if ds_config.get("zero_optimization") is True else _read(_INT, zero.get("stage"), 0)
    named = [key for key in ("overlap_comm", "round_robin_gradients") if key in zero]
    switches: dict[str, Any] = {key: switched_on(zero, key) for key in named}
    return {**zero, **switches, "stage": stage}


_BOOL, _INT = TypeAdapter(bool), TypeAdapter(int)


def _read(adapter: TypeAdapter[_Value], value: object, default: _Value) -> _Value:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return default
