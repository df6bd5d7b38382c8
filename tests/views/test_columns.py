"""A view's columns are computed alone: what changes in one of them costs calls of its function and of its readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from airflow_geneva import connect
from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.support.tables import MakeTable
from tests.udfs_for_tests import columns as udfs
from tests.udfs_for_tests.columns import deploy, value

NAMES = ("ocr", "language", "words")
OTHERS = ("parts", "ends", "picture", "chars")


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table(121, per_fragment=40)


def make_view(table: Table, where: str | None = None, fails: Sequence[str] = (), **how: Any) -> View:
    """A view whose column ``language`` reads ``ocr``, and whose column ``words`` reads the source only."""
    inputs = {"ocr": "x", "language": "ocr", "words": "x"}
    columns = {name: deploy(name, 1, read, name in fails) for name, read in inputs.items()}
    query = table.query() if where is None else table.query().where(where)
    query = query.select({"id": "id", "twice": "x * 2"}).add_columns(columns)
    for name, argument in how.items():
        query = getattr(query, name)(argument)
    return query.create_materialized_view(connect(table.location.database_uri), "v")


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def calls(trace: Trace) -> dict[str, int]:
    """Count the calls of each function, and forget them."""
    traces = {name: Trace(trace.path.with_name(trace.path.name + f".{name}")) for name in (*NAMES, *OTHERS)}
    found = {name: len(one) for name, one in traces.items() if len(one)}
    for one in traces.values():
        one.clear()
    return found


def rows(view: View) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in view.to_arrow().to_pylist())


def expected(xs: dict[int, int], ocr: int = 1, language: int = 1, words: int = 1) -> list[tuple[Any, ...]]:
    """Return the rows of the view, by id and x, for these code versions of its functions."""
    read = {i: value("ocr", ocr, x) for i, x in xs.items()}
    return sorted(
        (i, 2 * x, read[i], value("language", language, read[i]), value("words", words, x)) for i, x in xs.items()
    )


def test_a_changed_function_runs_alone_and_with_it_what_reads_it(table: Table, trace: Trace) -> None:
    view, xs = make_view(table), {x: x for x in range(121)}
    refresh(view)
    assert calls(trace) == dict.fromkeys(NAMES, 121)
    deploy("words", 2)
    plan = view.plan_refresh(on_code_change="recompute")
    assert "runs words on 121 rows; the view's other values of these rows are carried" in str(plan)
    assert plan.calls_to_run == {"words": 121}
    assert refresh(view, on_code_change="recompute").rows_computed == 121
    assert calls(trace) == {"words": 121}
    assert rows(view) == expected(xs, words=2)
    deploy("ocr", 2)
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"ocr": 121, "language": 121}
    assert rows(view) == expected(xs, 2, 1, 2)
    before = view.lance.version
    refresh(view, on_code_change="recompute")
    assert (calls(trace), view.lance.version) == ({}, before)


def test_new_and_changed_rows_run_whole_beside_rows_of_which_a_column_runs(table: Table, trace: Trace) -> None:
    view = make_view(table, "x % 2 = 0")
    refresh(view)
    calls(trace)
    table.add([{"id": 200, "x": 200}, {"id": 201, "x": 201}])
    table.lance.update({"x": "x + 100"}, where="id < 6")
    table.lance.delete("id = 60")
    table.lance.optimize.compact_files()  # some rows of a fragment run whole, and others do not
    view.lance.optimize.compact_files()
    deploy("words", 2)
    assert view.plan_refresh(on_code_change="recompute").calls_to_run == {"ocr": 4, "language": 4, "words": 61}
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"ocr": 4, "language": 4, "words": 61}
    xs = {x: x + 100 if x < 6 else x for x in [*range(121), 200] if x != 60}
    assert rows(view) == expected({i: x for i, x in xs.items() if x % 2 == 0}, words=2)


def test_values_of_earlier_code_that_were_kept_run_later_and_alone(table: Table, trace: Trace) -> None:
    view = make_view(table)
    refresh(view)
    deploy("words", 2)
    table.add([{"id": 121, "x": 121}])
    refresh(view, on_code_change="new_rows")
    deploy("language", 2, "ocr")
    table.add([{"id": 122, "x": 122}])
    calls(trace)
    refresh(view, on_code_change="new_rows")
    assert calls(trace) == dict.fromkeys(NAMES, 1)
    table.lance.optimize.compact_files()
    assert view.plan_refresh().rows_pending == 0
    plan = view.plan_refresh(on_code_change="recompute")
    assert plan.calls_to_run == {"language": 122, "words": 121}
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"language": 122, "words": 121}
    assert rows(view) == expected({x: x for x in range(123)}, 1, 2, 2)


@pytest.mark.parametrize("how", [{"shuffle": 3}, {"limit": 50}], ids=["shuffled", "limited"])
def test_a_column_runs_alone_on_the_rows_that_a_query_shows(table: Table, trace: Trace, how: dict[str, int]) -> None:
    view = make_view(table, **how)
    refresh(view, max_rows_per_fragment=30)
    shown = how.get("limit", 121)
    assert calls(trace) == dict.fromkeys(NAMES, shown)
    order = view.to_arrow()["id"].to_pylist()
    deploy("words", 2)
    table.lance.delete("id = 0")
    refresh(view, on_code_change="recompute", max_rows_per_fragment=30)
    entered = int("limit" in how)
    assert calls(trace) == {"words": shown - 1 + entered} | ({"ocr": 1, "language": 1} if entered else {})
    assert rows(view) == expected({x: x for x in range(1, shown + entered)}, words=2)
    assert "limit" in how or view.to_arrow()["id"].to_pylist() == [i for i in order if i]


def test_values_of_any_shape_are_carried(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30, per_fragment=7)
    columns = {
        "parts": udfs.parts,
        ("low", "high"): udfs.ends,
        "picture": udfs.picture,
        "words": deploy("words", 1),
        "language": deploy("language", 1, "low"),
    }
    query = table.query().select(["id"]).add_columns(columns).explode("parts")
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    refresh(view)
    assert calls(trace) == dict.fromkeys(("parts", "ends", "picture", "words", "language"), 30)

    def found() -> list[dict[str, Any]]:
        read = view.lance.to_table(columns=view.schema.names, blob_handling="all_binary").to_pylist()
        return sorted(read, key=lambda row: (row["id"], row["parts"]))

    def right(words: int, language: int, source: range = range(30)) -> list[dict[str, Any]]:
        return [
            {
                "id": x, "parts": f"{x}-{at}", "low": x, "high": f"high {x}" if x % 3 else None,
                "picture": bytes(x) if x % 3 else None, "words": value("words", words, x),
                "language": value("language", language, x),
            }
            for x in source for at in range(x % 10)
        ]  # fmt: skip

    assert found() == right(1, 1)
    deploy("words", 2)
    table.add([{"id": 30, "x": 30}, {"id": 31, "x": 31}])
    view.lance.optimize.compact_files()
    refresh(view, on_code_change="recompute")
    # Rows without parts are not shown, so nothing of them runs.
    assert calls(trace) == dict.fromkeys(("parts", "ends", "picture", "language"), 2) | {"words": 27 + 2}
    assert found() == right(2, 1, range(32))
    deploy("language", 2, "low")
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"language": 28}
    assert found() == right(2, 2, range(32))


def test_failures_are_counted_by_column_and_version_and_retried_alone(table: Table, trace: Trace) -> None:
    view, bad = make_view(table, fails=("ocr",)), 12
    refresh(view)
    calls(trace)
    deploy("words", 2, fails=True)
    ocr = {"ocr": bad, "language": bad}
    for expected_calls in (ocr | {"words": 121}, ocr | {"words": bad}, {"words": bad}, {}):
        refresh(view, on_code_change="recompute")
        assert calls(trace) == expected_calls
    deploy("ocr", 2)
    refresh(view, on_code_change="new_rows")
    assert calls(trace) == ocr
    deploy("words", 3)
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"words": 121, "ocr": 109, "language": 109}
    assert rows(view) == expected({x: x for x in range(121)}, 2, 1, 3)
    assert view.get_failed_row_addresses() == []


def test_an_added_column_is_computed_alone_and_a_dropped_one_costs_nothing(table: Table, trace: Trace) -> None:
    view = make_view(table)
    refresh(view)
    calls(trace)
    table.lance.add_columns({"y": "x + 5"})
    version = view.lance.version
    view.add_columns({"chars": deploy("chars", 1, "y, ocr"), "more": "y * 2", "y": "y"})
    assert view.lance.version == version + 1
    assert view.view_definition.column("chars").inputs == ("y", "ocr")
    table.add([{"id": 121, "x": 121, "y": 126}])
    assert (view.to_arrow().num_rows, view.to_arrow()["chars"].null_count) == (121, 121)
    refresh(view)
    assert calls(trace) == {"chars": 122, "ocr": 1, "language": 1, "words": 1}
    kept = expected({x: x for x in range(122)})
    right = [(*row, value("chars", 1, row[0] + 5, row[2]), 2 * row[0] + 10, row[0] + 5) for row in kept]
    assert rows(view) == right
    view.drop_columns(["chars", "words"])
    table.add([{"id": 122, "x": 122, "y": 127}])
    refresh(view)
    assert calls(trace) == {"ocr": 1, "language": 1}
    view.drop_columns(["more", "y"])
    table.lance.drop_columns(["y"])
    table.lance.optimize.compact_files()
    refresh(view)
    assert (calls(trace), [one.name for one in view.view_definition.reads]) == ({}, ["id", "x"])
    assert rows(view) == [row[:4] for row in expected({x: x for x in range(123)})]


def test_a_column_that_is_dropped_and_added_again_holds_no_earlier_value(table: Table, trace: Trace) -> None:
    view = make_view(table)
    refresh(view)
    words = udfs.__dict__["words"]
    view.drop_columns("words")
    view.add_columns({"words": words})
    calls(trace)
    refresh(view)
    assert calls(trace) == {"words": 121}
    assert rows(view) == expected({x: x for x in range(121)})


def test_an_altered_column_runs_once_somebody_says_so(table: Table, trace: Trace) -> None:
    view = make_view(table)
    refresh(view)
    calls(trace)
    view.alter_columns({"words": (deploy("words", 1, "id"), ["id"])})
    with pytest.raises(CodeChanged, match=r"column 'words' from version 1 to 1/\d+"):
        refresh(view)
    table.add([{"id": 500, "x": 7}])
    refresh(view, on_code_change="new_rows")
    assert calls(trace) == dict.fromkeys(NAMES, 1)
    assert value("words", 1, 500) in view.to_arrow()["words"].to_pylist()
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"words": 121}
    assert sorted(view.to_arrow()["words"].to_pylist()) == [value("words", 1, x) for x in [*range(121), 500]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda view: view.drop_columns(["ocr"]), r"column 'language' is computed from \['ocr'\]"),
        (lambda view: view.drop_columns(["parts"]), "'parts' is the exploded column"),
        (lambda view: view.drop_columns(["low"]), r"one function fills them and \['high'\]"),
        (lambda view: view.drop_columns(["nothing"]), "'nothing'"),
        (lambda view: view.drop_columns(["__is_set"]), "'__is_set'"),
        (lambda view: view.drop_columns(view.schema.names), "no other column would be left"),
        (lambda view: view.add_columns({"ocr": udfs.parts}), r"already has columns \['ocr'\]"),
        (lambda view: view.add_columns({"new": (udfs.parts, ["none"])}), r"there is no column \['none'\]"),
        (lambda view: view.add_columns({"new": "random()"}), "random"),
        (lambda view: view.add_columns(["new"]), "by name"),
        (lambda view: view.alter_columns({"id": udfs.parts}), "No UDF computes a column 'id'"),
        (lambda view: view.alter_columns({"ocr": (udfs.parts, ["x"])}), "Type mismatch for column 'ocr'"),
        (lambda view: view.alter_columns({"high": (udfs.parts, ["x"])}), "Type mismatch for column 'low'"),
    ],
)  # fmt: skip
def test_what_a_query_cannot_become_is_refused(table: Table, change: Callable[[View], Any], why: str) -> None:
    columns = {"ocr": deploy("ocr", 1), "language": deploy("language", 1, "ocr")}
    query = table.query().select(["id"]).add_columns({**columns, "parts": udfs.parts, ("low", "high"): udfs.ends})
    view = query.explode("parts").create_materialized_view(connect(table.location.database_uri), "v")
    version = view.lance.version
    with pytest.raises(InvalidInput, match=why):
        change(view)
    assert view.lance.version == version


def test_rows_that_carry_values_of_earlier_code_do_not_count_as_computed_with_the_new_code(
    table: Table, trace: Trace
) -> None:
    view = make_view(table)
    refresh(view)
    deploy("words", 2)
    view.add_columns({"chars": deploy("chars", 1)})
    calls(trace)
    refresh(view, on_code_change="new_rows")  # its checkpoints hold words of version 1 beside the new column
    assert calls(trace) == {"chars": 121}
    refresh(view, on_code_change="recompute")
    assert calls(trace) == {"words": 121}
    assert [row[4] for row in rows(view)] == [value("words", 2, x) for x in range(121)]


def test_an_added_column_waits_while_only_failed_rows_run(table: Table, trace: Trace) -> None:
    view = make_view(table, fails=("words",))
    refresh(view)
    view.add_columns({"chars": deploy("chars", 1)})
    calls(trace)
    refresh(view, errors_only=True)
    assert calls(trace) == {"words": 12}
    deploy("words", 2)
    refresh(view, errors_only=True)
    assert calls(trace) == {"words": 12}
    refresh(view, on_code_change="new_rows")  # the rows of that run have no value of the new column in checkpoints
    assert calls(trace) == {"chars": 121}
    assert [row[5] for row in rows(view)] == [value("chars", 1, x) for x in range(121)]


def test_costs_and_caps_count_the_calls_that_are_made(table: Table, trace: Trace) -> None:
    columns = {"ocr": deploy("ocr", 1, cost=10.0), "words": deploy("words", 1, cost=1.0)}
    query = table.query().select(["id"]).add_columns(columns)
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    refresh(view)
    calls(trace)
    deploy("words", 2, cost=1.0)
    table.add([{"id": 121, "x": 121}])
    plan = view.plan_refresh(on_code_change="recompute")
    assert plan.calls_to_run == {"ocr": 1, "words": 122}
    cost = plan.estimate().cost
    assert cost is not None
    assert tuple(cost) == pytest.approx((132.0, 132.0))
    assert refresh(view, on_code_change="recompute", max_cost=131).state == "PARTIAL"
    assert refresh(view, on_code_change="recompute", max_cost=132).state == "DONE"
    assert calls(trace) == {"ocr": 1, "words": 122}
