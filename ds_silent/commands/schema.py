"""JSON Schemas of the block and of the lines of ``metrics.jsonl`` and ``events.jsonl``, made from the code.

    schema_of("block")                                  # what `ds-silent schema block` prints
    python -m ds_silent.commands.schema docs/schemas    # `make docs`: one file for each

An editor completes a ds_config with the first; a program in any language checks or reads lines with the others. They
say what one key may hold. What several keys together may not say, ``ds-silent check`` knows.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ds_silent.config import BLOCK, SilentConsistencyConfig
from ds_silent.config.fields import OF_A_FIELD
from ds_silent.records import FORMAT, Event, StepRecord

Name = Literal["block", "metrics", "events"]
NAMES: tuple[Name, ...] = get_args(Name)
DRAFT = "http://json-schema.org/draft-07/schema#"
"""What every editor knows. Nothing here needs a newer one."""
_NUMBER = {
    "description": 'A number; one that is not finite is the string "nan", "inf" or "-inf".',
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}


def schema_of(name: Name) -> dict[str, Any]:
    """JSON's own types only. ``block``: of a whole ds_config, of which nothing but the block is described."""
    if name == "block":
        return _of_the_block()
    kind, file = (StepRecord, "metrics.jsonl") if name == "metrics" else (Event, "events.jsonl")
    definitions: dict[str, Any] = {}
    whole = _of_record(kind, definitions)
    head = {"$schema": DRAFT, "$id": f"urn:ds-silent:{name}:{FORMAT}", "title": f"A line of {file}, version {FORMAT}"}
    return head | whole | {"definitions": dict(sorted(definitions.items()))}


def written(name: Name) -> str:
    """As a file holds it, and as the command prints it."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def _of_the_block() -> dict[str, Any]:
    block = _plain(SilentConsistencyConfig.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = block.pop("$defs")
    return {
        "$schema": DRAFT,
        "$id": "urn:ds-silent:block",
        "title": f"A ds_config with the {BLOCK} block",
        "type": "object",
        "properties": {BLOCK: {"$ref": f"#/definitions/{SilentConsistencyConfig.__name__}"}},
        "definitions": dict(sorted((definitions | {SilentConsistencyConfig.__name__: block}).items())),
    }


def _plain(schema: Any) -> Any:
    """Without what pydantic and our own fields add: the sentence of a mistake, titles that repeat the key."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {"properties", "$defs"}  # their keys are names of the block, whatever they are
    plain = {
        key: {name: _plain(inner) for name, inner in value.items()}
        if key in named
        else (_sentence(value) if key == "description" else _plain(value))
        for key, value in schema.items()
        if key not in (*OF_A_FIELD, "title")
    }
    if "power_of_two" in schema:
        low, high = schema["power_of_two"]
        plain["enum"] = [2**power for power in range(low.bit_length() - 1, high.bit_length())]
    return plain


def _sentence(text: str) -> str:
    """A docstring on one line, as an editor shows it."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", re.sub(r"\s+", " ", text).strip()).replace("``", "`")


def _of_record(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Keys may be added to a record, so that more than these are allowed."""
    hints = get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.metadata.get("json", True)]
    return {
        "description": _sentence(inspect.getdoc(kind) or kind.__name__),
        "type": "object",
        "properties": {field.name: _of(hints[field.name], definitions) for field in fields},
        "required": [field.name for field in fields if not {"absent", "added"} & set(field.metadata)],
    }


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of what :func:`ds_silent.records.to_json` makes of a field with this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):  # the only unions in the records are "or None"
        return {"anyOf": [_of(arguments[0], definitions), {"type": "null"}]}
    if dataclasses.is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        if name not in definitions:
            definitions[name] = {}  # a record within itself must not go on for ever
            definitions[name] = _of_record(hint, definitions)
        return {"$ref": f"#/definitions/{name}"}
    if hint is float:
        definitions["Number"] = _NUMBER
        return {"$ref": "#/definitions/Number"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        items = {"type": "array", "items": _of(arguments[0], definitions)}
        return items if arguments[-1] is Ellipsis else items | {"minItems": len(arguments), "maxItems": len(arguments)}
    if origin is Mapping:  # its keys are ranks
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": _of(arguments[1], definitions),
        }
    return {"type": {int: "integer", str: "string", bool: "boolean"}[hint]}


def main(directory: str) -> None:
    for name in NAMES:
        Path(directory, f"{name}.json").write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
