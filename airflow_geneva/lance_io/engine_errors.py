"""Tell what pylance raises from every other exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_geneva.errors import GenevaError

# Measured for files that are missing, empty, cut short or of other bytes, for versions that were cleaned up, unknown
# columns, wrong SQL, refused connections, missing permission, conflicts (pyarrow's ArrowInvalid is a ValueError), and
# for a negative version. An AttributeError or a TypeError is a mistake in a program, and says nothing about a file.
_RAISED = (OSError, ValueError, RuntimeError, OverflowError)


class EngineError(GenevaError):
    """pylance could not do what it was asked; its own exception is the cause."""


def as_it_is(error: BaseException) -> Exception:
    """pylance's exception as an `EngineError` with its message."""
    return EngineError(str(error))


@contextmanager
def engine_errors(become: Callable[[BaseException], Exception] = as_it_is) -> Iterator[None]:
    """Raise what pylance raises inside of this block as another exception, and let everything else through.

    Args:
        become: makes the other exception out of pylance's.

    Raises:
        EngineError: pylance raised, and no other exception was asked for.
    """
    try:
        yield
    except BaseException as error:
        if not is_engine_error(error):
            raise
        raise become(error) from error


def is_engine_error(error: BaseException) -> bool:
    """Whether pylance or pyarrow raised an exception about what it was given to read or write."""
    if isinstance(error, (GenevaError, RecursionError)):
        return False
    return isinstance(error, _RAISED) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Whether pylance's native code panicked: on some damaged files, with what `except Exception` does not catch."""
    return type(error).__module__ == "pyo3_runtime"


def is_failure(error: BaseException) -> bool:
    """Whether work failed, user code included, and not that this process was told to stop.

    ``AirflowTaskTimeout`` and ``KeyboardInterrupt`` tell it so: they are no `Exception`.
    """
    return isinstance(error, Exception) or is_panic(error)
