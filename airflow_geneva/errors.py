"""Errors that say what was asked, what was found, and what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_geneva.apply.outcome import RowFailure
    from airflow_geneva.job.result import BackfillResult


# A user without a password is a container, as in abfss://container@account, but in a URL of the web.
_USER = re.compile(r"\b(https?://(?=[^\s/]+@)|[a-z][a-z0-9+.-]*://(?=[^\s/@:]*:[^\s/]*@))[^\s/]+@", re.IGNORECASE)
_SIGNATURE = re.compile(
    r"([?&](?:sig|signature|token|access_token|x-[a-z]+-(?:signature|credential|security-token))=|\bAccountKey=)[^\s&);]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """A text as it may be kept and shown: pylance repeats the endpoint that it was given, whatever stands in it."""
    return _SIGNATURE.sub(r"\1***", _USER.sub(r"\1***@", text))


class GenevaError(Exception):
    """Base of every error this package raises on purpose; URLs in its message name no user and no password."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))


class InvalidInput(GenevaError, ValueError):
    """Something asked for cannot be done as asked; nothing was started."""


class TableRemade(InvalidInput):
    """A table was dropped and made again after a job was planned on it."""


class StorageError(GenevaError, OSError):
    """A table's folder or a document beside it cannot be read or written."""


class DamagedRecord(GenevaError):
    """What is kept of a job cannot be understood."""


class UdfError(GenevaError, RuntimeError):
    """A UDF raised, or gave something that does not fit its column.

    Attributes:
        row_index: position of the failing row within the batch, or None when the batch failed as a whole.
        computed: values of the rows before ``row_index``, NULL for those that failed and were skipped; None when they
            are not known.
        failures: the rows before ``row_index`` that failed and were skipped.
        column: the column of a query that was computed, where there may be several; else "".
    """

    def __init__(
        self,
        message: str,
        row_index: int | None = None,
        computed: pa.Array | None = None,
        failures: tuple[RowFailure, ...] = (),
        column: str = "",
    ) -> None:
        super().__init__(message)
        self.row_index = row_index
        self.computed = computed
        self.failures = failures
        self.column = column

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles exceptions on their way to the driver; values and failures stay where they were computed.
        return (type(self), (str(self), self.row_index))


class UdfCrashed(GenevaError, RuntimeError):
    """The process that ran a UDF died: a segmentation fault, `os._exit`, the system's out-of-memory killer."""


class CodeChanged(GenevaError):
    """A column or view holds values of other code, and nobody said what is to become of them; nothing was started."""


class CommitConflict(GenevaError):
    """Others kept changing the table for longer than the retries allowed."""


class JobFailed(GenevaError):
    """A job ended in FAILED; ``result`` holds what was done all the same."""

    def __init__(self, message: str, result: BackfillResult | None = None) -> None:
        super().__init__(message)
        self.result = result
