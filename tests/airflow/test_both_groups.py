"""What `BackfillTaskGroup` and `RefreshTaskGroup` have in common, run by Airflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup

from airflow_geneva import View
from airflow_geneva.assets import lance_asset
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import make_view, texts
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow


@dataclass(frozen=True)
class Kept:
    """A column or a view of the desk's table, which a task group keeps up to date."""

    desk: Desk
    group: str
    view: View | None = None

    @property
    def name(self) -> str:
        return self.desk.table.name if self.view is None else self.view.name

    def add_group(self, **settings: Any) -> None:
        common = {"inline_below_rows": 10**9, "shard_size": 1}
        if self.view is None:
            BackfillTaskGroup(**{"table": self.name, "column": "n", **common, **settings})
        else:
            RefreshTaskGroup(**{"view": self.name, **common, **settings})

    def go(self, params: dict[str, Any] | None = None, retries: int = 0, **settings: Any) -> Driver:
        with DAG(f"dag_{self.name}", schedule=None, params=params, default_args={"retries": retries}) as dag:
            self.add_group(**settings)
        return Driver.trigger(dag).go()

    @property
    def version(self) -> int:
        return self.desk.table.version if self.view is None else self.view.version

    def values(self) -> dict[str, Any]:
        if self.view is None:
            return {text: value for text, value in self.desk.values().items() if value is not None}
        rows = self.view.to_arrow()
        return dict(zip(rows["text"].to_pylist(), rows["n"].to_pylist(), strict=True))


def keep(desk: Desk, group: str, letters: str, by: str = "length") -> Kept:
    desk.append(letters)
    if group == "backfill":
        desk.define(n=by)
        return Kept(desk, group)
    return Kept(desk, group, make_view(desk, f"view_of_{desk.table.name}", by))


both = pytest.mark.parametrize("group", ["backfill", "refresh"])


@both
@pytest.mark.shows("Retries", "the same, and a shard fails after its last retry")
def test_finish_does_not_retry_what_a_retry_cannot_mend(desk: Desk, group: str) -> None:
    desk.break_at("a00")
    run = keep(desk, group, "a").go(retries=2)
    assert run.tries(f"{group}.finish") == 1
    assert run.tries(f"{group}.shards.apply", 0) == 3


@both
def test_values_that_are_not_as_expected_stay_invisible_and_finish_says_why(desk: Desk, group: str) -> None:
    kept = keep(desk, group, "ab", by="bounded")
    version = kept.version
    run = kept.go(retries=2)
    # The commit of a column checks each shard, and the swap of a view all of them at once.
    committed, rows = {"backfill": ("failed", 10), "refresh": ("success", 20)}[group]
    states = [run.states()[f"{group}.{step}"] for step in ("shards.apply", "shards.commit", "finish")]
    assert (run.state, states) == ("failed", [["success"] * 2, [committed] * 2, "failed"])
    told = f"Expectation between(0, 2) of column 'n' (fail) not met: {rows} of {rows} rows"
    assert told in str(run.errors[f"{group}.finish", -1])
    assert (kept.version, run.tries(f"{group}.finish"), events(f"lance_default/{kept.name}")) == (version, 1, [])


@both
@pytest.mark.shows("Mark", "mark `apply` as success")
@pytest.mark.shows("Mark", "the same in a refresh")
def test_an_apply_that_is_marked_as_success_shows_what_is_complete_with_a_warning(desk: Desk, group: str) -> None:
    """Shards become visible on their own, but a view only as a whole."""
    kept = keep(desk, group, "ab")
    desk.break_at("b03")
    run = kept.go()
    run.mark_success(f"{group}.shards.apply", 1)
    run.clear((f"{group}.shards.commit", 1)).go()
    assert run.state == "success", run.errors
    result, visible = run.xcom(f"{group}.finish"), texts("a") if group == "backfill" else []
    assert (result["state"], result["rows_left"]) == ("PARTIAL", len(texts("ab")) - len(visible))
    assert kept.values() == dict.fromkeys(visible, 3)
    assert len(events(f"lance_default/{kept.name}")) == bool(visible)

    desk.mend()
    desk.calls()
    again = kept.go()
    assert desk.calls() == texts("b")[3:]
    assert again.xcom(f"{group}.finish")["state"] == "DONE"
    assert kept.values() == dict.fromkeys(texts("ab"), 3)


@both
def test_numbers_may_come_out_of_templates(desk: Desk, group: str) -> None:
    kept = keep(desk, group, "abc")
    params = {"version": desk.table.version, "size": 2, "again": False, "nothing": "", "rows": 5}
    desk.append("d")
    own = {
        "backfill": {"read_version": "{{ params.version }}", "checkpoint_interval": "{{ 2.5 }}"},
        "refresh": {"src_version": "{{ params.version }}", "max_rows_per_fragment": "{{ params.rows }}"},
    }
    run = kept.go(
        params,
        shard_size="{{ params.size }}",
        ignore_checkpoints="{{ params.again }}",
        batch_size="{{ params.nothing }}",
        inline_below_rows="{{ 1000 * 1000 }}",
        **own[group],
    )
    assert run.state == "success", run.errors
    assert len(run.xcom(f"{group}.plan")) == 2
    assert desk.calls() == texts("abc")
    assert kept.values() == dict.fromkeys(texts("abc"), 3)
    if kept.view is not None:
        assert [fragment.count_rows() for fragment in kept.view.lance.get_fragments()] == [5] * 6


@pytest.mark.parametrize(
    ("group", "wrong", "told"),
    [
        ("backfill", {"shard_size": "{{ 'many' }}"}, "shard_size='many' is not a whole number"),
        ("backfill", {"checkpoint_interval": "soon"}, "checkpoint_interval='soon' is not a number"),
        ("backfill", {"ignore_checkpoints": "perhaps"}, "ignore_checkpoints='perhaps' is neither true nor false"),
        ("backfill", {"on_code_change": "{{ 'perhaps' }}"}, "on_code_change='perhaps' is unknown"),
        ("backfill", {"column": "{{ '' }}"}, "column='' is empty"),
        ("backfill", {"table": "elsewhere"}, "There is no table 'elsewhere'"),
        ("backfill", {"column": "m"}, "Column 'm' is not defined in table"),
        ("backfill", {"udf": "no_such_module:f"}, "importing module 'no_such_module' raised"),
        ("backfill", {"udf": "geneva_dag_udfs:upper"}, "Type mismatch for column 'n'"),
        ("backfill", {"where": "nonsense > 1"}, "nonsense"),
        ("backfill", {"read_version": 99}, "Version 99"),
        ("backfill", {"on_unknown_values": "{{ 'keep' }}"}, "on_unknown_values='keep' is unknown"),
        ("refresh", {"view": "{{ '' }}"}, "view='' is empty"),
        ("refresh", {"view": "elsewhere"}, "There is no table 'elsewhere'"),
        ("refresh", {"src_version": 99}, "Version 99"),
        ("refresh", {"src_version": "new"}, "src_version='new' is not a whole number"),
        ("refresh", {"on_unknown_values": "{{ 'fill' }}"}, "is for columns"),
        ("refresh", {"errors_only": "{{ 1 == 1 }}"}, "it was never refreshed"),
        ("refresh", {"max_rows_per_fragment": "{{ 0 }}"}, "max_rows_per_fragment=0 is not valid"),
        ("refresh", {"shard_size": "{{ 0 }}"}, "shard_size=0 is not valid"),
    ],
)
def test_what_cannot_be_planned_is_said_before_anything_starts(
    desk: Desk, group: str, wrong: dict[str, Any], told: str
) -> None:
    run = keep(desk, group, "a").go(**wrong)
    assert run.state == "failed"
    assert told in run.error(f"{group}.plan")
    assert run.states()[f"{group}.shards.apply"] == "upstream_failed"
    assert "There is no plan" in run.error(f"{group}.finish")
    assert desk.calls() == []


@both
def test_a_group_inside_another_one_shows_its_asset_and_announces_a_templated_one(desk: Desk, group: str) -> None:
    kept = keep(desk, group, "a")
    with DAG(f"plain_{kept.name}", schedule=None) as plain, TaskGroup("outer"):
        kept.add_group()
    assert plain.get_task(f"outer.{group}.finish").outlets == [lance_asset(kept.name)]
    target = {"table" if kept.view is None else "view": "{{ params.target }}"}
    with DAG(f"dag_{kept.name}", schedule=None, params={"target": kept.name}) as dag, TaskGroup("outer"):
        kept.add_group(**target)
    for _ in range(2):
        run = Driver.trigger(dag).go()
        assert run.state == "success", run.errors
    assert kept.values() == dict.fromkeys(texts("a"), 3)
    [event] = events(f"lance_default/{kept.name}")
    assert event["rows_computed"] == len(texts("a"))
