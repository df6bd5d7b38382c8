"""What one more fragment of a few rows costs: files that are opened, listed and written."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import lance.file
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import Database, udf
from airflow_geneva.engine.lance_io import staged_files
from airflow_geneva.engine.storage.files import Storage

FEW, MANY = 20, 50


@udf(data_type=pa.int64(), version="1")
def double(x: pa.Int64Array) -> pa.Array:
    return pc.multiply(x, 2)


def count_calls(monkeypatch: pytest.MonkeyPatch, calls: Counter[str], owner: type, *names: str) -> None:
    for name in names:
        method = getattr(owner, name)

        def counted(self: Any, *args: Any, _method: Any = method, _name: str = name, **options: Any) -> Any:
            calls[_name] += 1
            return _method(self, *args, **options)

        monkeypatch.setattr(owner, name, counted)


# A column's files must still exist after its commit; a view's were just written when its rows are swapped.
@pytest.mark.parametrize(("kind", "checks"), [("column", 1), ("view", 0)])
def test_a_small_fragment_costs_one_written_file_and_at_most_one_check(
    db: Database, monkeypatch: pytest.MonkeyPatch, kind: str, checks: int
) -> None:
    monkeypatch.setattr(staged_files, "_FRESH_SECONDS", 600.0)
    calls = Counter[str]()
    count_calls(monkeypatch, calls, lance.file.LanceFileSession, "open_reader", "open_writer", "list")
    count_calls(monkeypatch, calls, Storage, "list_folder", "list_files", "exists", "write_bytes", "read_bytes")

    def run(fragments: int) -> Counter[str]:
        rows = pa.table({"x": pa.array(range(10 * fragments), pa.int64())})
        table = db.create_table(f"t{fragments}", rows, max_rows_per_file=10)
        if kind == "view":
            query = table.query().where("x % 2 = 0").add_columns({"y": double})
            view = query.create_materialized_view(db, f"v{fragments}")
            compute: Any = view.refresh
        else:
            table.add_columns({"y": double})
            compute = partial(table.backfill, "y")
        calls.clear()
        assert compute(runner="inline", checkpoint_interval=600.0).state == "DONE"
        return Counter(calls)

    more = MANY - FEW
    assert run(MANY) - run(FEW) == Counter(open_writer=more, exists=checks * more) + Counter()
