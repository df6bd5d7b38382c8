"""The promises of the design as functions that every test of the engine calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from airflow_geneva.engine.lance_io.table_versions import read_transaction
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.table import Table
from tests.support.counting import Trace

Expected = Callable[..., Any]


def values_of(
    table: Table, column: str, inputs: Sequence[str] = ("x",), where: str | None = None
) -> list[tuple[Any, ...]]:
    """Return inputs and computed value of every live row, read with pylance only."""
    columns = [*inputs, column]
    rows = table.lance.to_table(columns=columns, filter=where)
    return list(zip(*(rows.column(name).to_pylist() for name in columns), strict=True))


def assert_right(
    table: Table, column: str, expected: Expected, inputs: Sequence[str] = ("x",), where: str | None = None
) -> None:
    """Promise 1: every (selected) row holds the function's value for its inputs."""
    wrong = [row for row in values_of(table, column, inputs, where) if row[-1] != expected(*row[:-1])]
    assert not wrong, f"{len(wrong)} rows of {column} are wrong, such as {wrong[:5]}"


def assert_untouched(table: Table, column: str, where: str) -> None:
    """Promise 1, reversed: rows that were not selected hold no value."""
    touched = table.lance.count_rows(f"({where}) AND `{column}` IS NOT NULL")
    assert touched == 0, f"{touched} rows that were not selected hold a value of {column}"


def assert_exact(trace: Trace, due: Iterable[int | None]) -> None:
    """Promise 3: every due row ran once, and no other row ran."""
    run, wanted = trace.counts(), Counter(due)
    assert run == wanted, (
        f"run but not due: {list((run - wanted).items())[:5]}, due but not run: {list((wanted - run).items())[:5]}"
    )


def assert_twice_at_most(trace: Trace, due: Iterable[int | None], slack: int) -> None:
    """Promise 3 after a kill: every due row ran, nothing else did, and at most ``slack`` rows ran again."""
    run, wanted = trace.counts(), Counter(due)
    assert set(run) == set(wanted)
    again = sum((run - wanted).values())
    assert again <= slack, f"{again} rows ran again, {slack} are allowed"


def assert_honest(result: BackfillResult, table: Table, rows_run: int | None = None) -> None:
    """Promise 6: the reported numbers add up, and agree with the table's history and with the calls of the UDF."""
    parts = result.rows_computed + result.rows_reused + result.rows_skipped + result.rows_failed + result.rows_left
    planned = table.location.open(result.from_version).count_rows()
    assert parts == planned, f"{result} does not add up to the {planned} rows of version {result.from_version}"
    assert result.state == ("PARTIAL" if result.rows_left else "DONE"), str(result)
    ours = [v for v in range(result.from_version + 1, table.version + 1) if job_of(table, v) == result.job_id]
    assert list(result.commits) == ours, f"{result.commits} were told, and {ours} were committed"
    if rows_run is not None:
        assert result.rows_computed == result.rows_run == rows_run


def job_of(table: Table, version: int) -> str | None:
    """Return the job that wrote a table version."""
    transaction = read_transaction(table.lance, version)
    found: str | None = ((transaction.transaction_properties if transaction else None) or {}).get("geneva.job_id")
    return found


def assert_nothing_to_do_is_free(table: Table, column: str, trace: Trace | None = None, **arguments: Any) -> None:
    """Promise 5: a backfill with nothing to do runs no row and writes no version."""
    version, seen = table.version, len(trace) if trace else 0
    data_files = set(Path(table.uri, "data").glob("*"))
    result = table.backfill(column, runner="inline", **arguments)
    assert (result.state, result.commits, result.changed) == ("DONE", (), False)
    assert (result.rows_computed, result.rows_reused, result.rows_left, result.rows_failed) == (0, 0, 0, 0)
    assert table.version == version
    assert_honest(result, table, rows_run=0)
    if trace is not None:
        assert len(trace) == seen
    if "://" not in table.uri:
        assert set(Path(table.uri, "data").glob("*")) == data_files


def assert_whole_commits(table: Table, column: str, expected: Expected, since: int) -> None:
    """Promise 4: no version holds a wrong value, and a commit of a backfill completes every fragment it touches."""
    before: dict[int, list[Any]] = {}
    for version in range(since, table.version + 1):
        rows = table.location.open(version).to_table(columns=["x", column], with_row_address=True)
        now: dict[int, list[Any]] = {}
        for x, value, address in zip(*(rows[name].to_pylist() for name in ("x", column, "_rowaddr")), strict=True):
            assert value is None or value == expected(x), f"version {version} holds {value} for {x}"
            now.setdefault(address >> 32, []).append(value)
        if job_of(table, version):
            torn = [fragment for fragment, values in now.items() if values != before.get(fragment) and None in values]
            assert not torn, f"version {version} completes fragments {torn} in part"
        before = now


def assert_closed(folder: Path, secrets: Sequence[str]) -> None:
    """Promise 7: no document below a folder holds a secret."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in data, f"{path} holds a credential"
