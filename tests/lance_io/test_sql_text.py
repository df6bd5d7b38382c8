"""SQL text that others wrote: tokenized in linear time, and bounded before native code sees it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import airflow_geneva
from airflow_geneva import Table
from airflow_geneva.engine.lance_io import sql_text
from airflow_geneva.engine.lance_io.filters import check_where, freeze_where, volatile_functions, where_columns
from airflow_geneva.engine.lance_io.sql_text import MOST_IN_A_TERM, MOST_TOKENS, MOST_VALUES, read_sql
from airflow_geneva.engine.views.definition import ViewDefinition
from airflow_geneva.errors import InvalidInput
from tests.support.counting import triple

MakeTable = Callable[..., Table]
_OPERATORS = MOST_IN_A_TERM // 2 - 2

# What ends a process of DataFusion, or takes its memory or minutes; a line for what the next person finds.
TOO_LARGE = {
    "a sum of 3,000 terms": "+".join(["id"] * 3_000) + " > 0",
    "a sum of 3,000 terms in brackets": "(" + "+".join(["id"] * 3_000) + ") > 0",
    "a sum in each of its brackets": "+".join(["id"] * 90) + "+(" + "+".join(["id"] * 90) + ") > 0",
    "casts in a row": "id" + "::bigint" * 3_000 + " > 0",
    "tests in a row": "id" + " IS NULL" * 3_000,
    "elements of elements": "l" + "[1]" * 3_000 + " IS NULL",
    "texts put together": "||".join(["note"] * 3_000) + " <> ''",
    "signs": "- " * 3_000 + "id > 0",
    "negations": "NOT " * 3_000 + "id > 0",
    "brackets": "(" * 3_000 + "id" + ")" * 3_000 + " > 0",
    "calls": "abs(" * 3_000 + "id" + ")" * 3_000 + " > 0",
    "conditions": " OR ".join(f"id = {n}" for n in range(20_000)),
    "a sum hidden behind conditions": "id = 1 OR " * 100 + "+".join(["id"] * 3_000) + " > 0",
    "a sum between comments": "/* ( */+-- (\n".join(["id"] * 3_000) + " > 0",
    "a long text": "note = 'x" + "x" * 1_000_000 + "'",
    "a long list": "id IN (" + ",".join(map(str, range(60_000))) + ")",
    "a repeated text": "length(repeat('x', 10000000)) > id",
    "a repeated text in another": "length(repeat(repeat('x', 5000), 5000)) > id",
    "a product of repetitions": "length(repeat('x', 5000 * 5000)) > id",
    "a number as a text": "length(repeat('x', '10000000')) > id",
    "a function in backticks": "length(`repeat`('x', 1e7)) > id",
    "a padded text": "length(lpad(note, 10000000)) > id",
    "a series": "array_length(range(0, 100000000)) > id",
    "many digits": "length(repeat('x', 1" + "0" * 500 + ")) > id",
}

# What users write; it stays possible.
LEGITIMATE = {
    "a list of 10,000 ids": "id IN (" + ", ".join(map(str, range(10_000))) + ")",
    "a list of 10,000 keys": "note IN (" + ", ".join(f"'{n:036d}'" for n in range(10_000)) + ")",
    "a list of negative numbers and dates": "id IN (-1, -2) AND d IN (date '2024-01-01', date '2024-01-02')",
    "2,000 conditions": " OR ".join(f"id = {n}" for n in range(2_000)),
    "30 columns put together": " || ' ' || ".join(f"note{n}" for n in range(30)) + " <> ''",
    "a sum of 90 terms": "+".join(["id"] * 90) + " > 0",
    "20 brackets": "(" * 20 + "id" + ")" * 20 + " > 0",
    "a padded number": "lpad(note, 20, '0') = '00000000000000000001'",
    "a text of 100,000 characters": "note <> '" + "x" * 100_000 + "'",
}


@pytest.mark.slow
@pytest.mark.parametrize("sql", TOO_LARGE.values(), ids=TOO_LARGE)
def test_sql_that_would_end_the_process_is_refused_by_its_size(sql: str) -> None:
    for use in (read_sql, freeze_where, volatile_functions, lambda given: where_columns(given, ["id"])):
        with pytest.raises(InvalidInput, match="is the limit") as refused:
            use(sql)
        assert len(str(refused.value)) < 1_000


@pytest.mark.slow
def test_every_way_to_a_table_refuses_it(make_table: MakeTable) -> None:
    table = make_table()
    table.add_columns({"y": triple})
    stored = json.loads(table.query().where("id > 1").select({"x": "id + 1"}).definition().to_json())
    for sql in TOO_LARGE.values():
        column = {**stored["columns"][0], "expression": sql}
        ways: list[Callable[[], object]] = [
            partial(check_where, table.lance, sql),
            table.query().where(sql).to_arrow,
            table.query().select({"x": sql}).output_schema,
            table.query().where(sql).definition,
            partial(table.count_rows, sql),
            partial(table.plan_backfill, "y", where=sql),
            # As somebody stored them in a view.
            partial(ViewDefinition.from_json, json.dumps({**stored, "where": sql})),
            partial(ViewDefinition.from_json, json.dumps({**stored, "columns": [column]})),
        ]
        for way in ways:
            with pytest.raises(InvalidInput, match="is the limit"):
                way()


@pytest.mark.parametrize("sql", LEGITIMATE.values(), ids=LEGITIMATE)
def test_sql_that_users_write_is_read(sql: str) -> None:
    assert freeze_where(sql) == sql


_IN_A_CHILD = """
import json, sys
import lance, pyarrow as pa
rows = {"id": pa.array(range(10), pa.int64()), "note": ["a"] * 10, "l": pa.array([[1]] * 10), "x": [1.5] * 10}
dataset = lance.write_dataset(pa.table(rows), "memory://")
for sql in json.load(sys.stdin):
    try:
        scanner = dataset.scanner(filter=sql, columns=["id"])
        scanner.explain_plan()
        scanner.to_table()
        dataset.scanner(columns={"value": f"({sql})"}, with_row_id=True).to_table()
    except ValueError as error:
        assert "no field" in str(error).lower() or "parser" in str(error) or "not" in str(error), error
    print(sql[:20], flush=True)
"""


@pytest.mark.slow
def test_native_code_survives_the_largest_sql_that_is_read() -> None:
    """On threads of Lance, whose stack has 2 MB."""
    calls = "abs(" * 38 + "+".join(["id"] * (_OPERATORS - 38)) + ")" * 38 + " > 0"
    largest = [
        "+".join(["id"] * _OPERATORS) + " > 0",
        "*".join(["x"] * _OPERATORS) + " > 0",
        "||".join(["note"] * _OPERATORS) + " <> ''",
        "id" + "::bigint" * (_OPERATORS - 1) + " > 0",
        "id" + " IS NULL" * (_OPERATORS - 1),
        " OR ".join(f"id = {n}" for n in range(MOST_TOKENS // 4)),
        " AND ".join(["NOT id IS NULL"] * (MOST_TOKENS // 5)),
        "id IN (" + ",".join(map(str, range(MOST_VALUES))) + ")",
        calls,
        "length(repeat('x', 9999)) > id",
    ]
    for sql in largest:
        read_sql(sql)
    child = subprocess.run(
        [sys.executable, "-c", _IN_A_CHILD], input=json.dumps(largest), capture_output=True, text=True, check=False
    )
    assert (child.returncode, child.stdout.count("\n")) == (0, len(largest)), child.stderr[-2_000:]


@pytest.mark.parametrize(
    "piece", ["-- ", "/* ", "/*", "'", "''", '"', "`", "(", "--x", ". ", "x. ", "now(/*", "1e", "$"]
)
def test_reading_takes_linear_time(piece: str) -> None:
    sql = piece * (90_000 // len(piece)) + " x"
    began = time.process_time()
    with suppress(InvalidInput):
        read_sql(sql)
    assert time.process_time() - began < 5


def test_a_filter_of_comment_signs_ends() -> None:
    """Eighty characters stopped all threads of the API server."""
    sql = "x" + "-- " * 27 + "x"
    assert len(sql) < 100
    assert where_columns("now" + sql, ["x"]) == []
    assert where_columns(f"{sql}\n and y = now(", ["x", "y"]) == ["x", "y"]


def test_tokens_keep_their_places() -> None:
    sql = "`a``b` >= 1.5e3 AND s . t(/* ) */) <> 'it''s' -- x"
    tokens = read_sql(sql)
    assert [token.text for token in tokens] == [
        "`a``b`", ">=", "1.5e3", "AND", "s", ".", "t", "(", ")", "<>", "'it''s'",
    ]  # fmt: skip
    assert all(sql[token.start : token.end] == token.text for token in tokens)
    assert (tokens[0].name, tokens[6].field, tokens[6].call, tokens[6].empty) == ("a`b", True, True, True)
    assert sql[tokens[6].start : tokens[6].call_end] == "t(/* ) */)"


def test_no_module_that_reads_sql_matches_it_by_regular_expressions() -> None:
    """Except the door itself, and the module that reads pylance's messages."""
    package = Path(airflow_geneva.__file__).parent
    door = {Path(sql_text.__file__), package / "engine" / "lance_io" / "sql_errors.py"}
    wrong = []
    for file in sorted(set(package.rglob("*.py")) - door):
        names = set[str]()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.rpartition(".")[2])
        if "re" in names and names & {"sql_text", "filters"}:
            wrong.append(file.name)
    assert wrong == []
