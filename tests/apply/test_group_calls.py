"""Functions that are called once per group: what they get, what they may return, and what becomes of failures."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva import Table, connect, udf
from airflow_geneva.engine.apply import group_calls
from airflow_geneva.engine.apply.dedup import KnownValues
from airflow_geneva.engine.apply.group_columns import GroupColumns
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.query_columns import CARRIED, RUNS, QueryComputer
from airflow_geneva.engine.apply.source_rows import SourceRows, take_rows
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.engine.udf.of_process import find_udf, give_udf
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.engine.views.resolve import resolve_columns
from airflow_geneva.errors import InvalidInput, UdfError
from tests.udfs_for_tests import grouped

FORMS = [
    grouped.joined_arrays, grouped.joined_lists, grouped.joined_plain, grouped.joined_batch, grouped.joined_batches,
    grouped.joined_async, grouped.joined_by_class,
]  # fmt: skip
Row = tuple[int, str, int]  # its group, kind and amount
ROWS: list[Row] = [(1, "a", 5), (2, "b", 1), (1, "c", 2), (3, "d", 4), (1, "e", 9), (2, "f", 0)]


def make_table(folder: Path, rows: Sequence[Row] = ROWS) -> Table:
    columns = zip(*rows, strict=True)
    kinds = {"k": pa.int64(), "kind": pa.string(), "amount": pa.int64()}
    data = pa.table({name: pa.array(part, kind) for part, (name, kind) in zip(columns, kinds.items(), strict=True)})
    return connect(folder / "db").create_table("events", data, max_rows_per_file=4)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return make_table(tmp_path)


class Grouped:
    """The groups of a table by `k`: what a view of groups reads of its source."""

    def __init__(self, table: Table) -> None:
        self.location, self.dataset = table.location, table.lance
        found = self.dataset.to_table(columns=["k"], with_row_id=True)
        keys, ids = found["k"].to_numpy(), found["_rowid"].to_numpy().astype(np.int64)
        self.keys, self.lengths = np.unique(keys, return_counts=True)
        self.ids: npt.NDArray[np.int64] = ids[np.argsort(keys, kind="stable")]

    def batch(self, columns: GroupColumns) -> pa.RecordBatch:
        """Return the batch of groups, as the target of a view of groups hands it on."""
        rows = take_rows(self.dataset, self.ids, columns.projection) if columns.projection else None
        made = columns.compute(rows, self.ids, self.lengths)
        return pa.record_batch({"rows": pa.array(self.lengths), **made})

    def evaluate(self, specs: dict[Any, Any]) -> pa.Table:
        """Compute columns of the groups."""
        found = resolve_columns(self.dataset, "events", tuple(specs.items()), groups=True)
        columns = GroupColumns.of(found.columns, found.udfs)
        rows = SourceRows(self.location, self.dataset.version)
        opened = {name: UdfReference.of(one) if one.needs_process else one for name, one in found.udfs.items()}

        def open_mapper(name: str, inputs: Sequence[str] | None) -> Any:
            return open_batch_mapper(opened[name], inputs, source=rows)

        with QueryComputer(found.columns, found.udfs, open_mapper) as computer:
            assert computer.projection == {}
            self.mapped: MappedBatch = computer(self.batch(columns))
        made = pa.Table.from_batches([pa.RecordBatch.from_struct_array(self.mapped.values)])
        assert [field.type for field in made.schema] == [field.type for field in found.schema]
        return made


@pytest.mark.parametrize("function", FORMS, ids=lambda one: one.name)
def test_a_function_gets_the_rows_of_a_group_in_its_form(table: Table, function: UDF) -> None:
    found = Grouped(table).evaluate({"joined": (function, ["kind", "amount"])})
    assert found["joined"].to_pylist() == ["a5 c2 e9", "b1 f0", "d4"]


def test_it_may_return_a_scalar_a_struct_none_or_yield_a_list(table: Table) -> None:
    table.add(pa.table({"k": [4], "kind": ["none"], "amount": [7]}))
    found = Grouped(table).evaluate(
        {
            "n": "count(*)",
            "amount": "max(amount)",
            "total": (grouped.total, ["amount"]),
            "doubled": (grouped.doubled, ["amount"]),
            "also": (grouped.doubled_arrays, ["amount"]),
            ("kinds", "last"): (grouped.profile, ["kind"]),
        }
    )
    assert found.to_pylist() == [
        {"n": 3, "amount": 9, "total": 16, "doubled": [10, 4, 18], "also": [10, 4, 18], "kinds": 3, "last": "e"},
        {"n": 2, "amount": 1, "total": 1, "doubled": [2, 0], "also": [2, 0], "kinds": 2, "last": "f"},
        {"n": 1, "amount": 4, "total": 4, "doubled": [8], "also": [8], "kinds": 1, "last": "d"},
        {"n": 1, "amount": 7, "total": 7, "doubled": [14], "also": [14], "kinds": None, "last": None},
    ]


def test_an_input_may_be_a_field_of_a_struct(tmp_path: Path) -> None:
    data = pa.table({"k": [1, 2, 1], "meta": [{"lang": "en", "n": 1}, None, {"lang": "fr", "n": 2}]})

    @udf(data_type=pa.string())
    def langs(lang: list[str], meta: list[Any]) -> str:
        return f"{lang} {len(meta)}"

    @udf(data_type=pa.string(), input_columns=["meta.lang"])
    def of_batches(batches: Iterator[pa.RecordBatch]) -> str:
        return str([value for batch in batches for value in batch["meta.lang"].to_pylist()])

    made = Grouped(connect(tmp_path / "db").create_table("events", data))
    found = made.evaluate({"langs": (langs, ["meta.lang", "meta"]), "again": of_batches})
    assert found.to_pydict() == {"langs": ["['en', 'fr'] 2", "[None] 1"], "again": ["['en', 'fr']", "[None]"]}


def test_a_failed_group_is_skipped_and_named(tmp_path: Path) -> None:
    groups = Grouped(make_table(tmp_path, [(1, "a", 5), (2, "b", -4), (3, "c", 6), (2, "d", 1)]))
    assert groups.evaluate({"sum": (grouped.picky, ["amount"])})["sum"].to_pylist() == [5, None, 6]
    (failure,) = groups.mapped.failures
    assert (failure.index, failure.message) == (1, "a sum of -3")


def test_a_group_that_ends_its_process_or_takes_too_long_fails_alone(tmp_path: Path) -> None:
    groups = Grouped(make_table(tmp_path, [(1, "a", 5), (2, "b", -1), (3, "c", 6), (4, "d", -2), (5, "e", 7)]))
    assert groups.evaluate({"sum": (grouped.deadly, ["amount"])})["sum"].to_pylist() == [5, None, 6, None, 7]
    assert [one.exception for one in groups.mapped.failures] == [
        "airflow_geneva.errors.UdfCrashed",
        "builtins.TimeoutError",
    ]


def test_a_function_that_fails_the_job_names_the_row_of_the_group(table: Table) -> None:
    @udf(data_type=pa.int64())
    def strict(amount: list[int]) -> int:
        assert sum(amount) != 1
        return sum(amount)

    with pytest.raises(UdfError, match="raised AssertionError on row 1 of a batch of 3") as failed:
        Grouped(table).evaluate({"sum": (strict, ["amount"])})
    assert failed.value.row_index == 1


def test_a_retried_group_gets_its_batches_again(tmp_path: Path) -> None:
    groups = Grouped(make_table(tmp_path, [(1, "a", 5), (2, "b", 3), (1, "c", 6)]))
    assert groups.evaluate({"sum": (grouped.counting, ["amount"])})["sum"].to_pylist() == [11, 3]


def test_equal_groups_are_called_once(tmp_path: Path) -> None:
    made = make_table(tmp_path, [(1, "a", 5), (2, "b", 3), (1, "c", 6), (3, "d", 5), (3, "e", 6)])
    groups = Grouped(made)
    found = resolve_columns(made.lance, "events", (("sum", (grouped.recorded, ["amount"])),), groups=True)
    grouped.calls.clear()
    open_one = lambda name, inputs: open_batch_mapper(found.udfs[name], inputs, KnownValues(None, 1 << 20))  # noqa: E731
    with QueryComputer(found.columns, found.udfs, open_one) as computer:
        mapped = computer(groups.batch(GroupColumns.of(found.columns, found.udfs)))
    assert mapped.values.field("sum").to_pylist() == [11, 3, 11]
    assert grouped.calls == [[5, 6], [3]]


def test_a_batch_without_rows_whose_functions_run_on_some_rows_is_computed(table: Table) -> None:
    groups = Grouped(table)
    specs = (("joined", (grouped.joined_arrays, ["kind", "amount"])), ("sum", (grouped.recorded, ["amount"])))
    found = resolve_columns(table.lance, "events", specs, groups=True)
    batch = groups.batch(GroupColumns.of(found.columns, found.udfs))
    for name in found.udfs:
        batch = batch.append_column(RUNS + name, pa.array([True] * batch.num_rows))
        batch = batch.append_column(CARRIED + name, pa.nulls(batch.num_rows, found.schema.field(name).type))
    with QueryComputer(found.columns, found.udfs) as computer:
        assert len(computer(batch).values) == batch.num_rows
        nothing = computer(batch.slice(0, 0)).values
    assert (len(nothing), nothing.type.names) == (0, ["joined", "sum"])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8), data=st.data())
def test_an_iterator_has_every_row_once_in_small_batches(
    lengths: list[int], data: st.DataObject, tmp_path_factory: Any
) -> None:
    keys = data.draw(st.permutations([key for key, length in enumerate(lengths) for _ in range(length)]))
    made = make_table(tmp_path_factory.mktemp("many"), [(key, "", at) for at, key in enumerate(keys)])
    most: list[int] = []

    @udf(data_type=pa.list_(pa.int64()), input_columns=["amount"])
    def listed(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
        for batch in batches:
            most.append(batch.num_rows)
            yield from batch["amount"].to_pylist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GENEVA_TASK_MEMORY_BYTES", "1024")
        found = Grouped(made).evaluate({"rows": listed})["rows"].to_pylist()
    assert found == [[at for at, key in enumerate(keys) if key == group] for group in range(len(lengths))]
    assert max(most) <= 32


def test_small_groups_are_read_together(tmp_path: Path) -> None:
    made = make_table(tmp_path, [(key, "", key) for key in range(100)])
    reads: list[int] = []

    class Counting(SourceRows):
        def take(self, row_ids: npt.NDArray[np.int64], columns: Sequence[str]) -> pa.RecordBatch:
            reads.append(len(row_ids))
            return super().take(row_ids, columns)

    groups = Grouped(made)
    rows = Counting(made.location, made.lance.version, (("amount", "descending"),))
    assert SourceRows.of_document(json.loads(json.dumps(rows.to_document()))) == SourceRows(**vars(rows))
    bounds = pa.array(np.arange(101), pa.int64())
    batch = pa.record_batch({group_calls.GROUP_ROWS: pa.LargeListArray.from_arrays(bounds, pa.array(groups.ids))})
    with open_batch_mapper(grouped.joined_batches.of_groups, ["kind", "amount"], source=rows) as mapper:
        assert mapper(batch).values.to_pylist() == [str(key) for key in range(100)]
    assert sum(reads) == 100
    assert len(reads) < 5


def test_a_marked_function_is_found_and_sent_as_such() -> None:
    marked = grouped.joined_arrays.of_groups
    assert marked.of_groups is marked
    assert (marked.import_path, marked.code_version) == (
        "tests.udfs_for_tests.grouped:joined_arrays",
        grouped.joined_arrays.code_version,
    )
    definition = UdfDefinition.from_json(marked.definition(["kind", "amount"]).to_json())
    assert (definition.form, definition.groups) == ("scalar", "array")
    assert find_udf(definition, "db", "column 'n'", "") == marked
    assert load_udf("tests.udfs_for_tests.grouped:joined_arrays").groups is None
    assert UdfReference.of(marked).open().groups == "array"


def test_a_marked_function_without_a_module_is_found_and_sent_as_such(tmp_path: Path) -> None:
    @udf(data_type=pa.int64())
    def local(amount: list[int]) -> int:
        return sum(amount)

    give_udf(local.of_groups, str(tmp_path), "column 'n'")
    definition = local.of_groups.definition(["amount"])
    assert find_udf(definition, str(tmp_path), "column 'n'", "").groups == "scalar"
    sent = pickle.loads(pickle.dumps(UdfReference.of(local.of_groups))).open()
    assert (sent.groups, sent.import_path, sent.code_version) == ("scalar", None, local.code_version)


def scalar_of_texts(kind: str) -> int:
    return len(kind)


def of_float_arrays(kind: pa.DoubleArray) -> int:
    return len(kind)


def to_arrays(kind: pa.StringArray) -> pa.Int64Array:
    return pc.utf8_length(kind)


async def async_batches(batches: Iterator[pa.RecordBatch]) -> int:
    return 0


def of_two(batches: Iterator[pa.RecordBatch], other: Iterator[pa.RecordBatch]) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "settings_", "message"),
    [
        (scalar_of_texts, {}, "takes str there, and gets the values of all rows of a group, each of type string.*list"),
        (of_float_arrays, {}, "Type mismatch for column 'kind'.*takes DoubleArray there"),
        (to_arrays, {}, "annotated to return a Int64Array, and is called once per group"),
        (async_batches, {"input_columns": ["kind"]}, "is async and takes an iterator"),
        (of_float_arrays, {"batch_by": "kind"}, "has batch_by, which is for calls on batches"),
    ],
)
def test_a_function_that_does_not_fit_groups_is_refused(
    table: Table, function: Any, settings_: dict[str, Any], message: str
) -> None:
    made = udf(data_type=pa.int64(), **settings_)(function)
    with pytest.raises(InvalidInput, match=message):
        resolve_columns(table.lance, "events", (("n", (made, ["kind"])),), groups=True)


def test_an_iterator_of_batches_is_the_only_parameter() -> None:
    with pytest.raises(InvalidInput, match=r"Give it one Iterator\[pa.RecordBatch\] parameter"):
        udf(data_type=pa.int64())(of_two)


@pytest.mark.parametrize("function", [grouped.joined_batches, grouped.doubled_arrays], ids=lambda one: one.name)
def test_a_function_that_only_takes_groups_computes_no_column(table: Table, function: UDF) -> None:
    inputs = ["kind", "amount"] if function is grouped.joined_batches else ["amount"]
    with pytest.raises(InvalidInput, match=r"so cannot compute a value for each row.*group_by\(...\).agg"):
        table.add_columns({"n": (function, inputs)})
    with pytest.raises(InvalidInput, match="so cannot compute a value for each row"):
        table.query().add_columns({"n": (function, inputs)}).output_schema()


def test_the_inputs_of_a_function_are_columns_of_the_source_whatever_the_query_calls_its_own(table: Table) -> None:
    found = Grouped(table).evaluate({"amount": "count(*)", "total": (grouped.total, ["amount"])})
    assert found.to_pydict() == {"amount": [3, 2, 1], "total": [16, 1, 4]}
    with pytest.raises(InvalidInput, match=r"takes \['n'\], and there is no column \['n'\] in table"):
        resolve_columns(table.lance, "events", (("n", "count(*)"), ("total", (grouped.total, ["n"]))), groups=True)


def test_only_the_inputs_of_running_functions_are_read(table: Table) -> None:
    specs = (("n", "count(*)"), ("total", (grouped.total, ["amount"])), ("joined", (grouped.joined_batches, ["kind"])))
    found = resolve_columns(table.lance, "events", specs, groups=True)
    assert list(GroupColumns.of(found.columns, ["total"]).projection.values()) == ["`amount`"]
    assert GroupColumns.of(found.columns, ["joined"]).projection == {}
    assert isinstance(table.lance, lance.LanceDataset)
