"""Filters: frozen in time, reduced to their columns, and refused with the engine's own words."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva import connect, udf
from airflow_geneva.engine.lance_io.filters import check_where, freeze_where, selected_offsets, where_columns
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table

MOMENT = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
STAMP = "timestamp '2031-05-06 07:08:09.123456'"


@pytest.mark.parametrize(
    ("asked", "frozen"),
    [
        ("ts < now()", f"ts < {STAMP}"),
        ("ts < NOW( )", f"ts < {STAMP}"),
        ("ts < current_timestamp", f"ts < {STAMP}"),
        ("ts < current_timestamp()", f"ts < {STAMP}"),
        ("d = current_date", "d = date '2031-05-06'"),
        ("d = today()", "d = date '2031-05-06'"),
        ("note = 'now()' and ts < now()", f"note = 'now()' and ts < {STAMP}"),
        ("note = 'it''s now()'", "note = 'it''s now()'"),
        ("`current_date` > 3", "`current_date` > 3"),
        ("nowhere > 3 and known() = 1", "nowhere > 3 and known() = 1"),
        ("  id > 3 ", "id > 3"),
        ("`it's` > 0 and ts < now() and note = ''", f"`it's` > 0 and ts < {STAMP} and note = ''"),
        ("ts < now(/* it's */)", f"ts < {STAMP}"),
        ("ts < `now`() -- it's now()\n and id > 3", f"ts < {STAMP} -- it's now()\n and id > 3"),
        ("s.current_date > 3 and a#current_date > 3", "s.current_date > 3 and a#current_date > 3"),
    ],
)
def test_the_clock_stands_still_for_a_whole_run(asked: str, frozen: str) -> None:
    assert freeze_where(asked, MOMENT) == frozen


def test_a_moment_in_another_time_zone_is_the_same_moment() -> None:
    there = MOMENT.astimezone(timezone(timedelta(hours=5)))
    assert freeze_where("ts < now()", there) == freeze_where("ts < now()", MOMENT)


@pytest.mark.parametrize("empty", [None, "", "   "])
def test_an_empty_filter_is_none(empty: str | None) -> None:
    assert freeze_where(empty) is None


@pytest.mark.parametrize(
    "where",
    ["random() < 0.5", "id > 3 and uuid() = note", "rand() < 0.5", "`random`/* */() < 0.5", "`it's` > random() -- '"],
)
def test_dice_are_refused_because_no_second_task_would_throw_the_same(where: str) -> None:
    with pytest.raises(InvalidInput, match="random values"):
        freeze_where(where)


def test_a_word_in_a_text_is_no_die() -> None:
    assert freeze_where("note = 'random()'") == "note = 'random()'"


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("id > 3", ["id"]),
        ("ID > 3", ["id"]),
        ("`odd name` = 1 or s.part = 'id'", ["odd name", "s"]),
        ("größe > 1", ["größe"]),
        ("id IS NULL AND note LIKE '%größe%'", ["id", "note"]),
        ("1 = 1", []),
        (None, []),
        ("`it's` > 0 and note = 'x'", ["note", "it's"]),
        ("note = 'it''s' and `it's` = 'id'", ["note", "it's"]),
        ('note = "it\'s" and id = 1', ["id", "note", "it's"]),
        ("id = 1 -- it's\n and note = 'x'", ["id", "note"]),
        ("id = 1 /* `it's */ and note = 'x'", ["id", "note"]),
        ("s.`it's` = 1 and s['note'] = 'id'", ["s", "it's"]),
        ("`a``b` = 1 and a#b = 2 and हि = 3", ["a`b", "a#b", "हि"]),
    ],
)
def test_every_column_a_filter_may_read_is_found(where: str | None, read: list[str]) -> None:
    assert where_columns(where, ["id", "odd name", "s", "größe", "note", "it's", "a`b", "a#b", "हि"]) == read


_PIECES = [
    "a",
    "B",
    "_",
    "1",
    " ",
    "'",
    "`",
    '"',
    "#",
    "@",
    "$",
    "--",
    "/*",
    "*/",
    "(",
    "ß",
    "日",
    "हि",
    "select",
    "now()",
]
_NAMES = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=4).map("".join).filter(lambda name: name.strip())
_TEXTS = st.lists(st.sampled_from([*_PIECES, "''", "n1", "s.part"]), max_size=4).map("".join)


@st.composite
def _filters(draw: st.DrawFn, names: list[str]) -> str:
    """Conditions on some of the columns, with texts and comments between them."""
    terms = []
    for name in draw(st.lists(st.sampled_from([*names, "s.part", "s['part']", "S.`part`"]), min_size=1, max_size=3)):
        plain = name.lower().startswith("s") and "part" in name
        plain = plain or (re.fullmatch(r"(?!select$)[^\W\d][\w#@$]*", name) and draw(st.booleans()))
        text = draw(_TEXTS)
        quote = draw(st.sampled_from("'\""))
        written = quote + (text.replace("'", "''") if quote == "'" else text.replace('"', '""')) + quote
        terms.append(f"{name if plain else f'`{name}`'} <> {written}")
    comments = ["", " ", "/* it's `n1` */", "-- it's \" `n1\n"]
    return "".join(f"{' AND ' if at else ''}{draw(st.sampled_from(comments))}{term}" for at, term in enumerate(terms))


@given(data=st.data())
def test_no_column_that_the_engine_reads_is_missed_whatever_the_names(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = data.draw(st.lists(_NAMES, min_size=2, max_size=5, unique_by=str.lower))
    names = ["n1", *(name for name in names if name.lower() not in ("n1", "s"))]
    rows = {**{name: ["x"] for name in names}, "s": [{"part": "x"}]}
    dataset = lance.write_dataset(pa.table(rows), tmp_path_factory.mktemp("names") / "t.lance")
    where = data.draw(_filters([name for name in names if "`" not in name]))
    check_where(dataset, where)
    plan = dataset.scanner(filter=where, columns=[], with_row_id=True).explain_plan()
    listed = re.search(r"projection=\[(.*)\], num_fragments=", plan)
    assert listed is not None
    read = {name.partition(".")[0] for name in listed[1].split(", ")} - {""}
    assert read
    assert read <= set(where_columns(where, dataset.schema.names))


@pytest.fixture
def table(tmp_path: Path) -> Table:
    data = pa.table(
        {
            "id": pa.array(range(10), pa.int64()),
            "ts": pa.array([0, None] * 5, pa.timestamp("us")),
            "tz": pa.array([0, 1 << 52] * 5, pa.timestamp("us", "UTC")),
            "d": pa.array([0, 60_000] * 5, pa.date32()),
        }
    )
    return connect(tmp_path).create_table("docs", data, max_rows_per_file=5)


@pytest.mark.parametrize(
    "where",
    ["id", "id + 1", "nosuch > 3", "id >", "id = 'a'", "count(*) > 1", "id in (select 1)", "NULL", "nosuch(id)"],
)
def test_a_filter_that_makes_no_sense_is_refused_with_the_engines_words(table: Table, where: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_where(table.lance, where)
    message = str(caught.value)
    assert message.startswith(f"The filter {where!r} is not valid for columns id, ts, tz, d: ")
    assert message.endswith("Write a condition as after WHERE in SQL.")
    assert "/rust/" not in message


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("idd > 1", "d: No field named idd. Did you mean 'id'? Write"),
        ("id = blue", "d: No field named blue; a text stands in single quotes. Write"),
        ("id >", "d: Expected: an expression, found: EOF. Write"),
        ("1 / id > 0", "d: SQL divides by zero in a row. Write NULLIF(column, 0) for a divisor that may be 0. Write"),
        ("id > 'a'", "d: Error resolving filter expression id > 'a': Received literal"),
    ],
)
def test_a_mistake_in_a_filter_is_told_without_what_is_the_engines_own(table: Table, where: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_where(table.lance, where)
    assert said in str(caught.value)
    assert caught.value.__suppress_context__, "pylance's error would be a second traceback"


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("ts < now()", 5),
        ("tz < now()", 5),
        ("d <= current_date", 5),
        ("d <= today()", 5),
        ("id % 3 = 0", 4),
        ("ts IS NULL", 5),
        ("false", 0),
    ],
)
def test_a_frozen_filter_selects_what_it_would_have_selected(table: Table, where: str, rows: int) -> None:
    frozen = freeze_where(where)
    assert frozen is not None
    check_where(table.lance, frozen)
    found = selected_offsets(table.lance, [0, 1], frozen)
    assert sum(len(part) for part in found.values()) == rows == table.count_rows(where)


def test_offsets_are_physical_and_leave_deleted_rows_out(table: Table) -> None:
    table.lance.delete("id IN (0, 1, 6)")
    assert selected_offsets(table.lance, [0, 1], "id < 8") == {
        0: Ranges.from_offsets([2, 3, 4]),
        1: Ranges.from_offsets([0, 2]),
    }
    assert selected_offsets(table.lance, [1], "id < 8") == {1: Ranges.from_offsets([0, 2])}
    assert selected_offsets(table.lance, [], "id < 8") == {}


def test_a_column_that_sql_cannot_name_stands_in_the_way_of_no_filter(tmp_path: Path) -> None:
    db = connect(tmp_path)
    table = db.create_table("odd", pa.table({"a`b": [1, 2, 3], "id": [1, 2, 3]}))
    table.add_columns({"n": negated})
    assert table.backfill("n", where="id > 1", runner="inline").rows_computed == 2
    query = table.query().where("id > 1").select({"twice": "id * 2", "one": "1"})
    assert query.to_arrow().to_pydict() == {"twice": [4, 6], "one": [1, 1]}
    assert query.where("id > 5").to_arrow().num_rows == 0
    view = query.select({"one": "1"}).create_materialized_view(db, "ones")
    view.refresh(runner="inline")
    assert view.to_arrow().to_pydict() == {"one": [1, 1]}


@udf(data_type=pa.int64(), input_columns=["id"])
def negated(id: int) -> int:
    return -id
