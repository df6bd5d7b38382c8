"""Errors: raised before any work, saying what was asked, what was found, and what to do."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from email.message import Message
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import lance
import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.checkpoint.facts import Fact, append_ledger
from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.engine.lance_io.fragments import ids_by_name
from airflow_geneva.engine.lance_io.siblings import Sibling
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.errors import GenevaError, InvalidInput, JobFailed, StorageError
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace, triple, triple_row
from tests.support.invariants import assert_untouched
from tests.support.processes import as_another_process
from tests.udfs_for_tests import samples

MakeTable = Callable[..., Table]


@udf(data_type=pa.int64(), version="1")
def plus_one(x: int) -> int:
    return x + 1


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(100, s=pa.array([{"a": 1}] * 100))
    made.add_columns({"y": triple})
    return made


def assert_refused(table: Table, trace: Trace, parts: list[str], action: Callable[[], Any]) -> None:
    """The action is refused with a message that holds all parts, and nothing was started."""
    version, jobs = table.version, read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))
    with pytest.raises(GenevaError) as caught:
        action()
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert re.search(r"\. ?$|\.$|\)$", message), "a message ends as a sentence"
    assert "/rust/" not in message
    assert (
        table.version,
        len(trace),
        read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints)),
    ) == (version, 0, jobs)


def test_an_unknown_table_is_named_with_those_there_are(table: Table, trace: Trace, tmp_path: Path) -> None:
    parts = ["There is no table 'nosuch'", "Tables: docs", "db.create_table('nosuch', data)"]
    assert_refused(table, trace, parts, lambda: connect(tmp_path / "db").open_table("nosuch"))


@pytest.mark.parametrize("name", ["Docs", "doc", "docs.lance"])
def test_a_table_of_almost_that_name_is_suggested(table: Table, trace: Trace, tmp_path: Path, name: str) -> None:
    parts = ["Did you mean 'docs'?", f"db.create_table('{name}', data)"]
    assert_refused(table, trace, parts, lambda: connect(tmp_path / "db").open_table(name))


def test_a_database_that_is_not_there_has_no_tables(table: Table, trace: Trace, tmp_path: Path) -> None:
    db = connect(tmp_path / "nowhere")
    assert db.table_names() == []
    assert_refused(table, trace, ["There is no table 'docs'", "Tables: none"], lambda: db.open_table("docs"))


def test_a_table_that_exists_is_not_made_again(table: Table, trace: Trace, tmp_path: Path) -> None:
    parts = ["Table 'docs' already exists", "db.open_table('docs')"]
    assert_refused(table, trace, parts, lambda: connect(tmp_path / "db").create_table("docs", pa.table({"x": [1]})))


def test_an_unknown_column_is_named_with_those_there_are(table: Table, trace: Trace) -> None:
    parts = ["Column 'n' is not defined in table 'docs'", "id, x, s, y", 'table.add_columns({"n": udf})']
    assert_refused(table, trace, parts, lambda: table.backfill("n", runner="inline"))


def test_a_column_without_a_udf_says_so(table: Table, trace: Trace) -> None:
    parts = ["Column 'x' of table 'docs' has no UDF", "table.add_columns()"]
    assert_refused(table, trace, parts, lambda: table.backfill("x", runner="inline"))


@pytest.mark.parametrize("version", [99, 0, -1])
def test_an_unknown_version_is_named_with_the_newest(table: Table, trace: Trace, version: int) -> None:
    parts = [f"ersion {version} ", "versions up to 2", "leave it out to read the newest"]
    assert_refused(table, trace, parts, lambda: table.backfill("y", read_version=version, runner="inline"))


def test_a_missing_input_is_named_with_the_columns_there_are(table: Table, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def needs(body: str) -> int:
        return len(body)

    parts = ["'needs' expects input columns ['body']", "not found in table 'docs'", "['id', 'x', 's', 'y']", "Map"]
    assert_refused(table, trace, parts, lambda: table.add_columns({"n": needs}))


def test_an_input_that_was_dropped_since_is_named(table: Table, trace: Trace) -> None:
    table.lance.drop_columns(["x"])
    parts = ["expects input columns ['x']", "not found in table 'docs'"]
    assert_refused(table, trace, parts, lambda: table.backfill("y", runner="inline"))


def test_a_field_that_a_struct_does_not_have_is_named(table: Table, trace: Trace) -> None:
    parts = ["expects input columns ['s.none']", "not found in table 'docs'"]
    assert_refused(table, trace, parts, lambda: table.add_columns({"n": (triple, ["s.none"])}))


def test_an_input_of_another_type_is_refused(table: Table, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def needs(x: str) -> int:
        return len(x)

    parts = ["Type mismatch for column 'x' of table 'docs'", "it is int64", "'needs' takes str"]
    assert_refused(table, trace, parts, lambda: table.add_columns({"n": needs}))


def test_an_output_of_another_type_is_refused(table: Table, trace: Trace) -> None:
    @udf(data_type=pa.string(), version="1")
    def text(x: int) -> str:
        return str(x)

    parts = ["Type mismatch for column 'y' of table 'docs'", "it is int64", "'text' gives string", "{'y_2': udf}"]
    assert_refused(table, trace, parts, lambda: table.backfill("y", udf=text, runner="inline"))
    assert_refused(table, trace, parts, lambda: table.alter_columns({"y": text}))


def test_a_column_that_exists_is_not_added_again(table: Table, trace: Trace) -> None:
    parts = ["already has columns ['y']", "table.alter_columns(...)"]
    assert_refused(table, trace, parts, lambda: table.add_columns({"y": triple, "z": triple}))
    assert "z" not in table.schema.names


def test_a_plain_function_is_not_a_udf(table: Table, trace: Trace) -> None:
    parts = ["Column 'n' needs a UDF, got function", "@udf"]
    assert_refused(table, trace, parts, lambda: table.add_columns({"n": lambda x: x}))  # type: ignore[dict-item]


def test_columns_in_another_form_are_refused(table: Table, trace: Trace) -> None:
    given: Any
    for given in ((triple,), (triple, ["x"], 1), (triple, 5), (triple, [["x"]])):
        parts = ["Column 'n' got a tuple", '(my_udf, ["body"])']
        assert_refused(table, trace, parts, lambda given=given: table.add_columns({"n": given}))
    parts, given = ["by name", "not as a list"], ["y"]
    assert_refused(table, trace, parts, lambda: table.add_columns(given))
    assert_refused(table, trace, parts, lambda: table.alter_columns(given))


def test_errors_of_a_column_that_never_was_are_refused(table: Table, trace: Trace) -> None:
    parts = ["Table 'docs' has no columns ['typo']", "It has: "]
    assert_refused(table, trace, parts, lambda: table.get_errors(column_name="typo"))
    assert table.get_errors(column_name="y") == []
    assert_refused(table, trace, ["no job 'typo' of table 'docs'"], lambda: table.get_errors(job_id="typo"))


def test_too_generic_annotations_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"Cannot validate generic pa.Array"):

        @udf
        def anything(x: pa.Array) -> pa.Array:
            return x


def test_a_filter_is_refused_with_the_engines_message(table: Table, trace: Trace) -> None:
    parts = ["The filter 'nosuch > 3' is not valid", "No field named nosuch", "as after WHERE in SQL"]
    assert_refused(table, trace, parts, lambda: table.backfill("y", where="nosuch > 3", runner="inline"))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"batch_size": 0}, ["batch_size=0 is not valid", "at least 1"]),
        ({"checkpoint_size": -5}, ["checkpoint_size=-5 is not valid"]),
        ({"shard_size": 1.5}, ["shard_size=1.5 is not valid"]),
        ({"concurrency": True}, ["concurrency=True is not valid"]),
        ({"concurrency": None}, ["concurrency=None is not valid"]),
        ({"task_size": "many"}, ["task_size='many' is not valid"]),
        ({"checkpoint_interval": -1}, ["checkpoint_interval=-1 is not valid", "at least 0"]),
        ({"checkpoint_interval": float("nan")}, ["checkpoint_interval=nan is not valid"]),
        ({"checkpoint_cost": -0.5}, ["checkpoint_cost=-0.5 is not valid", "at least 0"]),
        ({"commit_granularity": 0}, ["commit_granularity=0"]),
        ({"min_checkpoint_size": 10, "max_checkpoint_size": 5}, ["min_checkpoint_size=10", "5 rows"]),
        ({"num_gpus": -1}, ["num_gpus=-1 is not valid", "at least 0"]),
        ({"memory": "much"}, ["memory='much': give bytes above 0"]),
        ({"on_error": "skip"}, ["'on_error' belongs to the function", "@udf(on_error=...)"]),
        ({"batchsize": 3}, ["There is no parameter 'batchsize'", "batch_size"]),
    ],
)
def test_nonsense_sizes_are_refused(table: Table, trace: Trace, sizes: dict[str, Any], parts: list[str]) -> None:
    assert_refused(table, trace, parts, lambda: table.backfill("y", runner="inline", **sizes))


def test_an_unknown_runner_and_an_unknown_answer_to_changed_code_are_refused(table: Table, trace: Trace) -> None:
    assert_refused(table, trace, ["'local'", "'spark'", "'inline'"], lambda: table.backfill("y", runner="local"))
    action = lambda: table.backfill("y", on_code_change="ignore", runner="inline")  # noqa: E731
    assert_refused(table, trace, ["'ignore'", "error", "recompute", "new_rows"], action)


IMPORTS = """
import sys
from airflow_geneva import connect
connect(sys.argv[1]).open_table("docs").backfill("n", runner="inline")
"""
MODULE = """
import pyarrow as pa
from airflow_geneva import udf

@udf(data_type=pa.int64())
def grow(x: int) -> int:
    return x + 1
"""


@pytest.mark.slow
def test_a_udf_that_this_process_cannot_import_says_where_it_looked(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "only_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    table.add_columns({"n": importlib.import_module("only_here").grow})
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "db")]
    away = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert away.returncode == 1
    for part in ("UDF 'only_here:grow' cannot be loaded", "importing module 'only_here'", "looked in", sys.prefix):
        assert part in away.stderr


def test_a_udf_of_another_notebook_has_to_be_handed_over(table: Table, trace: Trace) -> None:
    local = udf(data_type=pa.int64(), version="1", name="local")(lambda x: x)
    table.add_columns({"n": local})
    as_another_process()
    parts = ["The UDF 'local' of column 'n'", "table.backfill('n', udf=...)", "move it to a module"]
    assert_refused(table, trace, parts, lambda: table.backfill("n", runner="inline"))
    assert table.backfill("n", udf=local, runner="inline").rows_computed == 100


def run_broken(table: Table, function: Any) -> JobFailed:
    broken = udf(data_type=pa.int64(), version="1", name="broken")(function)
    table.add_columns({"b": broken})
    with pytest.raises(JobFailed) as caught:
        table.backfill("b", udf=broken, runner="inline")
    assert_untouched(table, "b", "true")
    assert caught.value.result is not None
    assert (caught.value.result.state, caught.value.result.commits) == ("FAILED", ())
    (record,) = read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))
    assert (record.state, record.id) == ("FAILED", caught.value.result.job_id)
    assert record.error is not None
    assert record.error in str(caught.value)
    return caught.value


def test_a_udf_that_raises_names_the_row_its_input_types_and_its_own_words(table: Table) -> None:
    def broken(x: int) -> int:
        return 1 // (x - 30)

    message = str(run_broken(table, broken))
    for part in (
        "Backfill of docs.b failed",
        "row 5 of fragment 1",
        "ZeroDivisionError",
        "x: int64",
        "return 1 // (x - 30)",
        "The same input fails again: correct the function, and run the new code, with continue_from=",
        "@udf(on_error=[Skip(ZeroDivisionError)])",
        "Computed rows are kept in checkpoints.",
    ):
        assert part in message
    assert "run it again" not in message
    [record] = table.get_errors()
    assert (record.exception, record.message) == ("builtins.ZeroDivisionError", "integer division or modulo by zero")
    assert "return 1 // (x - 30)" in record.traceback


def test_a_udf_that_trips_over_none_is_said_to_get_null(table: Table) -> None:
    table.add(pa.table({"x": pa.nulls(1, pa.int64())}))

    def broken(x: int) -> int:
        return x + 1

    advice = str(run_broken(table, broken)).splitlines()[1]
    assert advice.startswith("Its input 'x' is NULL, which the function gets as None: let it return None then,")
    assert 'where="x IS NOT NULL"' in advice


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionError("refused"), True),
        (TimeoutError(), True),
        (OSError("no route"), True),
        (FileNotFoundError("no model"), False),
        (HTTPError("http://x", 503, "busy", Message(), None), True),
        (HTTPError("http://x", 404, "gone", Message(), None), False),
        (type("RateLimitError", (Exception,), {})(), True),
        (ValueError("no"), False),
    ],
)
def test_advice_tells_what_may_pass_from_what_fails_again(table: Table, error: Exception, passing: bool) -> None:
    def broken(x: int) -> int:
        raise error

    advice = str(run_broken(table, broken)).splitlines()[1]
    assert ("This may pass: run it again" in advice) == passing
    assert ("fails again: correct the function" in advice) != passing


def test_a_null_inside_of_a_struct_is_named(table: Table) -> None:
    table.add(pa.table({"x": [1], "s": pa.array([{"a": None}], pa.struct([("a", pa.int64())]))}))

    def broken(s: dict[str, int]) -> int:
        return s["a"] + 1

    assert "Its input 's.a' is NULL" in str(run_broken(table, broken))


def test_credentials_in_an_exception_are_kept_nowhere(table: Table) -> None:
    @udf(data_type=pa.int64(), version="1", on_error="skip")
    def leaking(x: int) -> int:
        raise ConnectionError(f"https://bob:{'hunter'}2@host/{x}?sig=s3cr3t")

    table.add_columns({"b": leaking})
    assert table.backfill("b", udf=leaking, runner="inline").rows_failed == 100
    shown = "".join([*map(str, table.get_errors()), str(table.plan_backfill("b", udf=leaking).estimate(sample=3))])
    files = b"".join(path.read_bytes() for path in Path(table.location.checkpoints.root).rglob("*") if path.is_file())
    for secret in ("hunter2", "s3cr3t"):
        assert secret not in shown
        assert secret.encode() not in files


@pytest.mark.parametrize(
    ("wrong", "said"), [(lambda x: x[1:], "Expected length: 25. Got: 24"), (lambda x: 3, "Got: int.")]
)
def test_an_output_of_a_batch_that_does_not_fit_names_the_rows_and_both(
    table: Table, wrong: Callable[[Any], Any], said: str
) -> None:
    def broken(x: pa.Int64Array) -> pa.Int64Array:
        return wrong(x)

    message = str(run_broken(table, broken))
    assert "The same input fails again: correct the function" in message
    assert "run it again" not in message
    for part in ("rows 0 to 25 of fragment 0", "'broken'", said, "x: int64"):
        assert part in message


def test_an_output_of_the_wrong_type_names_the_row_and_both_types(table: Table) -> None:
    def broken(x):  # type: ignore[no-untyped-def]
        return "seven" if x == 7 else x

    message = str(run_broken(table, broken))
    for part in ("row 7 of fragment 0", "'broken'", "int64", "str 'seven'"):
        assert part in message


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_a_coroutine_that_a_plain_function_returns_is_to_be_awaited(table: Table) -> None:
    async def ask(x: int) -> int:
        return x

    def broken(x):  # type: ignore[no-untyped-def]
        return ask(x)

    message = str(run_broken(table, broken))
    assert "row 0 of the batch: it is a coroutine: define the function with `async def`, and `await` it" in message


def test_a_generator_computes_a_list() -> None:
    with pytest.raises(InvalidInput, match=r"'parts' is a generator.*data_type=pa\.list_\("):

        @udf(data_type=pa.int64())
        def parts(x: int):  # type: ignore[no-untyped-def]
            yield x


def test_a_udf_whose_setup_fails_says_so(table: Table) -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no model here")

        def __call__(self, x: int) -> int:
            return x

    assert "no model here" in str(run_broken(table, Broken))


def test_what_was_committed_before_a_failure_is_reported(make_table: MakeTable, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def breaks(x: int) -> int:
        leave_trace([x])
        if x == 60:
            raise ValueError("sixty")
        return x

    table = make_table(100)
    table.add_columns({"y": breaks})
    with pytest.raises(JobFailed) as caught:
        table.backfill("y", udf=breaks, runner="inline", shard_size=1)
    result = caught.value.result
    assert result is not None
    assert (result.state, result.rows_computed, result.rows_failed, result.rows_left) == ("FAILED", 50, 1, 49)
    assert len(result.commits) == 2
    assert result.version == table.version
    (record,) = read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))
    assert record.rows_computed == 50


def test_a_store_that_cannot_be_written_is_refused_before_any_row_runs(table: Table, trace: Trace) -> None:
    blocked = Path(table.location.checkpoints.root)
    blocked.write_text("a file where the folder should be")
    with pytest.raises((StorageError, JobFailed), match=r"Cannot .*_checkpoints"):
        table.backfill("y", runner="inline")
    assert len(trace) == 0


def test_a_table_that_vanishes_while_it_is_computed_fails_the_job_in_words(make_table: MakeTable) -> None:
    table = make_table(50)

    @udf(data_type=pa.int64(), version="1")
    def vanish(x: int) -> int:
        shutil.rmtree(table.uri, ignore_errors=True)
        return x

    table.add_columns({"y": vanish})
    with pytest.raises(Exception, match=r"docs"):
        table.backfill("y", udf=vanish, runner="inline", checkpoint_size=5)


def test_every_udf_form_reports_the_same_way(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(10)
    table.add_columns({"a": triple, "b": triple_row})
    results = [table.backfill(column, runner="inline") for column in ("a", "b")]
    assert [(r.state, r.rows_computed, r.rows_skipped) for r in results] == [("DONE", 10, 0)] * 2


@pytest.mark.parametrize("name", ["", " ", "_rowid", "_row_anything", "_distance", "a.b", "a`b"])
def test_a_column_name_that_would_break_the_table_is_refused(tmp_path: Path, name: str) -> None:
    table = connect(tmp_path / "db").create_table("docs", pa.table({"x": [1]}))
    with pytest.raises(InvalidInput, match="cannot be the name of a column"):
        table.add_columns({name: plus_one})
    assert table.schema.names == ["x"]


@pytest.mark.slow
def test_many_columns_are_defined_and_looked_through_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read the definitions of all others: 10.9 s for 2,000 columns, and 13.9 s for their failed rows.

    Each column with facts looked through the fields of all others: 7 of 13 s for 1,000 columns.
    """
    read = Counter[str]()
    schema, sibling, definition = lance.LanceDataset.lance_schema, Sibling.of, UdfDefinition.from_json

    def counted_schema(dataset: lance.LanceDataset) -> Any:
        read["schema"] += 1
        return schema.fget(dataset)  # type: ignore[attr-defined]

    def counted_sibling(metadata: object) -> Sibling | None:
        read["sibling"] += 1
        return sibling(metadata)

    def counted_definition(text: str | bytes) -> UdfDefinition | None:
        read["definition"] += 1
        return definition(text)

    monkeypatch.setattr(UdfDefinition, "from_json", counted_definition)
    monkeypatch.setattr(lance.LanceDataset, "lance_schema", property(counted_schema))
    monkeypatch.setattr(Sibling, "of", counted_sibling)

    def reads(columns: int) -> Counter[str]:
        read.clear()
        table = connect(tmp_path / "db").create_table(f"docs_{columns}", pa.table({"x": [1]}))
        chain = ["x", *(f"c{number}" for number in range(columns))]
        table.add_columns({name: (samples.add_five, [given]) for given, name in pairwise(chain)})
        ids = ids_by_name(table.lance)
        for given, name in list(pairwise(chain))[::10]:
            fact = Fact("of no fragment", "1", None, 1, inputs=",".join(map(str, ids[given])))
            append_ledger(table.location.checkpoints, ids[name][0], "job", [fact])
        assert table.get_failed_row_addresses() == []
        assert table.history().column("version").to_pylist() == [2, 1]
        return Counter(read)

    few, many = reads(100), reads(800)
    assert many["schema"] == few["schema"]
    assert all(many[of] <= 8 * few[of] for of in ("sibling", "definition")), (few, many)
    assert min(few.values()) > 0
    table = connect(tmp_path / "db").open_table("docs_800")
    for given in ("c0", "c400", "c799"):
        with pytest.raises(InvalidInput, match=r"'c0' .* would be computed from itself"):
            table.alter_columns({"c0": (samples.add_five, [given])})
    again = {name: (samples.add_five, [given]) for name, given in (("d", "x"), ("e", "d"), ("f", "c799"))}
    table.add_columns(again)


def test_a_column_is_not_computed_from_itself_however_far_around(tmp_path: Path) -> None:
    table = connect(tmp_path / "db").create_table("docs", pa.table({"x": [1]}))
    table.add_columns({"y": plus_one})
    table.add_columns({"z": (plus_one, ["y"])})
    for column, inputs in (("y", ["y"]), ("y", ["z"])):
        with pytest.raises(InvalidInput, match=r"would be computed from itself.*other columns"):
            table.alter_columns({column: (plus_one, inputs)})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"where": 5}, "where=5 is not valid"),
        ({"read_version": True}, "read_version=True is not valid"),
        ({"run_after": "2020"}, "run_after='2020' is not valid"),
        ({"ignore_checkpoints": "no"}, "ignore_checkpoints='no' is not valid"),
        ({"errors_only": 1}, "errors_only=1 is not valid"),
        ({"max_failed": 1.5}, "max_failed=1.5 is not valid: give a number of rows"),
        ({"max_failed": -1}, "max_failed=-1 is not valid"),
        ({"max_failed": True}, "max_failed=True is not valid"),
        ({"recompute_mixed": "yes"}, "recompute_mixed='yes' is not valid"),
        ({"errors_only": True, "recompute_mixed": True}, "Give one of them"),
        ({"continue_from": ["v", 5]}, "continue_from=.* is not valid"),
        ({"continue_from": "v0"}, "no job of that version is recorded. Other versions .*: none"),
        ({"continue_from": "v0", "ignore_checkpoints": True}, "Give one of them"),
        ({"udf": len}, "is not a UDF"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(tmp_path: Path, asked: dict[str, object], wanted: str) -> None:
    table = connect(tmp_path / "db").create_table("docs", pa.table({"x": [1]}))
    table.add_columns({"y": plus_one})
    with pytest.raises(InvalidInput, match=wanted):
        table.backfill("y", runner="inline", **{"udf": plus_one, **asked})


def test_half_floats_are_compared_too(tmp_path: Path) -> None:
    @udf(data_type=pa.float16(), version="1")
    def half(h: pa.Array) -> pa.Array:
        return h

    data = pa.table({"id": [1, 2], "h": pa.array(np.array([0.5, 1.5], np.float16))})
    table = connect(tmp_path / "db").create_table("docs", data)
    table.add_columns({"y": half})
    table.backfill("y", udf=half, runner="inline")
    table.lance.update({"id": "7"}, "id = 1")
    assert table.plan_backfill("y", udf=half).rows_pending == 0
