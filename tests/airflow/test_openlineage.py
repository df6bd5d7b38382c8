"""What the OpenLineage provider is told when a backfill or a refresh has finished."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from airflow.providers.openlineage.extractors.base import DefaultExtractor
from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset, watched_lance_asset
from airflow_geneva.operators import FinishOperator
from airflow_geneva.operators._openlineage import dataset_name, lineage_of
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the provider's own extractor takes from every task that finishes a job."""
    found: list[Any] = []

    def listen(operator: FinishOperator, context: Any, result: Any = None) -> None:
        found.append(DefaultExtractor(operator).extract_on_complete(context["ti"]))

    monkeypatch.setattr(FinishOperator, "post_execute", listen)
    return found


def go(dag: DAG) -> None:
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors


def inputs(facet: Any, column: str) -> list[tuple[str, str, str]]:
    fields = facet.fields[column].inputFields
    return [(f.field, f.transformations[0].subtype, f.transformations[0].description or "") for f in fields]


def test_a_backfill_tells_which_columns_a_udf_made_its_column_of(desk: Desk, told: list[Any]) -> None:
    desk.append("ab")
    desk.define(n="weighed")
    planned = desk.table.version
    with DAG(f"lineage_{desk.table.name}", schedule=None) as dag:
        BackfillTaskGroup(table=desk.table.name, column="n", where="text < 'b'", inline_below_rows=10**9)
    go(dag)
    [lineage] = told
    [source], [made] = lineage.inputs, lineage.outputs
    assert (source.namespace, source.name) == ("file", desk.table.uri)
    assert (made.namespace, made.name) == (source.namespace, source.name)
    assert source.facets["version"].datasetVersion == str(planned)
    assert made.facets["version"].datasetVersion == str(desk.table.version)
    facet = made.facets["columnLineage"]
    assert inputs(facet, "n") == [("text", "TRANSFORMATION", "UDF geneva_dag_udfs:weighed, version 1")]
    assert [(f.field, f.transformations[0].type, f.transformations[0].subtype) for f in facet.dataset] == [
        ("text", "INDIRECT", "FILTER")
    ]
    assert made.outputFacets["outputStatistics"].rowCount == 10
    rows = lineage.run_facets["geneva_rows"]
    assert (rows.rows_run, rows.rows_computed, rows.rows_skipped, rows.rows_left) == (10, 10, 10, 0)
    assert [(a.assertion, a.success, a.column) for a in made.outputFacets["dataQualityAssertions"].assertions] == [
        ("between(0, 2)", False, "n"),
        ("satisfies(are_three)", True, "n"),
    ]
    assert [(f.name, f.type) for f in made.facets["schema"].fields] == [("text", "string"), ("n", "int64")]


def test_a_refresh_tells_what_each_column_of_the_view_is_made_of(desk: Desk, told: list[Any]) -> None:
    desk.append("a")
    udfs = importlib.import_module("geneva_dag_udfs")
    query = desk.table.query().where("text < 'b'")
    query = query.select({"text": "text", "big": "upper(text)"}).add_columns({"n": udfs.length})
    view = query.add_columns({"loud": (udfs.upper, ["text"])}).create_materialized_view(
        desk.database, f"lineage_of_{desk.table.name}"
    )
    with DAG(view.name, schedule=None) as dag:
        RefreshTaskGroup(view=view.name, inline_below_rows=10**9)
    go(dag)
    [lineage] = told
    [source], [made] = lineage.inputs, lineage.outputs
    assert (source.name, made.name) == (desk.table.uri, view.uri)
    facet = made.facets["columnLineage"]
    assert inputs(facet, "text") == [("text", "IDENTITY", "")]
    assert inputs(facet, "big") == [("text", "TRANSFORMATION", "SQL upper(text)")]
    assert inputs(facet, "n") == [("text", "TRANSFORMATION", "UDF geneva_dag_udfs:length, version 1")]
    assert inputs(facet, "loud") == [("text", "TRANSFORMATION", "UDF geneva_dag_udfs:upper, version 1")]
    assert made.outputFacets["outputStatistics"].rowCount == 10


def test_an_asset_of_a_users_own_task_is_the_table_that_its_connection_leads_to(desk: Desk) -> None:
    from airflow.providers.openlineage.utils.utils import translate_airflow_asset

    for asset in (lance_asset(desk.table.name), watched_lance_asset(desk.table.name, poll_interval=5)):
        found = translate_airflow_asset(asset, None)
        assert (found.namespace, found.name) == ("file", desk.table.uri)
    assert translate_airflow_asset(lance_asset("docs", "no_such_connection"), None) is None


def test_nothing_is_told_before_a_job_ends_or_without_the_provider(
    monkeypatch: pytest.MonkeyPatch, told: list[Any], desk: Desk
) -> None:
    with DAG("untold", schedule=None):
        operator = FinishOperator(task_id="finish", plan_task_id="plan", table="docs")
    assert operator.get_openlineage_facets_on_complete(None) is None
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage.extractors", None)
    assert lineage_of(None, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("/data/db/docs.lance", ("file", "/data/db/docs.lance")),
        ("file:///data/db/docs.lance", ("file", "/data/db/docs.lance")),
        ("s3://bucket/db/docs.lance", ("s3://bucket", "db/docs.lance")),
        ("az://container/docs.lance", ("az://container", "docs.lance")),
    ],
)
def test_tables_are_named_as_openlineage_names_files_and_objects(uri: str, named: tuple[str, str]) -> None:
    assert dataset_name(uri) == named
