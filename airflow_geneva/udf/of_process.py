"""Find the UDF of a definition: by import path; one of a notebook or script in the process that made it."""

from __future__ import annotations

import sys
from types import ModuleType

from airflow_geneva.errors import InvalidInput
from airflow_geneva.udf.decorator import UDF
from airflow_geneva.udf.settings import UdfDefinition
from airflow_geneva.udf.stored import load_stored_udf

_given: dict[tuple[str, str], UDF] = {}
"""UDFs without an import path that this process gave to a column or a view, by name and version."""


def keep_udf(udf: UDF) -> None:
    """Keep a UDF that has no import path, so that `find_udf` finds it."""
    if udf.import_path is None:
        _given[udf.name, udf.code_version] = udf


def kept_udf(name: str, version: str) -> UDF | None:
    """Return the UDF of a notebook or script that this process used in this version."""
    return _given.get((name, version))


def find_udf(definition: UdfDefinition, where: str, advice: str) -> UDF:
    """Return the UDF of a definition; a function that a notebook defined again under its name counts.

    Args:
        where: says in the error which column it computes.
        advice: says in the error what to do.

    Raises:
        InvalidInput: it has no import path and this process did not make it, or it cannot be imported here.
    """
    if definition.import_path is not None:
        return load_stored_udf(definition.import_path)
    if (found := _made_here(definition)) is not None:
        keep_udf(found)
        return found
    raise InvalidInput(
        f"The UDF {definition.name!r} of {where} was defined in a notebook, a script or a function, and not in this "
        f"process, so it cannot be found. {advice}"
    )


def _made_here(definition: UdfDefinition) -> UDF | None:
    bound = vars(sys.modules.get("__main__", ModuleType("")))
    named = [value for value in bound.values() if isinstance(value, UDF) and value.name == definition.name]
    given = _given.get((definition.name, definition.version)) or next(
        (udf for udf in named if udf.code_version == definition.version), None
    )
    # A cell that ran again, with other code or in a new kernel, has bound the name to another function.
    again = bound.get(definition.name if given is None else getattr(given.func, "__qualname__", ""))
    return again if isinstance(again, UDF) and again in named else given
