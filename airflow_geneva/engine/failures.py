"""What is known about calls and rows that failed, as plain values: errors hold them, and records are made of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowFailure:
    """A row that failed under a `Skip` rule.

    Args:
        index: the row within the batch.
        rule: position of the `Skip` in the policy, 0 for `"skip"`.
        traceback: the UDF's own frames; "" after a timeout or a crash.
        calls: the number of UDF calls on the row in this run, including calls with other rows.
        column: for a view, the column that was computed; else "".
        also: for a view, the failures of other columns on the row, which fails once.
    """

    index: int
    rule: int
    exception: str
    message: str
    traceback: str
    calls: int
    column: str = ""
    also: tuple[RowFailure, ...] = ()


@dataclass(frozen=True)
class CallFailure:
    """Why a call returned no values.

    Args:
        fits: positions of the matching rules of the policy.
        complete: the message is sufficient, as for an output that does not fit its column.
        passing: a call with the same input may succeed later.
        lacks_access: a service refused the key or the account.
        nulls: inputs of the failing row that are NULL.
        out_of_memory: the device's memory did not suffice.
        device_failed: the device, or this process's use of it, failed.
    """

    exception: str
    message: str
    traceback: str
    fits: tuple[int, ...]
    complete: bool = False
    passing: bool = False
    lacks_access: bool = False
    nulls: tuple[str, ...] = ()
    out_of_memory: bool = False
    device_failed: bool = False

    @property
    def name(self) -> str:
        return self.exception.rpartition(".")[2]
