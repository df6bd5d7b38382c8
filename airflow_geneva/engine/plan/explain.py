"""Describe a plan as text."""

from __future__ import annotations

from itertools import islice

from airflow_geneva.engine.checkpoint.provenance import version_label
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.estimate import FEW_ROWS, starting_spark
from airflow_geneva.engine.plan.due_rows import BEFORE
from airflow_geneva.engine.plan.model import JobSpec, Plan, RefreshSpec

_LISTED = 8


def explain(plan: Plan) -> str:
    """Describe which rows would run, which would not, and why; a few lines for a table of any size."""
    spec = plan.spec
    lines = [
        spec.heading,
        f"  {counted(plan.rows_total, 'row')}: {plan.rows_pending:,} pending, {plan.rows_skipped:,} with nothing to do",
    ]
    for tally in plan.reason_counts:
        rows, fragments = _aligned(tally.rows, "row"), _aligned(tally.fragments, "fragment")
        lines.append(f"    {rows:>19}  {fragments:>18}  {tally.reason}")
    if not plan.shards and plan.swap is not None and plan.swap.gone:
        lines.append("  Nothing to compute, no Spark; rows that are no longer in the query's result leave the view.")
    elif not plan.shards:
        lines.append("  Nothing to do: no Spark, no new version.")
    else:
        held = plan.rows_pending - plan.rows_to_run - spec.rows_beyond
        kept = f" ({counted(held, 'row')} from checkpoints)" if held else ""
        count = sum(len(shard.fragments) for shard in plan.shards)
        lines.append(f"  {counted(count, 'fragment')} in {counted(len(plan.shards), 'shard')}{kept}")
        shown = (task for shard in plan.shards for task in shard.fragments[:_LISTED])
        for fragment in islice(shown, _LISTED):
            gaps = ", ".join(_span(a, b) for a, b in list(fragment.missing_selected)[:4])
            more = " ..." if len(fragment.missing_selected.starts) > 4 else ""
            what = f"{fragment.status}, {fragment.reason}; rows missing: {gaps or '-'}{more}"
            lines.append(f"    fragment {fragment.id}: {what}")
        if count > _LISTED:
            lines.append(f"    and {counted(count - _LISTED, 'more fragment')}")
    lines += _calls(plan) if plan.shards else []
    lines += _deduplicated(spec) if plan.shards else []
    needed = {one: None for udf in spec.udfs.values() for one in udf.requirements or ()} if plan.shards else {}
    lines += [f"  needs {', '.join(needed)} where it is computed"] if needed else []
    if plan.shards and isinstance(spec, RefreshSpec) and spec.shuffles:
        lines.append(f"  On Spark, a shuffle brings the rows of {counted(plan.rows_to_run, 'group')} together.")
    if spec.rows_beyond:
        caps = [spec.sizing.frags] if spec.sizing.frags else []
        if spec.most_rows is not None:
            caps.append(f"max_rows={spec.most_rows}" if spec.most_rows == spec.sizing.max_rows else "max_cost")
        cap = ", ".join(caps)
        lines.append(f"  {cap}: {counted(spec.rows_beyond, 'row')} left for the next run")
    lines += _of_other_versions(plan)
    if plan.shards and plan.estimator is not None:
        expected = plan.estimate()
        where = "in this process" if expected.runner == RunnerName.INLINE else "on Spark"
        lines.append(f'  runner="auto" computes it {where}: {expected.why}')
        if expected.slot_seconds is not None or expected.cost is not None:
            lines.append(f"  Estimate: {expected}")
        elif spec.reports_cost:
            lines.append("  Cost: as calls will report it; plan.estimate(sample=20) calls the service for 20 rows.")
        if expected.runner == RunnerName.SPARK and expected.start_seconds != 0 and expected.rows < FEW_ROWS:
            lines.append(f"  Note: {starting_spark(expected.rows)}")
    lines.extend(f"  Note: {note}" for note in (*plan.notes, *plan.savings))
    return "\n".join(lines)


def _calls(plan: Plan) -> list[str]:
    """Say which columns run on how many rows, if rows of a view keep some of their values."""
    if not plan.spec.calls_differ:
        return []
    runs = ", ".join(f"{name} on {counted(rows, 'row')}" for name, rows in plan.calls_to_run.items())
    return [f"  runs {runs or 'no function'}; the view's other values of these rows are carried"]


def _of_other_versions(plan: Plan) -> list[str]:
    """Say which rows hold values of other code, or values computed from columns that are no longer there."""
    again, found = plan.inputs_again, [(version, counted(rows, "row")) for version, rows in plan.rows_by_other_version]
    return [
        f"  {again[version]}: {rows} {BEFORE}"
        if version in again
        else f"  values of UDF version {version_label(version)}: {rows}"
        for version, rows in found
    ]


def _deduplicated(spec: JobSpec) -> list[str]:
    cache = "" if spec.ignore_checkpoints else ", also those that earlier jobs computed: _checkpoints/values"
    udfs = ((column, udf.name) for column, udf in spec.udfs.items() if udf.dedup)
    return [f"  {column}: equal inputs of {name} are called once (dedup){cache}" for column, name in udfs]


def _aligned(count: int, noun: str) -> str:
    """Format a count so that its digits align with those of other right-aligned counts."""
    return counted(count, noun) + (" " if count == 1 else "")


def _span(start: int, end: int) -> str:
    """Format offsets ``[start, end)`` with an inclusive end."""
    return f"{start} to {end - 1}" if end - start > 1 else f"{start}"
