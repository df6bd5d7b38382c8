"""The cap on the rows of a job: a plan with more rows to run is cut, and the rest is left for the next run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import Plan, RefreshSpec
from airflow_geneva.plan.shard import FragmentWork, Shard, Works


def cap_rows(plan: Plan) -> Plan:
    """Cut a plan to ``max_rows`` rows that the UDF runs on, or to what ``max_cost`` pays for; checkpoints do not count.

    Raises:
        InvalidInput: there is a ``max_cost``, and no price.
    """
    work = plan.work
    if work.sizing.max_cost is not None and not (work.sizing.price_per_slot_hour or work.cost_per_row):
        raise InvalidInput(
            "max_cost needs a price: price_per_slot_hour, in Airflow [geneva] price_per_slot_hour, or @udf(cost=...)."
        )
    most = work.most_rows
    if most is None or plan.rows_to_run <= most:
        return plan
    kept = list[Shard]()
    for shard in plan.shards:
        rows = shard.rows_to_run
        works = shard.fragments if rows <= most else Works(_cut(shard.fragments, most, isinstance(work, RefreshSpec)))
        most = max(most - rows, 0)
        if len(works):
            kept.append(Shard(len(kept), works))
    left = sum(shard.rows for shard in plan.shards) - sum(shard.rows for shard in kept)
    return replace(plan, shards=tuple(kept)).with_work(rows=work.rows - left, rows_beyond=left)


def _cut(works: Works, most: int, of_view: bool) -> Iterator[FragmentWork]:
    """Yield the fragments that fit, a part of the one after them, and those that are staged."""
    last = -1
    for work in works:
        last = work.id
        if work.staged or work.rows_to_run <= most:
            most -= 0 if work.staged else work.rows_to_run
            yield work
            continue
        if part := _first(work, most):
            yield replace(part, partial=of_view)
        break
    yield from (work for work in works.single if work.id > last and work.staged)


def _first(work: FragmentWork, most: int) -> FragmentWork | None:
    """Return the work without missing rows beyond so many, and None if no row is left."""
    rows = Ranges.from_offsets(work.missing_selected.offsets()[:most]) if most else Ranges.empty()
    # Rows between them that a filter does not select are looked at, too.
    missing = work.missing.within(0, int(rows.ends[-1])) if rows else rows
    due = (work.due - work.missing) | missing
    count = len(due if work.selected is None else due & work.selected)
    return replace(work, due=due, missing=missing, rows=count) if due else None
