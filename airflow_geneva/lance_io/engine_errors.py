"""Tell what pylance raises from every other exception."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_geneva.errors import GenevaError

# Measured for files that are missing, empty, cut short or of other bytes, for versions that were cleaned up, unknown
# columns, wrong SQL, refused connections, missing permission, conflicts (pyarrow's ArrowInvalid is a ValueError), and
# for a negative version. An AttributeError or a TypeError is a mistake in a program, and says nothing about a file.
_RAISED = (OSError, ValueError, RuntimeError, OverflowError)


# By number: no permission (1, 13), no memory (11, 12), too many open files (23, 24), no network (101 and above).
_AWAY = re.compile(
    r"\(os error (?:1|11|12|13|23|24|101|104|110|111|113|116)\)|HTTP error|error sending request|\btimed out\b"
    r"|lacked (?:the necessary privileges|valid authentication)|\b(?:401|403|408|429|500|502|503|504) [A-Z]"
)


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


def is_out_of_reach(error: BaseException) -> bool:
    """Whether pylance's exception says nothing about a file: a store or this process does not let it be read now.

    A permission is missing, too many files are open, or an object store is down or refuses.
    """
    return _AWAY.search(str(error)) is not None


def is_overflow(error: BaseException) -> bool:
    """Whether pylance's exception says that the values of a batch take more bytes than Arrow's offsets can say."""
    return is_engine_error(error) and "overflow" in str(error).lower()


def is_panic(error: BaseException) -> bool:
    """Whether pylance's native code panicked: on some damaged files, with what `except Exception` does not catch."""
    return type(error).__module__ == "pyo3_runtime"


def is_failure(error: BaseException) -> bool:
    """Whether work failed, user code included, and not that this process was told to stop.

    ``AirflowTaskTimeout`` and ``KeyboardInterrupt`` tell it so: they are no `Exception`.
    """
    return isinstance(error, Exception) or is_panic(error)
