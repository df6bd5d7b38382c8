"""Find the UDF of a definition by its import path, or, if a notebook or script made it, in that process."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypeAlias

from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf.decorator import UDF
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.udf.stored import load_stored_udf
from airflow_geneva.errors import InvalidInput

_Key: TypeAlias = tuple[str, str, str]

_given: ProcessMemo[_Key, UDF] = ProcessMemo()
"""UDFs without an import path that this process gave to a column or a view, by database, name and version. They are the
process's, because a table stores no more of them. The database of a view is that of its source."""
_columns: ProcessMemo[_Key, set[str]] = ProcessMemo()
"""The columns to which these UDFs were given."""
_MOST_NAMED = 3


def give_udf(udf: UDF, database: str, column: str) -> None:
    """Keep a UDF that has no import path, so that `find_udf` finds it for the column to which it is given.

    Args:
        database: its URI.
        column: its table and name.

    Raises:
        InvalidInput: another column of the database still has a function of that name and version with other code.
    """
    udf = udf.plain or udf
    key = _key(udf, database)
    for columns in _columns.values():
        columns.discard(column)
    if udf.import_path is not None:
        return
    if not keep_udf(udf, database, column):
        others = sorted(_columns[key])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise InvalidInput(
            f"A function {udf.name!r} with version {udf.code_version!r} and other code computes "
            f"{', '.join(others[:_MOST_NAMED])}{more}, which would get the code of the one for {column}: this process "
            "finds functions that have no module by name and version. Give one of them another name= or version=."
        )
    _columns.setdefault(key, set()).add(column)


def give_to_copy(definition: UdfDefinition, source: str, target: str, column: str) -> None:
    """Give the copy of a column the UDF that `find_udf` would find for the column, if it has no import path.

    Args:
        source, target: URIs of the databases of the column and its copy.
        column: the table and name of the copy.

    Raises:
        InvalidInput: as `give_udf`, for the database of the copy.
    """
    if definition.import_path is None and (found := _made_here(definition, source)) is not None:
        give_udf(found, target, column)


def keep_udf(udf: UDF, database: str, column: str = "") -> bool:
    """Keep a UDF that has no import path, and that a job of a column uses.

    Returns:
        False if it is not kept, because another column has a function of that name and version with other code.
    """
    udf = udf.plain or udf
    if udf.import_path is None:
        key = _key(udf, database)
        if _columns.get(key, set()) - {column} and not _takes_place_of(udf, _given[key]):
            return False
        _given[key] = udf
    return True


def _key(udf: UDF, database: str) -> _Key:
    return without_credentials(database), udf.name, udf.code_version


def _takes_place_of(udf: UDF, other: UDF) -> bool:
    """Whether a UDF has the code of another, or replaced it under its name when a notebook cell ran again."""
    if udf is other or udf.value_identity == other.value_identity:
        return True
    name = getattr(udf.func, "__qualname__", "")
    again = vars(sys.modules.get("__main__", ModuleType(""))).get(name)
    return again is udf and name == getattr(other.func, "__qualname__", "")


def find_udf(definition: UdfDefinition, database: str, where: str, advice: str) -> UDF:
    """Return the UDF of a definition, or the function that a notebook has since defined under its name.

    Args:
        database: the URI of the database for which it was given.
        where: the column that it computes, for the error.
        advice: what to do, for the error.

    Raises:
        InvalidInput: it has no import path and this process did not make it, or it cannot be imported here.
    """
    if definition.import_path is not None:
        found = load_stored_udf(definition.import_path)
        return found.of_groups if definition.groups else found
    if (made := _made_here(definition, database)) is not None:
        keep_udf(made, database)
        return made.of_groups if definition.groups else made
    raise InvalidInput(
        f"The UDF {definition.name!r} of {where} was defined in a notebook, a script or a function, and not in this "
        f"process, so it cannot be found. {advice}"
    )


def _made_here(definition: UdfDefinition, database: str) -> UDF | None:
    bound = vars(sys.modules.get("__main__", ModuleType("")))
    named = [value for value in bound.values() if isinstance(value, UDF) and value.name == definition.name]
    own = without_credentials(database), definition.name, definition.version
    if (given := _given.get(own)) is None:
        # A clone or a moved table is in a database to which no function was given, so others must agree on one.
        others = [_given[key] for key in [*_given][::-1] if key[1:] == own[1:]]
        given = others[0] if others and all(_takes_place_of(others[0], one) for one in others) else None
    given = given or next((udf for udf in named if udf.code_version == definition.version), None)
    # A cell that ran again, with other code or in a new kernel, has bound the name to another function.
    again = bound.get(definition.name if given is None else getattr(given.func, "__qualname__", ""))
    return again if isinstance(again, UDF) and again in named else given
