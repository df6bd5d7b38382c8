"""A backfill or a refresh as a task group: plan, apply and commit per shard, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from airflow.sdk import BaseOperator, TaskGroup, XComArg, task_group

from airflow_geneva.assets import lance_asset
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import is_template
from airflow_geneva.operators.apply import ApplyOperator
from airflow_geneva.operators.commit import CommitOperator
from airflow_geneva.operators.finish import FinishOperator
from airflow_geneva.operators.plan import PlanBackfillOperator, PlanOperator
from airflow_geneva.operators.plan_load import PlanLoadOperator
from airflow_geneva.operators.plan_refresh import PlanRefreshOperator

if TYPE_CHECKING:
    from airflow.sdk import DAG
    from typing_extensions import Unpack


_ONE_TASK = "apply= must make and return one task that is not mapped, with task_id='apply'."


class Sizes(TypedDict, total=False):
    """Sizes for the plan task; the fields are those of :class:`airflow_geneva.engine.plan.sizing.Sizing`."""

    concurrency: int | str | None
    intra_applier_concurrency: int | str | None
    batch_size: int | str | None
    checkpoint_size: int | str | None
    min_checkpoint_size: int | str | None
    max_checkpoint_size: int | str | None
    checkpoint_interval: float | str | None
    checkpoint_cost: float | str | None
    task_size: int | str | None
    task_shuffle_diversity: int | str | None
    shard_size: int | str | None
    num_frags: int | str | None
    skip_frags: int | str | None
    max_rows: int | str | None
    max_seconds: float | str | None
    max_cost: float | str | None
    num_cpus: float | str | None
    num_gpus: float | str | None
    memory: int | str | None


class GroupArguments(Sizes, total=False):
    """Arguments that both groups have.

    Args:
        lance_conn_id: the Airflow connection of the database; by default `lance_default`.
        database: another URI to use with that connection's storage options.
        spark_conn_id: the Airflow connection of the Spark master; by default `spark_default`.
        inline_below_rows: a shard with fewer rows to run is computed in its task, without Spark; by default
            `[geneva] inline_below_rows`, which is 0.
        openai_conn_id: the Airflow connection of a model service: functions get its password and host as
            `OPENAI_API_KEY` and `OPENAI_BASE_URL`. By default they get the worker's variables.
        max_active_shards: maximum number of shards that are computed at once; by default 1.
        spark_submit: arguments for `ApplyOperator`, which are those of `SparkSubmitOperator`.
        on_partial: what `finish` does if rows are left for the next run; see `OnPartial`. By
            default `[geneva] on_partial`, which is `warn`.
        approve_above: limits by `rows`, `seconds`, `slot_seconds` or `cost`. If an estimate of a plan is above its
            limit, or unknown, the plan waits in a task `approve` for an approval; other plans pass this task.
        apply: a function that takes a shard and returns the task that computes it; by default an `ApplyOperator`. The
            task must not be mapped and must have the id `apply`; see `spark_application` and `compute_shard`.
        prefix_group_id, parent_group, dag, default_args, tooltip, doc_md, ui_color, ui_fgcolor: as for `TaskGroup`.
        add_suffix_on_collision, group_display_name: as for `TaskGroup`.
    """

    lance_conn_id: str | None
    database: str | None
    spark_conn_id: str | None
    inline_below_rows: int | str | None
    openai_conn_id: str | None
    max_active_shards: int
    spark_submit: Mapping[str, Any] | None
    on_partial: str | None
    approve_above: Mapping[str, float | str] | None
    apply: Callable[[Any], Any] | None
    prefix_group_id: bool
    parent_group: TaskGroup | None
    dag: DAG
    default_args: dict[str, Any]
    tooltip: str
    doc_md: str | None
    ui_color: str
    ui_fgcolor: str
    add_suffix_on_collision: bool
    group_display_name: str


class _ShardGroup(TaskGroup):
    """Base of the two task groups: creates their tasks.

    Args:
        plan: class of the plan task.
        target: name of the table or view.
        asked: arguments of the plan task, without the sizes.
        source: the table that Airflow shows as the inlet of the view's asset.

    Raises:
        InvalidInput: no shard could run.
    """

    def __init__(
        self,
        group_id: str,
        plan: type[PlanOperator],
        target: str,
        asked: Mapping[str, Any],
        source: str | None = None,
        **shared: Unpack[GroupArguments],
    ) -> None:
        given: dict[str, Any] = dict(shared)
        # A size of None overrides `default_args`; a connection of None is taken from `default_args`.
        sizes = {name: given.pop(name, None) for name in Sizes.__annotations__}
        place = _not_none(given, "lance_conn_id", "database")
        applied = _not_none(given, "spark_conn_id", "inline_below_rows")
        service = _not_none(given, "openai_conn_id")
        ending = _not_none(given, "on_partial")
        applied |= given.pop("spark_submit", None) or {}
        most, make_apply = given.pop("max_active_shards", 1), given.pop("apply", None)
        approve_above = given.pop("approve_above", None)
        super().__init__(group_id=group_id, **given)
        with self:
            planned = plan(task_id="plan", approve_above=approve_above, **asked, **sizes, **place, **service)
            approve = None if approve_above is None else _make_approve(planned)
            # An asset must be known while Airflow parses the DAG.
            unknown = source is None or is_template(source) or is_template(planned.lance_conn_id)
            inlets = [] if unknown else [lance_asset(str(source), planned.lance_conn_id)]
            finish = FinishOperator(
                task_id="finish", plan_task_id=planned.task_id, table=target, inlets=inlets,
                approve_task_id=None if approve is None else approve.task_id, **ending, **place,
            )  # fmt: skip
            if next(self.iter_mapped_task_groups(), None) is not None:
                raise InvalidInput(
                    f"The group of task {planned.task_id!r} is inside a mapped task group. It maps its own shards, and "
                    "Airflow runs no mapped group inside another. Create a group for each table in a Python loop, or "
                    "trigger a DAG for each: TriggerDagRunOperator.partial(...).expand(conf=...)."
                )
            if isinstance(most, int) and most < 1:
                raise InvalidInput(f"max_active_shards={most} is not valid. Give at least 1.")

            if make_apply is not None and applied:
                raise InvalidInput(f"{', '.join(sorted(applied))} is for ApplyOperator, which apply= replaces.")

            # One mapped group, not two mapped tasks: with two, one failed apply would block every commit.
            shards = approve or planned
            title = f"{{{{ ti.xcom_pull(task_ids='{shards.task_id}')[ti.map_index].title }}}}"

            @task_group(group_id="shards")
            def compute(shard: Any) -> None:
                commit = CommitOperator(task_id="commit", shard=shard, needs_result=make_apply is not None, **place)
                if make_apply is None:
                    at_once = {"max_active_tis_per_dagrun": most}
                    apply: BaseOperator = ApplyOperator(
                        task_id="apply", shard=shard, **at_once, **place, **service, **applied
                    )
                else:
                    apply = _call_apply(make_apply, shard, commit.task_group)
                    apply.max_active_tis_per_dagrun = apply.max_active_tis_per_dagrun or most
                    apply.map_index_template = apply.map_index_template or title
                apply >> commit
                planned.shard_tasks = [task.task_id for task in (approve, apply, commit) if task is not None]

            compute.expand(shard=shards.output) >> finish


def _make_approve(planned: PlanOperator) -> BaseOperator:
    # The standard provider is needed only if `approve_above` is set.
    from airflow_geneva.operators.approve import ApproveOperator

    approve = ApproveOperator(task_id="approve", plan_task_id=planned.task_id)
    planned >> approve
    return approve


def _call_apply(make_apply: Callable[[Any], Any], shard: Any, group: TaskGroup | None) -> BaseOperator:
    """Return the task that the `apply` function creates in the group of a shard; raise `InvalidInput` if it does
    not."""
    try:
        returned = make_apply(shard)
    except NotImplementedError as error:  # Airflow's, for `expand`
        raise InvalidInput(f"{_ONE_TASK} Airflow says: {error}.") from error
    # A call of a @task function returns its output.
    made = getattr(returned, "operator", None) if isinstance(returned, XComArg) else returned
    if not isinstance(made, BaseOperator):
        raise InvalidInput(f"{_ONE_TASK} It returned {returned!r:.80}, which is no task.")
    if made.label != "apply" or made.task_group is not group:
        raise InvalidInput(f"{_ONE_TASK} It returned the task {made.task_id!r}.")
    return made


def _asked(given: Mapping[str, Any], *but: str) -> dict[str, Any]:
    """Return what a group passes to its plan task: the variables of its `__init__` that are arguments of its own."""
    return {name: given[name] for name in given if name not in ("self", "__class__", "group_id", "shared", *but)}


def _not_none(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove and return the arguments that are not None."""
    found = {name: given.pop(name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


class BackfillTaskGroup(_ShardGroup):
    """Compute the missing values of a column: `plan`, `shards.apply` and `shards.commit` per shard, then `finish`.

    Each shard can be retried, cleared and monitored separately, and its rows are visible as soon as it is committed.
    With nothing to do the shards are skipped, `finish` succeeds, and tasks downstream of the group run.

    Text parameters are templated. Empty text means None, so `where="{{ params.where or '' }}"` without a parameter
    means no filter; numbers may be text. Connections, `database`, `inline_below_rows` and `on_partial` may come from
    `default_args`.

    Args:
        group_id: id of the group.
        table: the table's name.
        column: the computed column.
        udf: import path `"module:name"`; by default the column's own UDF.
        where: SQL filter on the rows; `now()` and similar functions return the DAG run's `run_after`.
        read_version: compute only rows that existed at this table version.
        commit_granularity: fragments per Lance commit; by default, a backfill makes about 100 commits.
        on_code_change: what becomes of another UDF version's values; see `OnCodeChange`.
        on_unknown_values: what becomes of values that no job computed; see `OnUnknownValues`.
        continue_from: other versions of the UDF whose values are kept, separated by commas.
        errors_only: compute only rows on which the UDF failed, no matter how often; if its code was repaired, all other
            rows keep their values, and later runs use the new code.
        recompute_mixed: compute only rows whose value comes from another version.
        ignore_checkpoints: do not use values that earlier runs computed and did not commit.
        max_failed: `finish` fails if more than this number of rows fail, or, with a decimal point, more than this
            fraction of the due rows; computed values are visible nevertheless. By default any number may fail.
        indexes: with `update`, `finish` updates the indexes of the column.
        shared: the arguments of :class:`GroupArguments`.

    Example:
        ```python
        with DAG("docs", schedule="@hourly", catchup=False, params={"where": Param(None, type=["null", "string"])}):
            BackfillTaskGroup(table="docs", column="n", where="{{ params.where or '' }}")
        ```
    """

    def __init__(
        self,
        group_id: str = "backfill",
        *,
        table: str,
        column: str,
        udf: str | None = None,
        where: str | None = None,
        read_version: int | str | None = None,
        commit_granularity: int | str | None = None,
        on_code_change: str = "error",
        on_unknown_values: str = "error",
        continue_from: str | None = None,
        errors_only: bool | str = False,
        recompute_mixed: bool | str = False,
        ignore_checkpoints: bool | str = False,
        max_failed: float | str | None = None,
        indexes: str | None = None,
        **shared: Unpack[GroupArguments],
    ) -> None:
        super().__init__(group_id, PlanBackfillOperator, table, _asked(locals()), **shared)


class LoadColumnsTaskGroup(_ShardGroup):
    """Load values that others computed, by key: `plan`, `shards.apply` and `shards.commit` per shard, then `finish`.

    On Spark a shuffle joins the table's keys with the source. Only fragments with a value that differs are written. A
    killed task continues with the fragments that are not staged yet. Text parameters are templated; empty text means
    None.

    Args:
        group_id: id of the group.
        table: the table's name.
        source: a path, a glob, a folder or a URI of Parquet, CSV or JSON lines files, or of a Lance table; files on S3
            are read with the storage options of the connection, files on other stores with the machine's own identity;
            or the name of another table, see `format`.
        on: the key column, or several, also as text with commas.
        columns: the columns to load; by default all of the source but the keys. Of a table of Spark, columns that the
            table has already.
        format: `parquet`, `csv`, `json` or `lance`; by default the extension of the files. With `iceberg`, `source` is
            a table's metadata file, its folder, or `catalog.namespace.table`; with `spark`, the name of a table that
            the session of the apply task has.
        on_missing: what becomes of rows whose key the source lacks; see `OnMissing`.
        on_duplicate: which row of several with one key counts; see `OnDuplicate`.
        where: SQL filter on the rows of the table.
        adopt: load values of a computed column, which count as computed by its function.
        commit_granularity: fragments per Lance commit; by default, a load makes about 100 commits.
        ignore_checkpoints: do not use what earlier runs joined and did not commit.
        indexes: `update` lets `finish` bring the indexes over the columns up to date.
        shared: the arguments of :class:`GroupArguments`.

    Example:
        ```python
        with DAG("deliveries", schedule="@daily", catchup=False):
            LoadColumnsTaskGroup(table="docs", source="s3://deliveries/{{ ds }}/*.parquet", on="id")
        ```
    """

    def __init__(
        self,
        group_id: str = "load",
        *,
        table: str,
        source: str | Sequence[str],
        on: str | Sequence[str],
        columns: str | Sequence[str] | None = None,
        format: str | None = None,
        on_missing: str = "keep",
        on_duplicate: str = "error",
        where: str | None = None,
        adopt: bool | str = False,
        commit_granularity: int | str | None = None,
        ignore_checkpoints: bool | str = False,
        indexes: str | None = None,
        **shared: Unpack[GroupArguments],
    ) -> None:
        super().__init__(group_id, PlanLoadOperator, table, _asked(locals()), **shared)


class RefreshTaskGroup(_ShardGroup):
    """Update a view to its source: `plan`, `shards.apply` and `shards.commit` per shard, then `finish`.

    Each shard can be retried, cleared and monitored separately; the view changes once, in `finish`, when all shards are
    verified. With nothing to compute the shards are skipped, and `finish` only removes rows that are no longer in the
    query's result. With nothing to do it writes no version and sends no event; tasks downstream of the group run.

    Text parameters are templated. Empty text means None, and numbers may be text. Connections, `database`,
    `inline_below_rows` and `on_partial` may come from `default_args`.

    Args:
        group_id: id of the group.
        view: the view's name.
        src_version: the source version to refresh to, which may be an earlier one; by default the newest.
        source: name of the view's source table or view, which Airflow shows as the inlet of the view's asset, unless
            it or the connection is a template.
        sources: other databases from which the view may read: URIs, or Airflow connections of type `lance`; needed if
            the view's source is neither in the view's database nor in that of the connection.
        max_rows_per_fragment: rows of each new fragment of the view.
        on_code_change: what becomes of another UDF version's values; see `OnCodeChange`.
        on_unknown_values: what becomes of rows without a record of their source rows; see `OnUnknownValues`.
        errors_only: run only rows on which a UDF failed, no matter how often; the view stays at the source version that
            it shows. If a UDF was repaired, all other rows keep their values, and later runs use the new code.
        ignore_checkpoints: do not use values that earlier runs computed.
        max_failed: `finish` fails, and leaves the view unchanged, if more than this number of rows fail, or, with a
            decimal point, more than this fraction of the due rows. By default any number may fail.
        indexes: with `update`, `finish` updates the indexes of the view.
        shared: the arguments of :class:`GroupArguments`.

    Example:
        ```python
        with DAG("long_docs", schedule=lance_asset("docs")):
            RefreshTaskGroup(view="long_docs", source="docs")
        ```
    """

    def __init__(
        self,
        group_id: str = "refresh",
        *,
        view: str,
        src_version: int | str | None = None,
        source: str | None = None,
        sources: Sequence[str] | None = None,
        max_rows_per_fragment: int | str | None = None,
        on_code_change: str = "error",
        on_unknown_values: str = "error",
        errors_only: bool | str = False,
        ignore_checkpoints: bool | str = False,
        max_failed: float | str | None = None,
        indexes: str | None = None,
        **shared: Unpack[GroupArguments],
    ) -> None:
        super().__init__(group_id, PlanRefreshOperator, view, _asked(locals(), "source"), source, **shared)
