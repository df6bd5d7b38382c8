"""A column of a view takes the place of another one: values, index, function and the view's query together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, connect, expect, udf
from airflow_geneva.engine import faults
from airflow_geneva.engine.job.meter import Stopwatch
from airflow_geneva.engine.lance_io.schemas import changed_schema
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run import promotion
from airflow_geneva.engine.run.pipeline import PlannedJob, apply_and_commit, run, start
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.view import load_udfs, plan
from airflow_geneva.engine.views.definition import QUERY_KEY
from airflow_geneva.errors import CommitConflict, InvalidInput, JobFailed
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support import promoted
from tests.support.forge import forge
from tests.support.promoted import VECTOR, back, calls, embed_v1, embed_v2, models, promote, view_of_two_models
from tests.support.tables import MakeTable


@udf(data_type=pa.float32(), version="1")
def first(embedding_v2: list[float]) -> float:
    return embedding_v2[0]


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    calls.clear()
    return make_table(40)


def database_of(table: Table) -> Database:
    return connect(table.location.database_uri)


def test_the_query_is_promoted_in_the_same_version_and_back(table: Table) -> None:
    view = view_of_two_models(table)
    before = view.view_definition
    promote(view)
    assert [(one.name, one.udf.name) for one in view.view_definition.columns if one.udf] == [
        ("embedding_v1", "embed_v1"),
        ("embedding", "embed_v2"),
    ]
    assert view.plan_refresh().rows_pending == 0
    assert not view.refresh(runner="inline").changed
    back(view)
    assert view.view_definition == before


def test_a_changed_function_is_found_under_the_new_name(table: Table) -> None:
    view = view_of_two_models(table)
    promote(view)

    @udf(data_type=VECTOR, version="3", name="embed_v2")
    def other(x: int) -> list[float]:
        return [3.0, float(x)]

    found = view.compare("embedding", other)
    assert found.rows == 40
    assert {value[0] for value in found.to_arrow().column("embedding.old").to_pylist()} == {2.0}


@pytest.mark.parametrize(
    ("of", "then", "value"), [("embedding_v2", "embedding", 2.0), ("embedding", "embedding_v1", 1.0)]
)
def test_a_column_that_is_computed_from_one_goes_on_to_read_it(table: Table, of: str, then: str, value: float) -> None:
    view = view_of_two_models(table, first=(first, [of]))
    before = view.view_definition
    promote(view)
    assert view.view_definition.column("first").inputs == (then,)
    assert view.plan_refresh().rows_pending == 0
    back(view)
    assert view.view_definition == before
    promote(view)
    table.add(pa.table({"id": [40], "x": [40]}))
    assert view.refresh(runner="inline").rows_computed == 1
    assert set(view.to_arrow(["first"])["first"].to_pylist()) == {value}


def test_names_that_would_read_other_columns_stop_it(table: Table) -> None:
    columns: dict[str, Any] = {"a": (embed_v1, ["x"]), "b": (embed_v2, ["x"]), "c": (embed_v1, ["id"])}
    view = table.query().select(columns).create_materialized_view(database_of(table), "near")
    view.refresh(runner="inline")
    with pytest.raises(InvalidInput, match="there is such a column"):
        view.promote_column("b", to="a", keep_as="c")
    with pytest.raises(InvalidInput, match="'d'"):
        view.promote_column("d", to="a", keep_as="e")
    with pytest.raises(InvalidInput, match="computed from 'id' of the source, and would read a column of the view"):
        view.promote_column("b", to="a", keep_as="id")


@udf(data_type=pa.int64(), version="1", on_error="skip")
def picky(x: int) -> int:
    if x == 3:
        raise ValueError("not 3")
    return x


@udf(data_type=pa.int64(), version="1")
def lenient(x: int) -> int:
    return x


@pytest.mark.slow
def test_failed_rows_stop_it_and_keep_their_column(table: Table) -> None:
    columns: dict[str, Any] = {"a": (picky, ["x"]), "b": (lenient, ["x"])}
    view = table.query().select(columns).create_materialized_view(database_of(table), "near")
    view.refresh(runner="inline")
    with pytest.raises(InvalidInput, match="a function failed on 1 row, which run again in the next refresh"):
        view.promote_column("b", to="a", keep_as="c")
    view.promote_column("b", to="a", keep_as="c", require_complete=False)
    assert [one.column for one in view.get_errors()] == ["c"]
    assert view.get_errors(column_name="a") == []


def test_views_of_the_view_see_the_new_values(table: Table) -> None:
    view = view_of_two_models(table)
    later = view.query().select(["id", "embedding"]).create_materialized_view(database_of(table), "later")
    later.refresh(runner="inline")
    planned = view.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
    assert planned.views == {"later": 40}
    promote(view)
    assert later.refresh(runner="inline").rows_computed == 40
    assert models(later) == {2.0}


def test_a_view_that_was_never_refreshed_stops_it_and_has_nothing_to_compare(table: Table) -> None:
    columns: dict[str, Any] = {"id": "id", "embedding": (embed_v1, ["x"]), "embedding_v2": (embed_v2, ["x"])}
    view = table.query().select(columns).create_materialized_view(database_of(table), "near")
    assert view.compare("embedding", "embedding_v2", neighbors=0).to_arrow().num_rows == 0
    with pytest.raises(InvalidInput, match=r"shows the rows of no refresh. Refresh it: view.refresh\(\)"):
        promote(view)
    promote(view, require_complete=False)
    view.refresh(runner="inline")
    assert models(view) == {2.0}


def started(view: View, table: Table) -> tuple[PlannedJob, Plan, Udfs]:
    """A refresh of one row that is planned and recorded, and has computed nothing."""
    table.add(pa.table({"id": [40], "x": [40]}))
    definition = view.view_definition
    made = plan(view.location, definition, table.location, RefreshRequest())
    udfs = Udfs(load_udfs(definition))
    return start(made, view.location, udfs, "inline", Stopwatch()), made, udfs


def test_it_waits_for_a_refresh_that_runs(table: Table) -> None:
    view = view_of_two_models(table)
    job, _, _ = started(view, table)
    with pytest.raises(CommitConflict, match=f"job {job.spec.job_id} computes near"):
        promote(view)


@pytest.mark.parametrize("before", ["finish", "a task of another process", "finish of another process"])
def test_a_refresh_that_was_planned_before_swaps_nothing(
    table: Table, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Else values would get the names of the other model."""
    view = view_of_two_models(table)
    job, made, udfs = started(view, table)
    monkeypatch.setattr(promotion._Verifier, "_busy", lambda _: iter(()))
    committed = [] if "task" in before else [apply_and_commit(job, shard, udfs, Stopwatch()) for shard in made.shards]
    promote(view)
    if before != "finish":
        job = PlannedJob(view.location, job.saved)  # which opens the view now
    if "task" in before:
        with pytest.raises(JobFailed, match=r"the columns of the view changed meanwhile\. Plan the refresh again"):
            run(job, made.shards, udfs, Stopwatch())
    else:
        result = job.finish(committed, 0.0)
        assert (result.state, result.rows_left) == ("PARTIAL", 1)
        assert "the columns of the view changed meanwhile" in str(result)
    again = view.refresh(runner="inline")
    assert (again.rows_visible, again.rows_left) == (1, 0)
    assert (models(view), models(view, "embedding_v1")) == ({2.0}, {1.0})


def promote_and_die(database: str, point: str) -> None:
    faults._ARMED = f"{point}:1"
    view = connect(database).open_view("near")
    view.promote_column("embedding_v2", to="embedding", keep_as="embedding_v1")


@pytest.mark.crash
@pytest.mark.parametrize(("point", "written"), [("promote.before", 0), ("promote.after", 1)])
def test_a_killed_promotion_is_made_once(table: Table, point: str, written: int) -> None:
    view = view_of_two_models(table)
    version, arguments = view.version, {"database": table.location.database_uri, "point": point}
    assert forge().run("tests.views.test_promotion:promote_and_die", arguments, {}) == -signal.SIGKILL
    assert view.version == version + written
    assert models(view) == {1.0 + written}
    assert promote(view).version == version + 1
    assert models(view) == {2.0}
    assert view.plan_refresh().rows_pending == 0


@pytest.mark.parametrize("first", ["promotion", "expectation"])
def test_a_promotion_and_an_expectation_that_meet_take_nothing_back(
    table: Table, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """What is expected is expected of the same column, whatever it is called then."""
    view = view_of_two_models(table)
    acts: dict[str, Callable[[], Any]] = {
        "promotion": lambda: promote(view),
        "expectation": lambda: view.expect(
            {"embedding_v2" if first == "promotion" else "embedding": expect.not_null()}
        ),
    }
    changed, second = changed_schema, next(act for name, act in acts.items() if name != first)

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(promotion, "changed_schema", changed)
        second()
        return changed(*arguments)

    monkeypatch.setattr(promotion, "changed_schema", meanwhile)
    acts[first]()
    assert [one.name for one in view.view_definition.columns] == ["id", "embedding_v1", "embedding"]
    assert [name for name, _ in view.view_definition.expectations] == ["embedding"]
    assert models(view) == {2.0}
    planned = view.plan_refresh()
    assert planned.rows_pending == 0
    assert not [note for note in planned.notes if "took back" in note]


def test_two_columns_of_a_view_are_compared(table: Table) -> None:
    view = view_of_two_models(table)
    found = view.compare("embedding", "embedding_v2", queries=[3, 30], neighbors=3)
    assert found.rows == 40
    assert "cosine similarity" in str(found)
    assert "computed by" in str(found)
    with pytest.raises(InvalidInput, match="No UDF computes a column 'id' of view 'near'"):
        view.column_function("id")
    assert QUERY_KEY.encode() in view.lance.schema.metadata


def test_values_of_earlier_code_are_named_beside_those_of_the_newest(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of_two_models(table)

    @udf(data_type=VECTOR, version="3", name="embed_v2")
    def changed(x: int) -> list[float]:
        return [3.0, float(x)]

    monkeypatch.setattr(promoted, "embed_v2", changed)
    table.add(pa.table({"id": [40], "x": [40]}))
    view.refresh(runner="inline", on_code_change="new_rows")
    promote(view, require_complete=False)
    function = view.column_function("embedding")
    assert function.versions == {"3": 41}
    assert function.older == ("2",)
    assert "41 rows of version 3, some of them possibly of version 2" in str(function)
    assert view.column_function("embedding_v1").older == ()
