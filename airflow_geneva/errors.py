"""Errors whose messages name the request, the finding and the remedy."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.masking import mask_secrets

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_geneva.engine.failures import CallFailure, RowFailure
    from airflow_geneva.engine.results import BackfillResult


# pylance's messages begin with the names of its own errors, and end with positions in its own source.
_RUST = re.compile(
    r",? ?(?:at )?/[^\s,:]{1,200}\.rs:\d+:\d+"
    r"|\b(?:LanceError\(\w+\)|Generic [\w/]+ error|External error|Invalid user input): "
)


def _mask_chain(error: BaseException | None) -> None:
    """Mask credentials in the errors that are being handled: they become the cause of another, and logs print them."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        masked = tuple(mask_secrets(arg) if isinstance(arg, str) else arg for arg in error.args)
        if masked != error.args:
            error.args = masked
        error = error.__cause__ or error.__context__


class GenevaError(Exception):
    """Base class of this package's errors; its message holds no credentials and no terms of pylance's Rust code."""

    def __init__(self, *args: Any) -> None:
        _mask_chain(sys.exc_info()[1])
        super().__init__(*(_RUST.sub("", mask_secrets(arg)) if isinstance(arg, str) else arg for arg in args))


class InvalidInput(GenevaError, ValueError):
    """A request is not valid; nothing was started."""


class NoSuchTable(InvalidInput):
    """A catalog does not name the table."""


class TableRemade(InvalidInput):
    """A table was dropped and created again after a job was planned on it."""


class StorageError(GenevaError, OSError):
    """A table's folder or a document beside it cannot be read or written."""


class DamagedRecord(GenevaError):
    """The stored record of a job cannot be parsed."""


class BatchFailed(GenevaError, RuntimeError):
    """Raised by a batch API's `poll` or `fetch`: the service will never answer this batch. All of its rows failed."""


class UdfError(GenevaError, RuntimeError):
    """A UDF raised, or returned a value that does not fit its column.

    Attributes:
        row_index: position of the failing row within the batch, or None if the batch failed as a whole.
        computed: values of the rows before ``row_index``, NULL for rows that failed and were skipped; None if they
            are not known.
        failures: the rows before ``row_index`` that failed and were skipped.
        column: the query's column that was being computed; "" if there is only one.
        call: why the call on the row failed; None if its output does not fit, or the UDF was not called.
    """

    def __init__(
        self,
        message: str,
        row_index: int | None = None,
        computed: pa.Array | None = None,
        failures: tuple[RowFailure, ...] = (),
        column: str = "",
        call: CallFailure | None = None,
    ) -> None:
        super().__init__(message)
        self.row_index = row_index
        self.computed = computed
        self.failures = failures
        self.column = column
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles exceptions for the driver; values and failures stay on the executor.
        return (type(self), (str(self), self.row_index))


class FunctionExited(GenevaError, RuntimeError):
    """A function would have ended its process: it called `sys.exit`, or native code that it called panicked."""


class UdfCrashed(GenevaError, RuntimeError):
    """The process that ran a UDF died: a segmentation fault, `os._exit`, the system's out-of-memory killer."""


class DeviceFailed(GenevaError, RuntimeError):
    """A device failed, so every call fails regardless of its rows.

    `kept` has the rows of the batch that have a value, and their values.
    """

    kept: tuple[list[int], pa.Array | None] = ([], None)


class SumTooLarge(GenevaError, OverflowError):
    """The sum or average of a group's values does not fit the type of its column."""


class CodeChanged(GenevaError):
    """A column or view holds values of another code version, and ``on_code_change`` is "error"."""


class UnknownValues(GenevaError):
    """A column or view holds values that no job of its table computed, and ``on_unknown_values`` is "error"."""


class CommitConflict(GenevaError):
    """Other writers kept changing the table until all retries were used."""


class ExpectationFailed(GenevaError):
    """Computed values are not as expected, so they did not become visible."""


class JobFailed(GenevaError):
    """A job ended as FAILED; ``result`` holds the counts of its completed work."""

    def __init__(self, message: str, result: BackfillResult | None = None) -> None:
        super().__init__(message)
        self.result = result
