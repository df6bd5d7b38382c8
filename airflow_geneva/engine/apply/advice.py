"""What to do when a UDF fails a job: advice that depends on the cause."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from airflow_geneva.engine.limits.calls import must_pay
from airflow_geneva.engine.udf.packages import how_to_install, missing_package
from airflow_geneva.errors import UdfError

_PASSING = ("timeout", "connection", "connect", "unavailable", "ratelimit", "toomanyrequests", "throttl", "temporary")
_LASTING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PASSING_STATUS = (408, 425, 429)
_ACCESS_STATUS = (401, 402, 403)


def lacks_access(error: BaseException) -> bool:
    """Whether a service refused the key or the account: all calls fail until a person corrects that."""
    places = [place for found in (error, error.__cause__) for place in (found, getattr(found, "response", None))]
    status = [getattr(place, name, None) for place in places for name in ("status_code", "status", "code")]
    return any(code in status for code in _ACCESS_STATUS) or any(map(must_pay, places))


def may_pass(error: BaseException) -> bool:
    """Whether a call with the same input may succeed later, as when a service did not answer."""
    if lacks_access(error):
        return False
    for name in ("status_code", "code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, _LASTING):
        return False
    names = [kind.__name__.lower() for kind in type(error).__mro__]
    return isinstance(error, OSError) or any(part in name for name in names for part in _PASSING)


def null_inputs(inputs: pa.RecordBatch, row: int) -> tuple[str, ...]:
    """Return the names of a row's NULL inputs, and the paths of NULL fields of its struct inputs."""
    columns = zip(inputs.schema.names, inputs.columns, strict=True)
    return tuple(found for name, column in columns for found in _nulls(name, column[row]))


def _nulls(name: str, value: pa.Scalar) -> Iterator[str]:
    if not value.is_valid:
        yield name
    elif isinstance(value, pa.StructScalar):
        for field in value.type:
            yield from _nulls(f"{name}.{field.name}", value[field.name])


def advise(error: UdfError, version: str | None) -> str:
    """Return one line of advice about a UDF's error; "" if its message is sufficient.

    Args:
        version: version of the UDF, whose values ``continue_from`` can keep; None for a view.
    """
    if error.row_index is None and error.call is None:
        return ""
    return " ".join(_sentences(error, version))


def _sentences(error: UdfError, version: str | None) -> Iterator[str]:
    call = error.call
    if call is not None and call.nulls and "None" in call.message:
        several = len(call.nulls) > 1
        columns = ", ".join(map(repr, call.nulls))
        condition = " AND ".join(f"{name} IS NOT NULL" for name in call.nulls)
        yield (
            f"{'Its inputs' if several else 'Its input'} {columns} {'are' if several else 'is'} NULL, which the "
            f'function gets as None: let it return None then, or leave such rows out with where="{condition}".'
        )
    if call is not None and (package := missing_package(f"{call.name}: {call.message}")):
        yield how_to_install(package)
        return
    name = "Exception" if call is None else call.name
    if call is not None and call.passing:
        yield (
            "This may pass: run it again (in Airflow, clear this task), and it goes on from its checkpoints. "
            f"@udf(on_error=[Retry({name}, attempts=3)]) calls again by itself."
        )
        return
    if call is not None and call.lacks_access:
        yield (
            "The service refused the key or the account, which no row can pass: correct the key (in Airflow, the "
            "connection) or the account, and run it again (in Airflow, clear this task); it goes on from its "
            "checkpoints."
        )
        return
    if name == "MemoryError":
        yield "Set a smaller batch_size, or give the tasks more memory."
    keeps = f', with continue_from="{version}" to keep what is computed' if version else ""
    yield (
        f"The same input fails again: correct the function, and run the new code{keeps} (in Airflow, clear the plan "
        f"task). Or leave such rows NULL and list them: @udf(on_error=[Skip({name})])."
    )
