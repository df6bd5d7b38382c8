"""The DAGs that show how views are refreshed, run as they are shown."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow import sdk
from airflow.models.asset import AssetDagRunQueue, AssetEvent
from airflow.models.dag import DagModel
from airflow.sdk import DAG, timezone
from airflow.timetables.base import DataInterval, TimeRestriction
from airflow.utils.session import create_session
from sqlalchemy import delete, select

from airflow_geneva import Table
from airflow_geneva.assets import lance_asset
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.counting import Trace
from tests.support.driving import DagBag, Driver, events, register
from tests.support.openai_server import OpenAIServer, embedding_of
from tests.udfs_for_tests import folded

pytestmark = pytest.mark.airflow

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
LONG = "It was a long time ago, and there was light upon the deep, and it went on like this for a hundred letters."
DULL = "It was a long time ago, and nothing was upon the deep, and it went on like this for a hundred letters more."


@pytest.fixture
def verses(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """A small table of verses, with the example UDFs on the Python path as in a DAGs folder."""
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield desk.database.create_table("verses", [{"text": LONG}, {"text": "short"}, {"text": DULL}])
    for name in [name for name in sys.modules if name.startswith(("embedding_udfs", "passage_udfs"))]:
        del sys.modules[name]


def example(name: str, dag_id: str | None = None) -> DAG:
    bag = DagBag(EXAMPLES / f"{name}.py")
    assert not bag.import_errors
    return bag.dags[dag_id or name]


def snippet(file: str, dag_id: str) -> DAG:
    return DagBag(EXAMPLES.parent / "docs" / "snippets" / f"{file}.py").dags[dag_id]


def go(dag: DAG) -> Driver:
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    return run


def texts(desk: Desk, view: str) -> list[str]:
    return sorted(desk.database.open_table(view).to_arrow()["text"].to_pylist())


def due(dag_id: str) -> bool:
    """Whether an asset event has set a DAG off."""
    with create_session() as session:
        return session.scalar(select(AssetDagRunQueue).where(AssetDagRunQueue.target_dag_id == dag_id)) is not None


def take(dag_id: str) -> None:
    """Do with the event what the scheduler does that starts the DAG for it."""
    with create_session() as session:
        session.execute(delete(AssetDagRunQueue).where(AssetDagRunQueue.target_dag_id == dag_id))


def test_the_hourly_refresh_follows_the_table_for_three_hours(desk: Desk, verses: Table) -> None:
    first = go(example("hourly_refresh"))
    assert first.xcom("define")["created"] is True
    assert texts(desk, "long_verses") == sorted([LONG, DULL])
    vectors = desk.database.open_table("long_verses").to_arrow()["embedding"]
    assert [len(vector) for vector in vectors.to_pylist()] == [256, 256]

    verses.add([{"text": f"{LONG} Amen."}, {"text": "short too"}])
    verses.lance.delete(f"text = '{DULL}'")
    second = go(example("hourly_refresh"))
    assert second.xcom("refresh.finish")["rows_computed"] == 1
    assert texts(desk, "long_verses") == sorted([LONG, f"{LONG} Amen."])

    version = desk.database.open_table("long_verses").version
    third = go(example("hourly_refresh"))
    assert third.states()["refresh.shards.apply"] == "skipped"
    assert desk.database.open_table("long_verses").version == version


@pytest.mark.parametrize(
    "names",
    [["refresh_on_arrival"], ["clean_corpus"], ["refresh_wordy_verses"], ["chained_views", "refresh_long_verses"],
     ["chained_views", "refresh_verses_of_light"]],
)  # fmt: skip
def test_a_burst_of_events_starts_one_run(desk: Desk, verses: Table, names: list[str]) -> None:
    timetable = register(example(*names)).timetable
    assert type(timetable).__name__ == "AssetTriggeredTimetable"
    if not hasattr(timetable, "group_asset_events"):
        return  # Airflow before 3.4 has nothing but batches
    burst = [AssetEvent(timestamp=timezone.datetime(2026, 1, 1, hour=hour)) for hour in range(5)]
    [(_, of_one_run)] = timetable.group_asset_events(burst, timezone.utcnow())
    assert of_one_run == burst


def test_a_refresh_waits_for_new_data(desk: Desk, verses: Table) -> None:
    go(example("hourly_refresh"))
    dag = example("refresh_on_new_data")
    wait: Any = dag.get_task("wait")
    wait.poke_interval, wait.mode, wait.timeout, wait.soft_fail = 0, "poke", 0, True
    assert Driver.trigger(dag).go().states()["wait"] == "skipped"
    verses.add([{"text": f"{LONG} Amen."}])
    run = go(dag)
    assert run.xcom("wait")["fragments"] == 1
    assert run.xcom("refresh.finish")["rows_computed"] == 1
    assert texts(desk, "long_verses") == sorted([LONG, DULL, f"{LONG} Amen."])


def test_a_refresh_waits_in_the_triggerer_for_a_load_to_be_over(desk: Desk, verses: Table) -> None:
    go(example("hourly_refresh"))
    verses.add([{"text": f"{LONG} Amen."}])
    dag = example("refresh_when_settled")
    wait: Any = dag.get_task("wait")
    assert wait.deferrable
    wait.quiet_period, wait.poke_interval = 2, 1
    assert wait.retries
    run = go(dag)
    assert run.xcom("wait")["fragments"] == 1
    assert run.xcom("refresh.finish")["rows_computed"] == 1
    assert texts(desk, "long_verses") == sorted([LONG, DULL, f"{LONG} Amen."])


def test_a_refresh_on_arrival_makes_its_view_and_can_be_started_by_hand(desk: Desk, verses: Table) -> None:
    """`test_views_on_a_scheduler.py` shows it on a running Airflow."""
    dag = example("refresh_on_arrival")
    for more in ("Amen.", "Selah."):
        verses.add([{"text": f"{LONG} {more}"}])
        run = go(dag)
        assert run.xcom("arrived") == []
        assert f"{LONG} {more}" in texts(desk, "long_verses")


@pytest.mark.parametrize("name", ["hourly_refresh", "refresh_on_new_data", "refresh_when_settled", "hourly_too"])
def test_the_scheduler_finds_a_second_run_after_the_first(airflow_db: Path, name: str) -> None:
    dag = register(snippet("hourly_too_dag", "on_events_and_hourly") if name == "hourly_too" else example(name))
    restriction = TimeRestriction(dag.start_date, None, catchup=False)
    first = dag.timetable.next_dagrun_info(last_automated_data_interval=None, restriction=restriction)
    second = dag.timetable.next_dagrun_info(last_automated_data_interval=first.data_interval, restriction=restriction)
    assert second.logical_date > first.logical_date


@pytest.mark.skipif(not hasattr(sdk, "AssetAndTimeSchedule"), reason="came with Airflow 3.4")
def test_an_hourly_refresh_that_waits_for_an_event_is_due_when_both_are_there(airflow_db: Path) -> None:
    dag = snippet("hourly_if_new_dag", "hourly_if_new")
    register(dag)

    def due() -> bool:
        found, _ = DagModel.dags_needing_dagruns(session)
        return dag.dag_id in [model.dag_id for model in found]

    with create_session() as session:
        session.get_one(DagModel, dag.dag_id).is_paused = False
    register(dag)  # Airflow watches for DAGs that are on
    with create_session() as session:
        model = session.get_one(DagModel, dag.dag_id)
        model.next_dagrun_create_after = timezone.utcnow() - timedelta(minutes=1)
        session.flush()
        assert not due(), "an hour without an event starts nothing"
        [asset] = model.schedule_assets
        assert [watcher.name for watcher in asset.watchers] == ["new_fragments"]
        event = AssetEvent(asset_id=asset.id)
        session.add(event)
        session.flush()
        session.add(AssetDagRunQueue(asset_id=asset.id, target_dag_id=dag.dag_id, asset_event_id=event.id))
        session.flush()
        assert due()
        model.next_dagrun_create_after = timezone.utcnow() + timedelta(minutes=30)
        session.flush()
        assert not due(), "an event waits for the hour"
        session.rollback()


def test_hours_that_were_missed_are_made_up_for_by_one_run(airflow_db: Path) -> None:
    dag = register(example("hourly_refresh"))
    restriction = TimeRestriction(dag.start_date, None, catchup=dag.catchup)
    first = dag.timetable.next_dagrun_info(last_automated_data_interval=None, restriction=restriction).logical_date
    last = DataInterval.exact(first.subtract(hours=5))
    following = dag.timetable.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
    assert following.logical_date >= first.subtract(hours=1)
    assert dag.max_active_runs == 1


def test_a_view_of_a_computed_column_is_made_and_then_follows(
    desk: Desk, verses: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENEVA_DEMO_COUNTS", str(tmp_path))
    desk.database.drop_table("verses")
    first = [{"book": "Job", "chapter": 1, "verse": 2, "text": f"{LONG} {LONG}", "embedding": [0.5]}]
    table = desk.database.create_table("verses", [*first, {**first[0], "verse": 3, "text": "short"}])
    dag = example("refresh_wordy_verses")
    go(dag)
    table.add([{**first[0], "verse": 4, "embedding": [0.25]}])
    assert go(dag).xcom("refresh.finish")["rows_computed"] == 1
    assert (tmp_path / "counted_words.txt").read_text().split() == ["1", "1"]
    words = 2 * len(LONG.split())
    assert desk.database.open_table("wordy_verses").to_arrow().to_pylist() == [
        {"place": f"Job 1:{verse}", "text": f"{LONG} {LONG}", "embedding": [vector], "words": words}
        for verse, vector in ((2, 0.5), (4, 0.25))
    ]


def test_a_view_without_near_duplicates_follows_its_table(desk: Desk, verses: Table) -> None:
    desk.database.drop_table("verses")
    lines = ["In the beginning God created the heaven and the earth", "And the earth was without form, and void"]
    rows = [{"book": "Genesis", "chapter": 1, "verse": at, "text": text} for at, text in enumerate(lines, 1)]
    table = desk.database.create_table("verses", [*rows, {**rows[0], "verse": 3, "text": f"{lines[0].upper()}!"}])
    dag = example("clean_corpus")
    first = go(dag)
    assert (first.xcom("define")["created"], first.xcom("refresh.finish")["rows_computed"]) == (True, 2)
    assert desk.database.open_table("clean_verses").to_arrow()["verse"].to_pylist() == [1, 2]
    table.lance.delete("verse = 1")
    second = go(dag)
    assert (second.xcom("define")["created"], second.xcom("refresh.finish")["rows_computed"]) == (False, 1)
    assert sorted(desk.database.open_table("clean_verses").to_arrow()["verse"].to_pylist()) == [2, 3]


def test_a_view_on_a_view_is_set_off_by_the_view_below_it(desk: Desk, verses: Table) -> None:
    go(example("hourly_refresh"))
    first, second = (example("chained_views", name) for name in ("refresh_long_verses", "refresh_verses_of_light"))
    register(second)
    with create_session() as session:
        session.get_one(DagModel, second.dag_id).is_paused = False
    assert second.get_task("refresh.finish").inlets == [lance_asset("long_verses")]
    for letters in ("Amen.", "Selah."):
        verses.add([{"text": f"{LONG} {letters}"}, {"text": f"{DULL} {letters}"}])
        before = len(events("lance_default/verses_of_light"))
        assert not due(second.dag_id)
        go(first)
        assert due(second.dag_id)
        take(second.dag_id)
        go(second)
        assert texts(desk, "verses_of_light") == [text for text in texts(desk, "long_verses") if "light" in text]
        assert len(events("lance_default/verses_of_light")) == before + 1


def test_a_chain_in_one_dag_stops_at_a_failure_and_goes_on_when_it_is_cleared(desk: Desk, verses: Table) -> None:
    verses.add_columns({"embedding": importlib.import_module("embedding_udfs").embed})
    dag = example("chain_in_one_dag")
    go(dag)
    assert texts(desk, "embedded_verses") == sorted([LONG, DULL, "short"])
    assert texts(desk, "verses_of_light") == [LONG]

    verses.add([{"text": f"{LONG} Amen."}])
    run = Driver.trigger(dag).go(kill="refresh_embedded.shards.apply")
    states = run.states()
    assert (run.state, states["embed.finish"], states["refresh_of_light.plan"]) == (
        "failed",
        "success",
        "upstream_failed",
    )
    assert "Clear it with its downstream tasks." in run.error("refresh_of_light.finish")
    assert len(texts(desk, "embedded_verses")) == 3
    assert texts(desk, "verses_of_light") == [LONG]

    run.clear("refresh_embedded.shards.apply").go()
    assert run.state == "success", run.errors
    assert [run.xcom(f"{group}.finish")["rows_computed"] for group in ("refresh_embedded", "refresh_of_light")] == [
        1,
        1,
    ]
    assert texts(desk, "verses_of_light") == [LONG, f"{LONG} Amen."]


def test_documents_are_cut_embedded_by_a_service_and_searched_and_its_key_is_written_nowhere(
    desk: Desk, verses: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-planted-77ab10"
    text = f"{LONG} " * 20
    documents = desk.database.create_table("documents", [{"id": 1, "text": text}, {"id": 2, "text": DULL}])
    with OpenAIServer(api_keys=(key,), dimensions=1536) as server:
        connection = {"conn_type": "openai", "password": key, "host": server.base_url}
        monkeypatch.setenv("AIRFLOW_CONN_OPENAI_DEFAULT", json.dumps(connection))
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        dag = example("search_documents")
        first = Driver.trigger(dag, {"question": DULL}).go()
        assert first.state == "success", first.errors
        assert first.xcom("search")[0] == {"id": 2, "text": DULL, "_distance": 0.0}
        rows = desk.database.open_table("embedded_passages").to_arrow().to_pylist()
        assert sorted(row["id"] for row in rows) == [1, 1, 1, 2]
        assert all(row["embedding"] == embedding_of(row["text"], 1536) for row in rows)

        documents.add([{"id": 3, "text": "One more."}])
        second = Driver.trigger(dag, {"question": "One more."}).go()
        assert second.xcom("embed.finish")["rows_computed"] == 1
        assert second.xcom("search")[0]["id"] == 3
        counts = server.counts()
    assert counts.rows == 4 + 2, "equal chunks are paid once; a question is asked by hand"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert written == []
    for run in (first, second):
        known = [run.rendered("embed.plan"), run.xcom("embed.plan", "summary"), run.xcom("embed.finish"), run.errors]
        assert key not in json.dumps(known, default=str)
    assert "openai_default" in json.dumps(first.rendered("embed.plan"))


def test_a_view_of_groups_computes_the_books_that_changed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    rows = [{"book": book, "chapter": 1, "verse": at, "text": f"word {at}"} for book in ("a", "b") for at in range(3)]
    verses = desk.database.create_table("verses", rows)
    go(example("profiles"))
    books = desk.database.open_table("books")
    assert books.to_arrow().to_pylist() == [{"book": book, "verses": 3, "words": 4} for book in ("a", "b")]
    verses.add([{"book": "b", "chapter": 2, "verse": 1, "text": "one more"}])
    run = go(example("profiles"))
    assert run.xcom("refresh.plan", "summary")["rows_pending"] == 1
    found = {row["book"]: (row["verses"], row["words"]) for row in books.to_arrow().to_pylist()}
    assert found == {"a": (3, 4), "b": (4, 6)}


def test_a_function_that_is_folded_adds_the_new_rows_to_the_states_that_the_view_has(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, trace: Trace
) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    rows = desk.database.create_table("readings", [{"sensor": at % 2, "id": at, "x": 10 * at} for at in range(4)])
    with DAG("folded", schedule=None) as dag:
        bag = {"udf": "tests.udfs_for_tests.folded:bag", "inputs": ["id", "x"]}
        define = CreateMaterializedViewOperator(
            task_id="define", view="sensors", table="readings", group_by=["sensor"], agg={"bag": bag}
        )
        define >> RefreshTaskGroup(view="sensors", source="readings")
    go(dag)
    rows.add([{"sensor": 1, "id": 4, "x": 5}])
    added = Trace(Path(f"{trace.path}{folded.READ}"))
    added.clear()
    assert go(dag).xcom("refresh.finish")["rows_computed"] == 1
    assert added.rows() == [4]
    view = desk.database.open_table("sensors")
    assert {row["sensor"]: row["bag"] for row in view.to_arrow().to_pylist()} == {
        0: "1: [0, 2] 20",
        1: "1: [1, 3, 4] 45",
    }
