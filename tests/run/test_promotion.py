"""A candidate column takes the place of a live one: values, index and function together, and back again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.job.meter import Stopwatch
from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.engine.lance_io.table_versions import read_transaction
from airflow_geneva.engine.plan.request import BackfillRequest
from airflow_geneva.engine.run import promotion
from airflow_geneva.engine.run.column_function import ColumnFunction
from airflow_geneva.engine.run.pipeline import PlannedJob, run, start
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.errors import CodeChanged, CommitConflict, InvalidInput, JobFailed
from airflow_geneva.query import Query
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.promoted import (
    VECTOR,
    back,
    calls,
    embed_v1,
    embed_v2,
    models,
    promote,
    two_models,
    view_of_two_models,
)
from tests.support.tables import MakeTable


@udf(data_type=pa.float32(), version="1")
def first(embedding: list[float]) -> float:
    calls.append(("first", int(embedding[1])))
    return embedding[0]


@udf(data_type=pa.float32(), version="1")
def twice(first: float) -> float:
    return 2 * first


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    calls.clear()
    return two_models(make_table(100))


@pytest.fixture(params=["table", "view"])
def live(request: pytest.FixtureRequest, make_table: MakeTable) -> Live:
    calls.clear()
    table = make_table(100)
    return Live(two_models(table) if request.param == "table" else view_of_two_models(table), table)


@dataclass(frozen=True)
class Live:
    """What has the columns, a table or a view, and the table that has their input."""

    place: Table | View
    table: Table

    def compute(self) -> None:
        """Compute what is due in both columns, whatever their names are."""
        if isinstance(self.place, View):
            self.place.refresh(runner="inline")
        else:
            names = sorted({"embedding", "embedding_v1", "embedding_v2"} & set(self.place.schema.names))
            self.place.backfill(names, runner="inline")

    def column_function(self, version: int | None = None) -> ColumnFunction:
        return self.place.column_function("embedding", version)


def index_names(live: Table | View) -> dict[str, str]:
    return {index.columns[0]: index.name for index in promotion.Index.read(live.lance)}


def test_values_index_and_function_change_in_one_version_and_back(live: Live) -> None:
    place = live.place
    before, version, indexes = place.lance, place.version, index_names(place)
    files = sorted(path for fragment in before.get_fragments() for path in map(str, fragment.data_files()))
    done = promote(place)
    assert done.version == place.version == version + 1
    assert not done.already
    assert (models(place), models(place, "embedding_v1")) == ({2.0}, {1.0})
    assert live.column_function()(7) == [2.0, 7.0]
    assert live.column_function(version)(7) == [1.0, 7.0]
    assert "100 rows of version 2" in str(live.column_function())
    assert index_names(place) == {"embedding": indexes["embedding_v2"], "embedding_v1": indexes["embedding"]}
    assert files == sorted(p for f in place.lance.get_fragments() for p in map(str, f.data_files()))
    found = place.lance.to_table(columns=["id"], nearest={"column": "embedding", "q": [2.0, 40.0], "k": 1})
    assert found["id"].to_pylist() == [40]
    assert "promote_column('embedding_v1', to='embedding', keep_as='embedding_v2')" in str(done)
    again = promote(place)
    assert again.already
    assert again.version == place.version == version + 1
    assert "was promoted already" in str(again)
    back(place)
    assert place.version == version + 2
    assert (models(place), models(place, "embedding_v2")) == ({1.0}, {2.0})
    assert live.column_function()(7) == [1.0, 7.0]


def test_nothing_is_computed_again_and_new_rows_get_the_new_model(live: Live) -> None:
    promote(live.place)
    live.table.add([{"id": 100, "x": 100}])
    calls.clear()
    for _ in range(2):
        live.compute()
    assert sorted(calls) == [("embed_v1", 100), ("embed_v2", 100)]
    back(live.place)
    promote(live.place)
    live.place.lance.optimize.compact_files(target_rows_per_fragment=1000)
    calls.clear()
    live.compute()
    assert calls == []
    live.table.lance.update({"x": "x + 1000"}, where="id = 3")
    live.compute()
    assert sorted(calls) == [("embed_v1", 1003), ("embed_v2", 1003)]
    assert (models(live.place), models(live.place, "embedding_v1")) == ({2.0}, {1.0})


@udf(data_type=VECTOR, version="3")
def embed_until_60(x: int) -> list[float]:
    calls.append(("embed_until_60", x))
    if x == 60 and calls.count(("embed_until_60", 60)) == 1:
        raise ConnectionError("the service is away")
    return [3.0, float(x)]


def test_what_a_job_computed_before_it_failed_is_not_computed_again_under_the_new_name(table: Table) -> None:
    table.add_columns({"embedding_v3": embed_until_60})
    with pytest.raises(JobFailed):
        table.backfill("embedding_v3", runner="inline", commit_granularity=4, checkpoint_size=1, shard_size=4)
    options = {"require_complete": False, "require_index": False}
    table.promote_column("embedding_v3", to="embedding", keep_as="embedding_v1", **options)
    table.backfill("embedding", runner="inline")
    assert models(table) == {3.0}
    seen = [x for name, x in calls if name == "embed_until_60"]
    assert sorted(seen) == sorted([*range(100), 60])
    assert table.backfill("embedding_v2", runner="inline").rows_run == 0


def test_an_incomplete_candidate_is_refused_with_its_number(table: Table) -> None:
    table.add([{"id": 100, "x": 100}])
    version = table.version
    with pytest.raises(InvalidInput, match=r"1 row of 101 are due\. Compute them"):
        promote(table)
    assert table.version == version
    done = promote(table, require_complete=False)
    assert done.plan is not None
    assert done.plan.rows_due == 1
    assert "1 row due for the next backfill of 'embedding'" in str(done)
    assert models(table) == {2.0, None}
    assert table.backfill("embedding", runner="inline").rows_computed == 1
    assert models(table) == {2.0}


@udf(data_type=VECTOR, version="2", name="embed_v2", on_error="skip")
def embed_unchecked(x: int) -> list[float] | None:
    if x == 1:
        raise ValueError(x)
    return embed_v2.func(x)


@pytest.mark.slow
def test_values_that_are_not_as_expected_are_refused(make_table: MakeTable) -> None:
    table = make_table([0, 1, -2, *range(3, 30)])
    table.add_columns({"embedding": embed_v1, "embedding_v2": embed_unchecked})
    for _ in range(3):
        table.backfill("embedding_v2", runner="inline")
    # The same code, of which not_null() is expected since. The row that failed in all runs is left out.
    table.alter_columns({"embedding_v2": embed_v2})
    planned = table.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
    assert planned.candidate.rows_failed == 1
    assert [str(one) for one in planned.checked] == [
        "expectation not_null() of column 'embedding_v2' (fail) not met: 1 of 29 rows, for example row 2: None"
    ]
    with pytest.raises(InvalidInput, match="not met: 1 of 29 rows"):
        promote(table)
    table.lance.delete("x = -2")
    promote(table)
    assert models(table) == {2.0, None}


@pytest.mark.slow
def test_errors_stay_with_their_function_whatever_its_column_is_called(make_table: MakeTable) -> None:
    table = make_table(30)
    table.add_columns({"embedding": embed_v1, "embedding_v2": embed_unchecked})
    table.backfill(["embedding", "embedding_v2"], runner="inline")
    assert [(e.column, e.row_id) for e in table.get_errors()] == [("embedding_v2", 1)]
    promote(table, require_complete=False)
    assert [(e.column, e.row_id) for e in table.get_errors()] == [("embedding", 1)]
    assert [(e.column, e.row_id) for e in table.get_errors(column_name="embedding")] == [("embedding", 1)]
    assert table.get_errors(column_name="embedding_v1") == []
    table.backfill("embedding", runner="inline")
    assert len(table.get_errors(column_name="embedding", history=True)) == 2
    back(table)
    assert len(table.get_errors(column_name="embedding_v2", history=True)) == 2
    assert table.get_errors(column_name="embedding", history=True) == []


def test_an_index_that_covers_less_is_refused(table: Table) -> None:
    table.add([{"id": 100, "x": 100}])
    table.backfill("embedding_v2", runner="inline")
    table.backfill("embedding", runner="inline", indexes="update")
    with pytest.raises(InvalidInput, match=r"covers 100 rows of 'embedding_v2', and .* 101 rows of 'embedding'"):
        promote(table)
    table.backfill("embedding_v2", runner="inline", indexes="update")
    promote(table)
    table.lance.drop_index(index_names(table)["embedding_v1"])
    with pytest.raises(InvalidInput, match=r"IVF_FLAT index .* covers 'embedding', and none covers 'embedding_v1'"):
        back(table)
    table.promote_column("embedding_v1", to="embedding", keep_as="embedding_v2", require_index=False)
    assert models(table) == {1.0}


def test_a_running_job_of_either_column_is_named(table: Table) -> None:
    table.add([{"id": 100, "x": 100}])
    for name in ("embedding", "embedding_v2"):
        table.backfill(name, runner="inline")
    for name in ("embedding", "embedding_v2"):
        table.add([{"id": table.count_rows(), "x": 1}])
        job = start_job(table, name)
        with pytest.raises(CommitConflict, match=f"job {job.folder.job_id} computes docs.{name}. Wait until"):
            promote(table, require_complete=False)
        job.fail((), RuntimeError("over"), {})
    promote(table, require_complete=False)


def start_job(table: Table, column: str) -> PlannedJob:
    plan, udf = table._plan(BackfillRequest(column), None)
    return start(plan, table.location, Udfs({column: udf}), "inline", Stopwatch())


def test_a_job_that_starts_in_the_same_moment_computes_the_column_that_it_planned(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.add([{"id": 100, "x": 100}])
    table.backfill("embedding_v2", runner="inline")
    started: list[PlannedJob] = []
    run_before_first_commit(monkeypatch, lambda: started.append(start_job(table, "embedding")))
    promote(table)
    [job] = started
    shards = [job.saved.load_shard(job.folder.storage, 0)]
    assert run(job, shards, Udfs({"embedding": embed_v1}), Stopwatch()).rows_computed == 1
    assert models(table) == {2.0}
    assert models(table, "embedding_v1") == {1.0}
    assert table.backfill("embedding_v1", runner="inline").rows_run == 0


@pytest.mark.parametrize("other", ["append", "update", "backfill of the candidate", "backfill of the live column"])
def test_a_commit_between_is_verified_again(table: Table, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    meanwhile = {
        "append": lambda: table.add([{"id": 100, "x": 100}]),
        "update": lambda: table.lance.update({"x": "x + 1000"}, where="id = 5"),
        "backfill of the candidate": lambda: table.backfill("embedding_v2", runner="inline"),
        "backfill of the live column": lambda: table.backfill("embedding", runner="inline"),
    }
    if "backfill" in other:
        table.lance.update({"x": "x + 1000"}, where="id = 5")
        if "live" in other:
            table.backfill("embedding_v2", runner="inline")
    looked = run_before_first_commit(monkeypatch, meanwhile[other])
    if other in ("append", "update"):
        # The row that came meanwhile is due, and the promotion sees it.
        with pytest.raises(InvalidInput, match=r"1 row of .* are due"):
            promote(table, require_index=False)
        assert models(table) >= {1.0}
    else:
        promote(table, require_index=False, require_complete=False)
        assert models(table) == {2.0}
    assert len(looked) == (1 if other in ("append", "update") else 2)


def run_before_first_commit(monkeypatch: pytest.MonkeyPatch, meanwhile: Any) -> list[int]:
    """Run something after a promotion is verified and before it is committed, once; return the verified versions."""
    looked: list[int] = []
    commit = promotion._commit

    def committing(location: Any, dataset: Any, asked: Any) -> int | None:
        looked.append(int(dataset.version))
        if len(looked) == 1:
            meanwhile()
        return commit(location, dataset, asked)

    monkeypatch.setattr(promotion, "_commit", committing)
    return looked


def test_metadata_of_others_that_lance_would_lose_is_written_again(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile() -> None:
        table.lance.update_schema_metadata({"owner": "search"})
        table.lance.update_field_metadata({"embedding_v2": {"note": "better"}, "x": {"unit": "m"}})
        table.lance.delete("id = 9")

    looked = run_before_first_commit(monkeypatch, meanwhile)
    promote(table)
    assert len(looked) == 1
    assert table.schema.metadata[b"owner"] == b"search"
    assert table.schema.field("embedding").metadata[b"note"] == b"better"
    assert table.schema.field("x").metadata == {b"unit": b"m"}
    assert table.column_function("embedding")(1) == [2.0, 1.0]
    assert table.count_rows() == 99


def test_a_promotion_that_is_tried_again_writes_metadata_that_the_one_before_it_replaced(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def meanwhile() -> None:
        table.lance.update_schema_metadata({"owner": "search", "kept": "1"})
        table.lance.update_field_metadata({"embedding_v2": {"note": "better"}})

    def die(point: str) -> None:
        if point == "promote.after":
            raise Died

    with monkeypatch.context() as patched:
        run_before_first_commit(patched, meanwhile)
        patched.setattr(table_versions, "fault_point", die)
        with pytest.raises(Died):
            promote(table)
    assert b"owner" not in (table.schema.metadata or {})
    table.lance.update_schema_metadata({"kept": "2"})
    assert promote(table).already
    assert {table.schema.metadata[name] for name in (b"owner", b"kept")} == {b"search", b"2"}
    assert table.schema.field("embedding").metadata[b"note"] == b"better"
    version = table.version
    assert promote(table).already
    assert table.version == version


def test_columns_that_read_it_go_on_with_the_name_and_are_due(table: Table) -> None:
    table.add_columns({"first": first, "twice": twice})
    table.backfill(["first", "twice"], runner="inline")
    planned = table.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
    assert planned.columns == {"first": 100, "twice": 100}
    assert planned.views == {}
    assert "column 'first': 100 rows due\n" in f"{planned}\n"
    assert "column 'twice': at most 100 rows due" in str(planned)
    version = table.version
    assert planned.version == version
    promote(table)
    assert table.definition("first").input_columns == ("embedding",)
    assert table.plan_backfill("first").rows_pending == 100
    calls.clear()
    table.backfill(["first", "twice"], runner="inline")
    assert set(table.to_arrow(["twice"])["twice"].to_pylist()) == {4.0}
    assert len(calls) == 100
    # On the way back they are due again, and on the way there a second time too: they have other values since.
    assert table.plan_promotion("embedding_v1", to="embedding", keep_as="embedding_v2").columns["first"] == 100
    back(table)
    table.backfill(["first", "twice"], runner="inline")
    assert set(table.to_arrow(["twice"])["twice"].to_pylist()) == {2.0}


PAIR = pa.struct([("size", pa.int64()), ("model", pa.int64())])


@udf(data_type=PAIR, version="1")
def described(x: int) -> dict[str, int]:
    return {"size": x, "model": 1}


@udf(data_type=PAIR, version="2")
def described_again(x: int) -> dict[str, int]:
    return {"size": 2 * x, "model": 2}


@udf(data_type=pa.int64(), version="1")
def next_size(size: int) -> int:
    return size + 1


def test_columns_that_read_a_field_of_it_go_on_with_the_name_too(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"about": described, "about_v2": described_again, "next": (next_size, ["about.size"])})
    table.backfill(["about", "about_v2", "next"], runner="inline")
    planned = table.plan_promotion("about_v2", to="about", keep_as="about_v1")
    assert planned.columns == {"next": 10}
    table.promote_column("about_v2", to="about", keep_as="about_v1")
    assert table.definition("next").input_columns == ("about.size",)
    assert table.backfill("next", runner="inline").rows_computed == 10
    assert table.to_arrow(["next"])["next"].to_pylist() == [2 * x + 1 for x in range(10)]
    table.add_columns({"of_v1": (next_size, ["about_v1.size"])})
    table.backfill("of_v1", runner="inline")
    table.promote_column("about_v1", to="about", keep_as="about_v2")
    assert table.definition("of_v1").input_columns == ("about.size",)
    assert table.backfill("of_v1", runner="inline").rows_run == 0


def test_a_column_whose_own_code_changed_too_still_stops(table: Table) -> None:
    table.add_columns({"first": first})
    table.backfill("first", runner="inline")
    promote(table)
    other = udf(data_type=pa.float32(), version="9", name="first")(lambda embedding: embedding[0])
    table.alter_columns({"first": (other, ["embedding"])})
    with pytest.raises(CodeChanged, match="first"):
        table.backfill("first", runner="inline")


def test_columns_that_read_the_candidate_follow_it(table: Table) -> None:
    table.add_columns({"first_v2": (first, ["embedding_v2"])})
    table.backfill("first_v2", runner="inline")
    planned = table.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
    assert planned.followers == ("first_v2",)
    assert planned.columns == {}
    promote(table)
    assert table.definition("first_v2").input_columns == ("embedding",)
    assert table.backfill("first_v2", runner="inline").rows_run == 0


def test_a_candidate_that_reads_the_live_column_goes_on_to_read_it(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"embedding": embed_v1, "shorter": (half, ["embedding"])})
    table.backfill(["embedding", "shorter"], runner="inline")
    table.promote_column("shorter", to="embedding", keep_as="longer")
    assert table.definition("embedding").input_columns == ("longer",)
    assert table.backfill("embedding", runner="inline").rows_run == 0
    table.add([{"id": 10, "x": 10}])
    table.backfill(["longer", "embedding"], runner="inline")
    assert table.to_arrow(["embedding"])["embedding"].to_pylist()[-1] == [0.5, 5.0]


@udf(data_type=VECTOR, version="1")
def half(embedding: list[float]) -> list[float]:
    return [value / 2 for value in embedding]


def view_of(query: Query, table: Table, name: str) -> View:
    db = connect(table.location.database_uri)
    view = query.create_materialized_view(db, name)
    view.refresh(runner="inline")
    return db.open_view(name)


def test_views_see_the_new_values_and_say_before_how_many_rows_that_makes_due(table: Table) -> None:
    near = view_of(table.query().where("x < 30").select(["id", "embedding"]), table, "near")
    plain = view_of(table.query().select(["id"]), table, "plain")
    later = view_of(near.query().select(["id", "embedding"]), table, "later")
    planned = table.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
    assert planned.views == {"near": 30, "later": 30}
    assert "view 'near': 30 rows due\n" in f"{planned}\n"
    assert "view 'later': at most 30 rows due" in str(planned)
    promote(table)
    assert plain.plan_refresh().rows_pending == 0
    # A DAG that defines the view again finds it as it wants it.
    again = table.query().where("x < 30").select(["id", "embedding"]).definition()
    assert near.view_definition.differences(again) == []
    for view in (near, later):
        assert view.plan_refresh().rows_pending == 30
        assert view.refresh(runner="inline").rows_computed == 30
        assert {value[0] for value in view.to_arrow()["embedding"].to_pylist()} == {2.0}
        assert view.plan_refresh().rows_pending == 0
    back(table)
    assert near.plan_refresh().rows_pending == 30
    near.refresh(runner="inline")
    assert {value[0] for value in near.to_arrow()["embedding"].to_pylist()} == {1.0}


def test_a_view_that_could_not_be_refreshed_stops_it(table: Table) -> None:
    view_of(table.query().select(["id", "embedding_v2"]), table, "of_candidate")
    with pytest.raises(InvalidInput, match="view 'of_candidate' reads 'embedding_v2', and would no longer find it"):
        promote(table)
    connect(table.location.database_uri).drop_table("of_candidate")
    view_of(table.query().select(["id", "embedding"]), table, "of_live")
    table.add_columns({"wider": udf(data_type=pa.list_(pa.float32(), 3), name="wider")(lambda x: [x, x, x])})
    table.backfill("wider", runner="inline")
    with pytest.raises(InvalidInput, match=r"view 'of_live' reads 'embedding' as fixed_size_list.*, and 'wider' is"):
        table.promote_column("wider", to="embedding", keep_as="narrow", require_index=False)


def test_a_column_of_another_width_can_be_promoted(table: Table) -> None:
    table.add_columns({"wider": udf(data_type=pa.list_(pa.float32(), 3), name="wider")(lambda x: [x, x, x])})
    table.backfill("wider", runner="inline")
    table.promote_column("wider", to="embedding", keep_as="narrow", require_index=False)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 3)
    table.promote_column("narrow", to="embedding", keep_as="wider", require_index=False)
    assert models(table) == {1.0}


def test_columns_without_a_function_take_part(make_table: MakeTable) -> None:
    given = pa.array([[0.0, float(x)] for x in range(20)], VECTOR)
    table = make_table(20, stable=False, embedding=given)
    table.add_columns({"embedding_v2": embed_v2})
    table.backfill("embedding_v2", runner="inline")
    planned = table.plan_promotion("embedding_v2", to="embedding", keep_as="vendor")
    assert "live 'embedding': 20 rows; plain values" in str(planned)
    table.promote_column("embedding_v2", to="embedding", keep_as="vendor")
    assert models(table) == {2.0}
    table.add([{"id": 20, "x": 20}])
    assert table.backfill("embedding", runner="inline").rows_computed == 1
    table.promote_column("vendor", to="embedding", keep_as="embedding_v2")
    assert models(table) == {0.0, None}
    with pytest.raises(InvalidInput, match="has no UDF"):
        table.column_function("embedding")


def test_a_restore_to_before_a_promotion_brings_the_former_model_back(table: Table) -> None:
    version = table.version
    promote(table)
    table.lance.checkout_version(version).restore()
    assert models(table) == {1.0}
    assert table.column_function("embedding")(1) == [1.0, 1.0]
    assert table.backfill("embedding", runner="inline").rows_run == 0
    promote(table)
    assert models(table) == {2.0}
    assert table.backfill("embedding", runner="inline").rows_run == 0


def test_bad_input_is_refused(table: Table) -> None:
    for arguments, why in [
        (("embedding_v2", "embedding", "embedding_v2"), "needs three names"),
        (("embedding", "embedding", "old"), "needs three names"),
        (("none", "embedding", "old"), "has no columns .'none'."),
        (("embedding_v2", "none", "old"), "has no columns .'none'."),
        (("embedding_v2", "embedding", "x"), "cannot be kept as 'x': there is such a column"),
        (("embedding_v2", "embedding", "a.b"), "cannot be the name of a column"),
        (("embedding_v2", "embedding", 3), "cannot be the name of a column"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            table.promote_column(*arguments)
    with pytest.raises(InvalidInput, match="require_index='no' is not valid"):
        promote(table, require_index="no")
    with pytest.raises(InvalidInput, match=r"has no columns \['a', 'b'\]"):
        view_of(table.query().select(["id"]), table, "plain").promote_column("a", "b", "c")


def test_the_commit_says_what_it_is(table: Table) -> None:
    done = promote(table)
    found = read_transaction(table.lance, done.version)
    assert found is not None
    assert found.transaction_properties == {
        promotion.PROMOTION_PROPERTY: "embedding_v2, embedding, embedding_v1",
        "geneva.promotion.verified_at": str(done.version - 1),
    }
