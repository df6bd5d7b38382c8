"""The plan of a job: the specification that all tasks share, the shards, and the reasons why rows are due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from airflow_geneva.engine.checkpoint.facts import Fact
from airflow_geneva.engine.checkpoint.keys import FragmentKey, WorkIdentity
from airflow_geneva.engine.checkpoint.provenance import PriorFailures, prior_failures_of, version_label
from airflow_geneva.engine.checkpoint.reuse import CheckpointIndex, ReuseRules
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import Described, counted
from airflow_geneva.engine.job.estimate import Estimate, Interval, Size
from airflow_geneva.engine.job.speed import EarlierJobs, ReadJobs
from airflow_geneva.engine.lance_io.filters import where_columns
from airflow_geneva.engine.lance_io.fragments import Columns, columns_of
from airflow_geneva.engine.lance_io.siblings import Output, is_group
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.plan.reusable_checkpoints import Mismatches
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.udf.code_archive import CodeArchive
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import ViewDefinition
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.plan.swap_plan import SwapPlan
    from airflow_geneva.engine.udf.expect import Expectation


@dataclass(frozen=True, kw_only=True)
class _JobSpec(ABC):
    """The specification that all tasks of a job share, without their fragments; small, and free of credentials.

    Args:
        inputs: names of the input columns at the planned version.
        where: frozen filter that the tasks evaluate, or None; the filter of a view is evaluated when it is planned.
        nested: the nested fields of structs that a backfill reads, see `Columns.nested`.
        version: the version to read; `read_version` is the one that the user requested.
        tables: the planned versions of the table to read and of the table to write; one entry for a column. Between
            them, those of the source of a view of groups and of its table `rows`.
        udf_version: identity of the code, determined once by the plan; for a view, of its whole query.
        agreement: hash of the properties that UDF versions must share for their values to be mixed.
        rows: number of due rows of the job.
        max_failed: the most rows that may fail, or the largest fraction of the due rows; None: no limit.
        indexes: "update" if `finish` updates the indexes on the column or view; None: it leaves them.
        rows_beyond: due rows beyond the job's cap of rows, which it leaves.
        fitting: the largest calls that fitted into the device's memory in earlier jobs, by UDF and unit.
        slot_seconds: estimated seconds of the job, added up over all slots, from earlier jobs; None: unknown.
    """

    kind: ClassVar[str]
    of_view: ClassVar[bool] = False
    _after_too_many: ClassVar[tuple[str, str]]

    job_id: str
    table: str
    table_name: str
    inputs: tuple[str, ...]
    where: str | None = None
    nested: str = ""
    version: int
    tables: tuple[PlannedTable, ...]
    read_version: int | None
    udf_version: str
    sizing: Sizing = field(default_factory=Sizing)
    ignore_checkpoints: bool = False
    agreement: str = ""
    rows: int = 0
    max_failed: int | float | None = None
    indexes: str | None = None
    rows_beyond: int = 0
    fitting: Mapping[str, float] = field(default_factory=dict)
    slot_seconds: float | None = None
    codes: tuple[CodeArchive, ...] = ()

    @property
    @abstractmethod
    def udfs(self) -> dict[str, UdfDefinition]:
        """The UDFs that the job runs, by column."""

    @property
    def all_udfs(self) -> dict[str, UdfDefinition]:
        """The UDFs of the column or view, by column, also those that this job need not run."""
        return self.udfs

    @property
    @abstractmethod
    def identity(self) -> WorkIdentity:
        """The identity of the work, which gives the keys of the job's checkpoints their prefix."""

    @property
    def _tag(self) -> str | None:
        """The filter in checkpoint keys. A job that ignores checkpoints adds its id, so that it finds only its own."""
        tag = self._filter
        return f"{tag or ''}\0only:{self.job_id}" if self.ignore_checkpoints else tag

    @property
    def _filter(self) -> str | None:
        return f"{self.where or ''}\0nested:{self.nested}" if self.nested else self.where

    @property
    def filter_hash(self) -> str:
        """Hash of the filter and the nested fields, for facts about rows on which the filter was evaluated."""
        return md5(self._filter or "")

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        """The rules for the checkpoints that the job reuses."""
        return ReuseRules(self.job_id, ((self.prefix, self.udf_version),), self.agreement)

    def indexed_fields(self, open_newest: Callable[[], lance.LanceDataset]) -> list[int | None]:
        """Return the ids of the fields whose indexes the job updates; None stands for all fields of a view."""
        return [None]

    @cached_property
    def prefix(self) -> str:
        return self.identity.prefix

    @property
    def read(self) -> PlannedTable:
        return self.tables[0]

    @property
    def written(self) -> PlannedTable:
        return self.tables[-1]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a backfill fills; () for a view."""
        return ()

    @property
    def at_once(self) -> bool:
        """Whether an expectation judges the whole column, so that its rows become visible only in `finish`."""
        return False

    @property
    def calls_differ(self) -> bool:
        """Whether UDFs run on different rows, because rows of a view keep some of their values."""
        return False

    @property
    @abstractmethod
    def target(self) -> str:
        """The view or the column that the job computes, for messages."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A name for the job, to begin a sentence."""

    @property
    @abstractmethod
    def heading(self) -> str:
        """The first line of a printed plan."""

    @property
    def selects(self) -> str | None:
        """The condition on the rows that are read, in SQL."""
        return self.where

    def filter_columns(self, names: Sequence[str]) -> list[str]:
        """Return which of these columns the condition names."""
        return where_columns(self.selects, list(names))

    @property
    def needs_spark(self) -> str:
        """What the job needs and only Spark has; "" if it can run in any process."""
        return ""

    @property
    def source_name(self) -> str:
        """The table that a view reads; "" for a column."""
        return ""

    @property
    def rows_of(self) -> PlannedTable:
        """The planned version of the table whose rows are computed: of a view of groups, the table that it groups."""
        return self.read

    @property
    def expectations(self) -> list[tuple[str, Expectation]]:
        """The expectations that a view itself declares, each with the name of its column."""
        return []

    @property
    def cap_note(self) -> str:
        """The note about the rows that the job leaves beyond its cap."""
        sizing, most = self.sizing, self.most_rows
        if most is None:
            cap = sizing.frags
        else:
            rows = counted(most, "row")
            cap = f"{rows} (max_rows)" if most == sizing.max_rows else f"{sizing.max_cost:g} (max_cost), {rows}"
        return f"stopped at its cap of {cap}: {counted(self.rows_beyond, 'more row')} left for the next run"

    @property
    def cost_per_row(self) -> float:
        """The cost of a row that the UDFs declare."""
        return sum(udf.cost or 0.0 for udf in self.udfs.values())

    @property
    def connections(self) -> list[str]:
        """The connections of services that the UDFs name."""
        return [udf.connection for udf in self.udfs.values() if udf.connection]

    @property
    def num_cpus(self) -> float | None:
        """The CPUs of a call: what was asked for the job, or what its UDFs declare."""
        return self.sizing.num_cpus or max((udf.num_cpus for udf in self.udfs.values() if udf.num_cpus), default=None)

    @property
    def num_gpus(self) -> float | None:
        """The GPUs of a call, likewise."""
        if self.sizing.num_gpus is not None:
            return self.sizing.num_gpus or None
        return max((udf.num_gpus for udf in self.udfs.values() if udf.num_gpus), default=None)

    @property
    def memory(self) -> int | None:
        """The bytes of a call, likewise. The UDFs of a view share a process, which keeps all that they load."""
        return self.sizing.memory or sum(udf.memory or 0 for udf in self.udfs.values()) or None

    @property
    def reports_cost(self) -> bool:
        """Whether calls report their cost, which then counts for `max_cost` instead of `cost_per_row`."""
        return any(udf.reports_cost for udf in self.udfs.values())

    @property
    def most_rows(self) -> int | None:
        """The most rows on which the UDF may run, from `max_rows` and `max_cost`; None: no limit."""
        paid = self.sizing.max_cost is not None and self.cost_per_row > 0 and not self.reports_cost
        by_cost = [int((self.sizing.max_cost or 0.0) / self.cost_per_row + 1e-9)] if paid else []
        return min([*by_cost, *([self.sizing.max_rows] if self.sizing.max_rows is not None else [])], default=None)

    def with_source_paths(self, text: str) -> str:
        """Replace paths in the code archives on executors with source paths, for example in a traceback."""
        for code in self.codes:
            text = code.with_source_paths(text)
        return text

    def too_many(self, failed: int) -> str | None:
        """Return a message, with advice, if more rows failed than the job allows; otherwise None."""
        limit = self.max_failed
        most = limit * self.rows if isinstance(limit, float) else limit
        if most is None or failed <= most:
            return None
        what = f"{limit:g} of them" if isinstance(limit, float) else f"{limit:,}"
        unchanged = ("The column is unchanged; computed rows are kept.", "")
        visible, again = unchanged if self.at_once else self._after_too_many
        return (
            f"{failed:,} of {counted(self.rows, 'due row')} failed, and max_failed allows {what}. {visible} "
            "get_errors() and `airflow-geneva errors` say why rows failed. Repair the function or its inputs and run "
            f"it again{again}, or allow more."
        )

    def tried(self, task: FragmentTask) -> PriorFailures:
        """Return the rows of a fragment on which the UDF failed in earlier runs."""
        return prior_failures_of(task.known, self.udf_version)

    def key(self, task: FragmentTask) -> FragmentKey:
        return FragmentKey(self.prefix, *task.place)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    def describe(self) -> dict[str, Any]:
        """Return the fields that describe the job in its record."""
        udfs = {udf.name: udf.version for udf in self.udfs.values()}
        return {
            "kind": self.kind,
            "table": self.table_name,
            "udf": ", ".join(udfs),
            "udf_version": ", ".join(udfs.values()),
            "version": self.rows_of.version,
            "version_at": self.rows_of.written / 1e9,
            "read_version": self.read_version,
        }


@dataclass(frozen=True, kw_only=True)
class ColumnSpec(_JobSpec):
    """The specification of a job that fills a column, or columns that are filled together.

    Args:
        field_id: the number that identifies the column in facts: its field id, or the number of a group of siblings.
        siblings: the other columns that the job fills.
    """

    plain_blobs: ClassVar[bool] = False
    _after_too_many = ("What was computed is visible.", " with errors_only=True")

    column: str
    field_id: int
    siblings: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that the job fills."""
        return (self.column, *self.siblings)

    @abstractmethod
    def output_at(self, dataset: lance.LanceDataset) -> Output:
        """Return the columns that the job fills, by their names in a version."""

    def columns_at(self, dataset: lance.LanceDataset) -> Columns:
        """Return the columns that the job reads and writes, in the version for which it is planned."""
        filtered = where_columns(self.where, dataset.schema.names)
        return columns_of(dataset, self.inputs, filtered, self.output_at(dataset))

    def fact_columns_at(self, dataset: lance.LanceDataset) -> Columns:
        """Return the columns that facts are about, in the version for which the job is planned."""
        return self.columns_at(dataset)

    @property
    def keeps_facts(self) -> bool:
        """Whether commits record facts about the values, by which later plans know them."""
        return True

    @property
    def taken_versions(self) -> tuple[str, ...]:
        """The other versions whose checkpoints and values the job takes over."""
        return ()

    def mixed_versions(self, taken: bool) -> list[str]:
        """Return labels of the other versions whose values the column may hold; `taken`: some were taken over."""
        return []

    @property
    def key_column(self) -> str:
        """The column's name in checkpoint keys; of siblings, a name that stays when one is renamed or dropped."""
        return f"siblings-{self.field_id}" if is_group(self.field_id) else self.column

    @property
    def target(self) -> str:
        return f"{self.table_name}.{self.column}"

    @property
    def title(self) -> str:
        return f"{self.kind.capitalize()} of {self.target}"

    @property
    def heading(self) -> str:
        where = f" where {self.where}" if self.where else ""
        also = f" and {', '.join(self.siblings)}" if self.siblings else ""
        return f"{self.title}{also} {self._made_by}{where}, table version {self.version}"

    @property
    @abstractmethod
    def _made_by(self) -> str:
        """What makes the values, for the heading."""

    @property
    def outbox(self) -> str:
        return f"field-{self.field_id}"

    def indexed_fields(self, open_newest: Callable[[], lance.LanceDataset]) -> list[int | None]:
        return [self.field_id]

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "column": self.column,
            **({"siblings": list(self.siblings), "key_column": self.key_column} if is_group(self.field_id) else {}),
            "inputs": list(self.inputs),
            "agreement": self.agreement,
            "where": self.where,
        }


@dataclass(frozen=True, kw_only=True)
class BackfillSpec(ColumnSpec):
    """The specification of a job that computes a column.

    Args:
        makers: versions whose values count as this version's.
        former_names: former names of the column, under which earlier jobs wrote their checkpoints.
    """

    kind: ClassVar[str] = "backfill"

    udf: str
    continue_from: tuple[str, ...] = ()
    makers: tuple[str, ...] = ()
    former_names: tuple[str, ...] = ()

    @cached_property
    def definition(self) -> UdfDefinition:
        return UdfDefinition.from_json(self.udf)

    @property
    def udfs(self) -> dict[str, UdfDefinition]:
        return {self.column: self.definition}

    @property
    def at_once(self) -> bool:
        return any(one.whole for one in self.definition.expectations)

    def output_at(self, dataset: lance.LanceDataset) -> Output:
        return Output.of(dataset, self.column)

    @property
    def udf_name(self) -> str:
        return self.definition.name

    @property
    def taken_versions(self) -> tuple[str, ...]:
        return self.continue_from

    def mixed_versions(self, taken: bool) -> list[str]:
        return sorted({version_label(maker) for maker in (*self.makers, *(self.continue_from if taken else ()))})

    @property
    def identity(self) -> WorkIdentity:
        return WorkIdentity(self.udf_name, self.udf_version, self.key_column, self._tag, self.table)

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        identity = self.identity
        others = [(replace(identity, version=made).prefix, made) for made in self.continue_from]
        former = () if self.key_column != self.column else self.former_names
        others += [(replace(identity, column=name).prefix, self.udf_version) for name in former]
        return ReuseRules(self.job_id, ((self.prefix, self.udf_version), *others), self.agreement)

    @property
    def _made_by(self) -> str:
        return f"with {self.udf_name} (version {self.udf_version})"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "continue_from": list(self.continue_from)}


@dataclass(frozen=True, kw_only=True)
class RefreshSpec(_JobSpec):
    """The specification of a job that refreshes a view.

    Args:
        query: the view's definition with the planned code versions, as JSON text.
        plain_blobs: whether staged files hold blobs as plain bytes, so that they can be read back.
        calls: number of due rows by UDF column, without columns that run on none; None: every UDF runs on every row.
        carries: identifies the code of the values that rows carry, if it is not the planned one: rows with such values
            must not be taken for rows of the planned code. "" if all of it is.
        shuffles: of a view of groups, whether its source rows are brought together by Spark's shuffle.
        rows_before: of a view of groups, the version of its table `rows` before the refresh, and the source version
            that it showed, which have the rows that functions remove from states; None if they are not known.
    """

    kind: ClassVar[str] = "refresh"
    of_view = True
    column: ClassVar[None] = None
    field_id: ClassVar[None] = None
    _after_too_many = ("The view is unchanged; computed rows are kept.", "")

    query: str
    plain_blobs: bool = False
    calls: Mapping[str, int] | None = None
    carries: str = ""
    shuffles: bool = False
    rows_before: tuple[int, int] | None = None

    @cached_property
    def definition(self) -> ViewDefinition:
        return ViewDefinition.from_json(self.query)

    @property
    def calls_differ(self) -> bool:
        return self.calls is not None

    @property
    def udfs(self) -> dict[str, UdfDefinition]:
        found = self.all_udfs
        return found if self.calls is None else {name: udf for name, udf in found.items() if name in self.calls}

    @property
    def all_udfs(self) -> dict[str, UdfDefinition]:
        return {column.name: column.udf for column in self.definition.columns if column.udf}

    @property
    def cost_per_row(self) -> float:
        if self.calls is None:
            return super().cost_per_row
        return sum((udf.cost or 0.0) * self.calls[name] for name, udf in self.udfs.items()) / max(self.rows, 1)

    @property
    def identity(self) -> WorkIdentity:
        tag = f"{self._tag or ''}\0plain blobs" if self.plain_blobs else self._tag
        tag = f"{tag or ''}\0carries {self.carries}" if self.carries else tag
        return WorkIdentity("view", self.udf_version, self.table_name, tag, self.table)

    @property
    def target(self) -> str:
        return self.table_name

    @property
    def title(self) -> str:
        return f"Refresh of view {self.target!r}"

    @property
    def heading(self) -> str:
        grouping = self.definition.grouping
        groups = "" if grouping is None else f"; its rows are groups by {', '.join(grouping.keys)}"
        return f"Refresh of view {self.target} to version {self.rows_of.version} of its source{groups}"

    @property
    def selects(self) -> str | None:
        return self.definition.source_where

    @property
    def source_name(self) -> str:
        return self.definition.source_table

    @property
    def rows_of(self) -> PlannedTable:
        return self.tables[0 if self.definition.grouping is None else 1]

    @property
    def expectations(self) -> list[tuple[str, Expectation]]:
        return self.definition.expectations

    @property
    def outbox(self) -> str:
        return "view"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "view": self.table_name, "source": self.source_name}


JobSpec: TypeAlias = ColumnSpec | RefreshSpec


@dataclass(frozen=True)
class ReasonCount:
    """The number of fragments and rows that share a reason."""

    reason: str
    fragments: int
    rows: int


@dataclass(frozen=True, repr=False)
class Plan(Described):
    """The rows that a backfill or a refresh would compute, and why.

    Args:
        spec: the specification that all tasks share.
        shards: the fragments with due rows, grouped into shards.
        rows_total: live rows of the table at the planned version.
        reason_counts: number of fragments and rows for every reason, including those with nothing to do.
        rows_by_other_version: number of rows that hold the value of another UDF version, by version.
        inputs_again: of those with the current code, what happened to their inputs.
        learned: new facts that the planner found, for the next plan.
        notes: sentences for the user, for example why whole fragments are recomputed; the job's result repeats them.
        savings: sentences about the rows that `continue_from` would save; no longer true after the job has run.
        swap: refresh only: the swap at the end.
        mismatches: fragments with a checkpoint that was computed from other data files than they have now.
        ledgers: number of the column's ledgers that no fold covers.
        opened: the opened version to read and, for a refresh, the opened view, or for a load its source, if this
            process also runs the plan.
        index: the checkpoints that existed at planning.
        earlier: reads the earlier jobs of the column or view, once.
        estimator: makes the estimate; if a number of rows is given, from a sample of that size.
    """

    spec: JobSpec
    shards: tuple[Shard, ...]
    rows_total: int
    reason_counts: tuple[ReasonCount, ...]
    rows_by_other_version: tuple[tuple[str, int], ...] = ()
    inputs_again: Mapping[str, str] = field(default_factory=dict, repr=False)
    learned: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    savings: tuple[str, ...] = ()
    swap: SwapPlan | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)
    ledgers: int = 0
    opened: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    index: CheckpointIndex | None = field(default=None, repr=False, compare=False)
    earlier: ReadJobs = field(default=EarlierJobs, repr=False, compare=False)
    estimator: Callable[[Plan, int | None], Estimate] | None = field(default=None, repr=False, compare=False)

    @property
    def fragments(self) -> Sequence[FragmentTask]:
        """The fragments with due rows."""
        return [task for shard in self.shards for task in shard.fragments]

    @property
    def rows_pending(self) -> int:
        """Number of rows that are selected and due, including rows in checkpoints."""
        return sum(shard.rows for shard in self.shards) + self.spec.rows_beyond

    @property
    def rows_skipped(self) -> int:
        """Number of live rows that are not due."""
        return self.rows_total - self.rows_pending

    @property
    def rows_to_run(self) -> int:
        """The most rows on which the UDF will run: due rows that no checkpoint holds."""
        return sum(shard.rows_to_run for shard in self.shards)

    @property
    def calls_to_run(self) -> dict[str, int]:
        """The most rows on which the UDF of each column will run."""
        columns, counts = list(self.spec.udfs), Counter[str]()
        if not self.spec.calls_differ:
            return dict.fromkeys(columns, self.rows_to_run)
        for shard in self.shards:
            for task in shard.to_apply:
                counts.update(task.rows_by_column(columns, task.missing_selected))
        return {name: counts[name] for name in columns}

    @property
    def fragments_to_run(self) -> int:
        """Number of fragments that must be computed or staged."""
        return sum(len(shard.to_apply) for shard in self.shards)

    @property
    def rows_held(self) -> tuple[int, int]:
        """Number of fragments with reusable checkpoints, and the number of rows in these checkpoints."""
        # Checkpoints hold no rows of the fragments that the planner did not inspect one by one.
        single = (task for shard in self.shards for task in shard.fragments.single)
        held = [task.rows if task.staged else task.rows - task.rows_to_run for task in single]
        return sum(rows > 0 for rows in held), sum(held)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of rows by the reason why they are due or not."""
        return {tally.reason: tally.rows for tally in self.reason_counts if tally.rows}

    def estimate(self, sample: int | None = None) -> Estimate:
        """Estimate seconds, slot-seconds and cost, as intervals, by earlier jobs of the same UDF version.

        Args:
            sample: number of due rows to compute and time instead; their values are shown and not stored.

        Raises:
            InvalidInput: a number is not valid, or a UDF cannot be loaded here; or another process made the plan.
        """
        if self.estimator is None:
            raise InvalidInput("This plan cannot be estimated. Make it with plan_backfill() or plan_refresh().")
        return self.estimator(self, sample)

    def estimate_between(self, least: int, most: int) -> tuple[Interval | None, Interval | None]:
        """Estimate the seconds and the cost of a job of `least` to `most` rows by earlier jobs; call no UDF.

        Returns:
            Seconds and cost, each from the lower end for `least` to the upper end for `most` rows; None if unknown.
        """
        history = self.earlier().measured

        def estimate(rows: int) -> Estimate:
            if not rows:
                return Estimate.of_nothing()
            size = self._size_of(rows, (history[0].runner if history else None) or RunnerName.INLINE)
            return Estimate.by_history(size, history) if history else Estimate.unknown(size)

        low, high = estimate(least), estimate(most)
        ends = [(getattr(low, name), getattr(high, name)) for name in ("seconds", "cost")]
        seconds, cost = (None if a is None or b is None else Interval(a.low, b.high) for a, b in ends)
        return seconds, cost

    def size(self, runner: str) -> Size:
        """Return the work of the job on a runner."""
        sizing, udfs = self.spec.sizing, self.spec.udfs
        threads, tasks = sizing.intra_applier_concurrency, 1 if runner == RunnerName.INLINE else sizing.concurrency
        rows, calls = self.rows_to_run, self.calls_to_run
        costs = [udf.cost * calls[name] / max(rows, 1) for name, udf in udfs.items() if udf.cost is not None]
        return Size(
            rows=rows,
            fragments=self.fragments_to_run,
            runner=runner,
            slots=tasks * threads,
            shards=sum(bool(shard.to_apply) for shard in self.shards),
            price_per_slot_hour=sizing.price_per_slot_hour,
            cost_per_row=sum(costs) if costs else None,
        )

    def _size_of(self, rows: int, runner: str) -> Size:
        """Return the work as if there were other rows; all functions run on rows that the plan does not have yet."""
        size = self.size(runner)
        costs = [udf.cost for udf in self.spec.all_udfs.values() if udf.cost is not None]
        now, later = min(rows, size.rows), max(rows - size.rows, 0)
        cost = ((size.cost_per_row or 0.0) * now + sum(costs) * later) / max(rows, 1) if costs else None
        return replace(size, rows=rows, fragments=max(size.fragments, 1), shards=max(size.shards, 1), cost_per_row=cost)

    def expecting(self, expected: Estimate) -> Plan:
        """Return the plan with the parts of the estimate that tasks need."""
        seconds = None if expected.slot_seconds is None else round(sum(expected.slot_seconds) / 2, 3)
        return self.with_work(fitting=expected.fitting, slot_seconds=seconds)

    def with_work(self, **changes: Any) -> Plan:
        return replace(self, spec=replace(self.spec, **changes))

    def __str__(self) -> str:
        from airflow_geneva.engine.plan.explain import explain

        return explain(self)
