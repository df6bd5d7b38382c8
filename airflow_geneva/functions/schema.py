"""Convert an Arrow struct to a JSON schema, and check answers against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from airflow_geneva.errors import InvalidInput

_NAMES = (
    (lambda kind: kinds.is_string(kind) or kinds.is_large_string(kind), "string"),
    (kinds.is_integer, "integer"),
    (kinds.is_floating, "number"),
    (kinds.is_boolean, "boolean"),
)
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def json_schema(kind: pa.DataType, nullable: bool = False, description: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of a type, in the strict form: all fields are required, and no others allowed."""
    more: dict[str, Any] = {}
    if kinds.is_struct(kind):
        inner = [kind.field(at) for at in range(kind.num_fields)]
        name = "object"
        more["properties"] = {field.name: _of_field(field) for field in inner}
        more |= {"required": [field.name for field in inner], "additionalProperties": False}
    elif kinds.is_list(kind) or kinds.is_large_list(kind):
        name, more["items"] = "array", _of_field(kind.value_field)
    else:
        found = next((name for is_kind, name in _NAMES if is_kind(kind)), None)
        if found is None:
            raise InvalidInput(f"A model cannot answer with {kind}. Use texts, numbers, booleans, lists and structs.")
        name = found
    if description:
        more["description"] = description
    return {"type": [name, "null"] if nullable else name, **more}


def _of_field(field: pa.Field) -> dict[str, Any]:
    description = (field.metadata or {}).get(b"description", b"").decode()
    return json_schema(field.type, field.nullable, description)


def check_answer(found: Any, schema: Mapping[str, Any], answer: str, place: str = "the answer") -> Any:
    """Return a model's answer if it matches a schema; otherwise raise a `ValueError` with position and value."""
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    types = tuple(kind for name in allowed for kind in _PYTHON[name])
    if not isinstance(found, types) or (isinstance(found, bool) and "boolean" not in allowed):
        raise misfit(f"{place} is {found!r:.100}, and not {' or '.join(allowed)}", answer)
    if isinstance(found, dict):
        wanted = schema["properties"]
        if missing := sorted(wanted.keys() - found.keys()):
            raise misfit(f"{place} has no {', '.join(map(repr, missing))}", answer)
        if more := sorted(found.keys() - wanted.keys()):
            raise misfit(f"{place} has also {', '.join(map(repr, more))}", answer)
        return {name: check_answer(found[name], inner, answer, f"{name!r}") for name, inner in wanted.items()}
    if isinstance(found, list):
        return [check_answer(one, schema["items"], answer, f"an item of {place}") for one in found]
    return found


def misfit(problem: str, answer: str) -> ValueError:
    return ValueError(f"The answer does not fit the schema: {problem}. The model said: {answer:.500}")
