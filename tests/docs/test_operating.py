"""The tests that the page on operating names exist, and its DAG is what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.named_tests import is_test, named_tests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text().partition("## Sizing")[0]
SHOWN = (ROOT / "docs" / "what-tests-show.md").read_text()


def lines_of(page: str) -> list[str]:
    """What a user does, line by line, below the headings of the sections."""
    return re.findall(r"^(?:#+ (?!What)(.+)|\| (?!you \|)(.+?) \| .+ \|)$", page, re.MULTILINE)


def test_every_line_names_a_test() -> None:
    lines = re.findall(r"^\| (?!you \|).+ \|$", SHOWN, re.MULTILINE)
    assert len(lines) >= 30, "the tables were damaged"
    assert [line for line in lines if not named_tests(line)] == []


def test_both_pages_have_the_same_lines() -> None:
    shown = lines_of(SHOWN)
    assert [line for line in lines_of(PAGE) if line in shown or line[1]] == shown


@pytest.mark.parametrize(("file", "test"), named_tests(SHOWN))
def test_the_test_exists(file: str, test: str) -> None:
    assert is_test(file, test)


@pytest.mark.airflow
def test_only_the_apply_tasks_of_the_sized_dag_are_in_the_pool() -> None:
    dag = runpy.run_path(str(ROOT / "docs" / "snippets" / "sizing_dag.py"))["dag"]
    assert {task.task_id for task in dag.tasks if task.pool == "spark"} == {"backfill.shards.apply"}
    apply = dag.get_task("backfill.shards.apply")
    assert (apply.priority_weight, apply.max_active_tis_per_dagrun, apply.retries) == (10, 2, 2)
    assert dag.get_task("backfill.plan").sizing["shard_size"] == 500
