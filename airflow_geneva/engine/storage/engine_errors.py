"""Distinguish pylance's exceptions from all others."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_geneva.engine.storage.refusals import is_access_refused, refused_by_store
from airflow_geneva.errors import FunctionExited, GenevaError

# Measured for files that are missing, empty, truncated or damaged, for versions that were cleaned up, unknown columns,
# invalid SQL, refused connections, missing permission, conflicts (pyarrow's ArrowInvalid is a ValueError), and for a
# negative version. An AttributeError or a TypeError is a bug in code and says nothing about a file.
_ENGINE_EXCEPTIONS = (OSError, ValueError, RuntimeError, OverflowError)


# Error numbers: no network (101 and above).
_OUTAGE = re.compile(
    r"\(os error (?:101|104|110|111|113|116)\)|HTTP error(?!: builder)|error sending request|\btimed out\b"
    r"|\b(?:408|429|500|502|503|504) [A-Z]"
)
# Error numbers: no memory (11, 12), too many open files (23, 24).
_UNAVAILABLE = re.compile(r"\(os error (?:11|12|23|24)\)|HTTP error")
# Requests for credentials go to another service than the store.
_CREDENTIALS = re.compile(r"token request|\bcredentials\b")


# Errors that persist until a person corrects them, beside refused access: no space (28), a read-only disk (30).
_LACKING = re.compile(r"\(os error (?:28|30)\)|\b404 [A-Z]|NoSuchBucket")


# Rust's debug output of a struct, such as `CredentialsNotLoaded(CredentialsNotLoaded { source: ... })`.
_STRUCT = re.compile(r":? \w+\(\w+ \{.*", re.S)
_REMEDIES: tuple[tuple[Callable[[str], object], str], ...] = (
    (
        re.compile(r"Failed to get AWS credentials|CredentialsNotLoaded").search,
        "There are no credentials. Give them as storage options, in Airflow in the extra of the connection, such as "
        '{"aws_access_key_id": "...", "aws_secret_access_key": "..."}, or in the environment.',
    ),
    (
        re.compile(r"Failed to resolve region").search,
        'Check the name of the bucket, or give the storage option "aws_region".',
    ),
    (
        re.compile(r"GET http://.*HTTP error: builder error").search,
        'Plain HTTP needs the storage option "allow_http": "true".',
    ),
    (re.compile(r"NoSuchBucket").search, "Check the name of the bucket, or create it: it is not made here."),
    (
        refused_by_store,
        "Correct the credentials, or what they permit. They are storage options, in Airflow those of the connection.",
    ),
)


DIVIDES_BY_ZERO = "SQL divides by zero in a row. Write NULLIF(column, 0) for a divisor that may be 0."
_NO_FILE = re.compile(r"Not found: (\S+/data/[^\s/]+\.lance)")


class EngineError(GenevaError):
    """A pylance operation failed; pylance's exception is the cause."""


def to_engine_error(error: BaseException) -> Exception:
    """Convert pylance's exception to an `EngineError` with its message and, where known, a remedy."""
    return EngineError(f"{error}{remedy_of(error)}")


def reason_of(error: BaseException) -> str:
    """Return pylance's message without the lines of its source code."""
    return str(error).split(", /")[0].strip()


def remedy_of(error: BaseException) -> str:
    """Return advice for a missing data file or an SQL division by zero; "" for any other error."""
    if "Divide by zero" in str(error):
        return f"\n{DIVIDES_BY_ZERO}"
    found = _NO_FILE.search(str(error))
    if found is None:
        return ""
    return (
        f"\nThe table names {found[1]}, which does not exist: cleanup_old_versions(delete_unverified=True) removes "
        "files that another process is about to commit. Restore a version that can be read, or drop the column and "
        "compute it again."
    )


def describe_store_error(error: BaseException) -> str:
    """Return a store's error as sentences: the error, and advice if the store refused the request."""
    text = _STRUCT.sub("", str(error))
    remedy = next((remedy for applies, remedy in _REMEDIES if applies(str(error))), "")
    return f"{text}. {remedy}".rstrip()


@contextmanager
def engine_errors(convert: Callable[[BaseException], Exception] = to_engine_error) -> Iterator[None]:
    """Convert pylance's exceptions in this block; other exceptions pass unchanged."""
    try:
        yield
    except BaseException as error:  # a panic of pylance is no Exception
        if not is_engine_error(error):
            raise
        raise convert(error) from error


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert a panic of pylance in this block to an `EngineError`: `except Exception` does not catch a panic."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise to_engine_error(error) from error


def is_engine_error(error: BaseException) -> bool:
    """Whether pylance or pyarrow raised this exception about data that it read or wrote."""
    if isinstance(error, (GenevaError, RecursionError)):
        return False
    return isinstance(error, _ENGINE_EXCEPTIONS) or is_panic(error)


def is_unavailable(error: BaseException) -> bool:
    """Whether the store is unavailable or refuses requests, so that pylance's exception says nothing about the file."""
    return is_access_refused(error) or any(pattern.search(str(error)) for pattern in (_OUTAGE, _UNAVAILABLE))


def is_outage(error: BaseException) -> bool:
    """Whether the store did not respond or asked to retry later, so that the same request may succeed then."""
    text = str(error)
    return bool(_OUTAGE.search(text)) and not _CREDENTIALS.search(text)


def is_refused(error: BaseException) -> bool:
    """Whether the store refuses requests until a person corrects the key, the permissions or the space."""
    return is_access_refused(error) or _LACKING.search(str(error)) is not None


def lacks_data_file(error: BaseException) -> bool:
    """Whether a version names a data file that the store does not have."""
    return _NO_FILE.search(str(error)) is not None


def is_overflow(error: BaseException) -> bool:
    """Whether the values of a batch take more bytes than Arrow's offsets can address."""
    return is_engine_error(error) and "overflow" in str(error).lower()


def is_panic(error: BaseException) -> bool:
    """Whether pylance's native code panicked, as on some damaged files; `except Exception` does not catch that."""
    return type(error).__module__ == "pyo3_runtime"


def as_failure(error: BaseException) -> Exception:
    """Return what a user's function raised as an exception of the call; raise what asks this process to stop."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit) and not raised_by_signal(error):
        text = f"It called sys.exit({error.code!r}), which would end the process. Raise an exception instead."
    elif is_panic(error):
        text = f"Native code panicked: {error}"
    else:
        raise error
    return FunctionExited(text).with_traceback(error.__traceback__)


def raised_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of this process raised an exception, as Airflow's does when it stops a task."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def is_failure(error: BaseException) -> bool:
    """Whether the work itself failed, user code included.

    ``AirflowTaskTimeout`` and ``KeyboardInterrupt`` ask this process to stop. They are not failures, and they do not
    derive from `Exception`.
    """
    return isinstance(error, Exception) or is_panic(error)
