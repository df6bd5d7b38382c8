"""A program that knows only Lance's namespace specification has columns and views computed by this package."""

from __future__ import annotations

import base64
import json
import runpy
import time
from pathlib import Path
from typing import Any

import lance
import lance_namespace
import pyarrow as pa
import pytest
from lance_namespace import (
    AlterTableBackfillColumnsRequest,
    CreateMaterializedViewRequest,
    DescribeTableRequest,
    DescribeTransactionRequest,
    LanceNamespace,
    ListTablesRequest,
    RefreshMaterializedViewRequest,
    errors,
)

import airflow_geneva
from airflow_geneva import connect_namespace, udf
from airflow_geneva.namespace import check_view, read_query
from tests.udfs_for_tests import grouped, samples

COUNTED = "tests.udfs_for_tests.samples:length"


@pytest.fixture
def catalog(tmp_path: Path) -> LanceNamespace:
    """A namespace with a table of six texts, and a column `n` of it that is not computed yet."""
    rows = pa.table({"id": pa.array(range(6), pa.int64()), "text": ["a", "bb", "ccc", "", "eeeee", "f"]})
    table = connect_namespace("dir", {"root": str(tmp_path)}).create_table("docs", rows, max_rows_per_file=2)
    table.add_columns({"n": (samples.length, ["text"])})
    return connect(tmp_path)


def connect(folder: Path, runner: str = "inline") -> LanceNamespace:
    properties = {"impl": "dir", "root": str(folder), "runner": runner}
    return lance_namespace.connect("airflow_geneva.namespace.GenevaNamespace", properties)


def wait_for(catalog: LanceNamespace, *parts: str) -> dict[str, str]:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = catalog.describe_transaction(DescribeTransactionRequest(id=list(parts)))
        if found.status not in ("Queued", "Running"):
            return {"status": found.status, **(found.properties or {})}
        time.sleep(0.05)
    raise TimeoutError(parts)


def values(catalog: LanceNamespace, table: str, column: str) -> list[Any]:
    rows = lance.dataset(namespace_client=catalog, table_id=[table]).to_table()
    return [row[column] for row in sorted(rows.to_pylist(), key=lambda row: row["id"])]


def backfill(catalog: LanceNamespace, column: str = "n", **asked: Any) -> str:
    request = AlterTableBackfillColumnsRequest(id=["docs"], column=column, **asked)
    return str(catalog.alter_table_backfill_columns(request).job_id)


def query(**given: Any) -> str:
    return json.dumps({"source": "docs", **given})


def create(catalog: LanceNamespace, source_query: str, kind: str = "query", **asked: Any) -> Any:
    given = {"id": ["long"], "kind": kind, "source_query": source_query, "output_schema": "", **asked}
    return catalog.create_materialized_view(CreateMaterializedViewRequest(**given))


@pytest.mark.parametrize("runner", ["inline", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_column_is_backfilled_and_its_job_is_followed(
    catalog: LanceNamespace, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    if runner == "spark":
        request.getfixturevalue("spark")
    catalog = connect(tmp_path, runner)
    job_id = backfill(catalog, where="id < 4", num_frags=1, task_size=2)
    done = wait_for(catalog, job_id)
    assert (done["status"], done["target"], done["rows_computed"], done["rows_left"]) == (
        "Succeeded",
        "docs.n",
        "2",
        "2",
    )
    assert values(catalog, "docs", "n") == [1, 2, None, None, None, None]
    assert wait_for(catalog, "docs", backfill(catalog))["rows_computed"] == "4"
    assert values(catalog, "docs", "n") == [1, 2, 3, 0, 5, 1]


def test_all_other_operations_are_those_of_the_namespace(catalog: LanceNamespace, tmp_path: Path) -> None:
    assert catalog.list_tables(ListTablesRequest(id=[])).tables == ["docs"]
    assert catalog.describe_table(DescribeTableRequest(id=["docs"])).location == str(tmp_path / "docs.lance")
    assert "DirectoryNamespace" in catalog.namespace_id()
    with pytest.raises(errors.TableNotFoundError):
        catalog.describe_table(DescribeTableRequest(id=["other"]))


def test_a_view_is_created_and_refreshed(catalog: LanceNamespace) -> None:
    select = {"id": "id", "twice": "id * 2", "n": [COUNTED, ["text"]]}
    schema = pa.schema([("id", pa.int64()), ("twice", pa.int64()), ("n", pa.int64())])
    asked = query(select=select, where="length(text) > 0")
    created = create(catalog, asked, output_schema=base64.b64encode(schema.serialize()).decode(), with_no_data=False)
    assert wait_for(catalog, created.job_id)["status"] == "Succeeded"
    assert values(catalog, "long", "n") == [1, 2, 3, 5, 1]
    lance.dataset(namespace_client=catalog, table_id=["docs"]).insert(pa.table({"id": [9], "text": ["nine"]}))
    refreshed = catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=["long"], source_task_size=1))
    assert wait_for(catalog, "long", refreshed.job_id)["rows_computed"] == "1"
    assert values(catalog, "long", "twice") == [0, 2, 4, 8, 10, 18]


def test_a_query_groups_rows_or_leaves_out_duplicates(catalog: LanceNamespace, tmp_path: Path) -> None:
    """Of a database in a folder: a namespace, which would have to name their hidden tables, refuses such views."""
    wait_for(catalog, backfill(catalog))
    agg = {"ids": "count(*)", "m": [f"{grouped.__name__}:joined_lists", ["text", "id"]]}
    groups = query(where="id <> 1", group_by=["n"], agg=agg, order_by=["text desc"], max_group_rows=5)
    clean = query(deduplicate={"on": "n", "keep": "max(id)"}, select={"id": "id"})
    uri = str(next(tmp_path.rglob("docs.lance")))
    folder = airflow_geneva.connect(Path(uri).parent)
    rows = read_query(folder, groups).to_arrow().to_pylist()
    assert sorted(map(tuple, map(dict.values, rows))) == [
        (0, 1, "3"),
        (1, 2, "f5 a0"),
        (3, 1, "ccc2"),
        (5, 1, "eeeee4"),
    ]
    assert read_query(folder, clean).to_arrow()["id"].to_pylist() == [1, 2, 3, 4, 5]
    for asked in (groups, clean):
        given = {"id": ["v"], "kind": "query", "source_query": asked, "output_schema": ""}
        check_view(folder, "v", CreateMaterializedViewRequest(**given))
        with pytest.raises(errors.InvalidInputError, match="its database is a catalog"):
            create(catalog, asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"cluster": "c", "manifest": "m"}, r"fields \['cluster', 'manifest'\] of the request have no counterpart"),
        ({"where": "nonsense >"}, "The filter 'nonsense >' is not valid"),
        ({"read_version": 99}, "Version 99 of the table does not exist"),
        ({"num_frags": 0}, "num_frags"),
        ({"column": "text"}, "Column 'text' of table 'docs' has no UDF"),
        ({"branch": "b"}, r"\['branch'\]"),
    ],
)
def test_a_backfill_that_cannot_be_had_is_refused_by_name(
    catalog: LanceNamespace, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        backfill(catalog, **asked)


@pytest.mark.parametrize("asked", [{"output_limit": 3}, {"cluster": "c"}, {"manifest": "m"}])
def test_a_refresh_that_cannot_be_had_is_refused_by_name(catalog: LanceNamespace, asked: dict[str, Any]) -> None:
    """`output_limit` caps the rows of a view after `explode`, and a query with `explode` has no limit here."""
    create(catalog, query())
    with pytest.raises(errors.InvalidInputError, match=rf"fields \['{next(iter(asked))}'\] of the request have no"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=["long"], **asked))


def test_a_view_of_lancedb_is_refused_by_name(catalog: LanceNamespace, tmp_path: Path) -> None:
    stored = json.dumps({"format": 1, "kind": "query", "query": "SELECT id FROM docs"})
    table = connect_namespace("dir", {"root": str(tmp_path)}).open_table("docs")
    table.lance.update_schema_metadata({"mv.definition": stored})
    with pytest.raises(errors.InvalidInputError, match=r"a materialized view of LanceDB \(SELECT id FROM docs\), and"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=["docs"]))


def test_a_view_that_exists_is_not_created_again(catalog: LanceNamespace) -> None:
    create(catalog, query())
    with pytest.raises(errors.TableAlreadyExistsError, match="There is a table or view 'long' already"):
        create(catalog, query())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"source_query": "SELECT id FROM docs"}, "is not a query of this package. Give a JSON object"),
        ({"source_query": query(sort_by="id")}, "is not a query of this package"),
        ({"source_query": query(order_by=["id"])}, "order_by is about groups of rows"),
        ({"source_query": query(group_by="n")}, "group_by='n' is no JSON list of columns"),
        ({"source_query": query(group_by=["n"], agg={"x": "id"})}, "is not an aggregate of a group's rows"),
        ({"source_query": query(deduplicate={"on": "n", "by": 1})}, 'give "on" by name'),
        ({"source_query": query(select={"n": ["os:system", ["text"]]})}, r"UDF 'os:system' cannot be loaded"),
        ({"source_query": query(select={"n": "os:system"})}, "Give SQL, or a UDF with its inputs"),
        ({"source_query": query(select={"n": "nothing + 1"})}, "nothing"),
        ({"source_query": query(), "kind": "chunker"}, "does not fit: 'explode' of the query makes a 'chunker'"),
        ({"source_query": query(), "kind": "udtf"}, "Views here have no table functions"),
        ({"source_query": query(), "auto_refresh": True}, "auto_refresh is not known here"),
        ({"source_query": query(), "output_schema": "eA=="}, "no Arrow schema in base64"),
        (
            {
                "source_query": query(select={"id": "id"}),
                "output_schema": base64.b64encode(pa.schema([("id", pa.int8())]).serialize()).decode(),
            },
            r"whose columns are id \(int64\), and not id \(int8\)",
        ),
    ],
)
def test_a_view_that_cannot_be_had_is_refused_by_name(
    catalog: LanceNamespace, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        create(catalog, **asked)
    assert catalog.list_tables(ListTablesRequest(id=[])).tables == ["docs"]


def test_errors_are_those_of_the_specification(catalog: LanceNamespace) -> None:
    with pytest.raises(errors.TableNotFoundError, match="There is no table 'other'"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=["other"]))
    with pytest.raises(errors.InvalidInputError, match="'docs' is a table and not a view"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=["docs"]))
    with pytest.raises(errors.InvalidInputError, match="its id is empty"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=[]))
    with pytest.raises(errors.TransactionNotFoundError):
        catalog.describe_transaction(DescribeTransactionRequest(id=["docs", "no-such-job"]))


def test_a_job_that_fails_says_why(catalog: LanceNamespace, tmp_path: Path) -> None:
    table = connect_namespace("dir", {"root": str(tmp_path)}).open_table("docs")

    @udf(data_type=pa.int64(), name="failing", version="1")
    def failing(text: str) -> int:
        raise RuntimeError("told to")

    table.add_columns({"bad": failing})
    failed = wait_for(catalog, backfill(catalog, "bad"))
    assert failed["status"] == "Failed"
    assert "told to" in failed["error"]


def test_the_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    table = connect_namespace("dir", {"root": "library"}).create_table("docs", pa.table({"text": ["a", "bb"]}))
    table.add_columns({"n": (samples.length, ["text"])})
    runpy.run_path(str(Path(__file__).parents[2] / "docs" / "snippets" / "namespace.py"))
    assert "1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [{"select": 5}, {"select": ["id"]}, {"select": "id"}, {"group_by": ["n"], "agg": "n"}]
)
def test_a_query_whose_columns_are_no_object_is_refused(catalog: LanceNamespace, given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError, match="is no JSON object that maps columns"):
        create(catalog, query(**given))
