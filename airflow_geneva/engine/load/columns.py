"""What a table has to load values by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.storage.location import TableLocation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from airflow_geneva.engine.job.result import BackfillResult
    from airflow_geneva.engine.plan.request import SizingOptions

_INLINE_BYTES = 2 << 30


class LoadsColumns:
    """The method of a table that loads values which others computed."""

    location: TableLocation

    def load_columns(
        self,
        source: Any,
        on: str | Sequence[str],
        columns: Sequence[str] | None = None,
        format: str | None = None,
        on_missing: str = "keep",
        on_duplicate: str = "error",
        where: str | None = None,
        adopt: bool = False,
        runner: str = "auto",
        **sizing: Unpack[SizingOptions],
    ) -> BackfillResult:
        """Load values by key from files, another table or rows in memory, and commit them.

        Only fragments with a value that differs are written. Columns that the table lacks are added. A loaded column is
        not a computed one: a backfill refuses it.

        Args:
            source: a path, a glob, a folder or a URI of Parquet, CSV or JSON lines files, or a list of them; a Lance
                table or view, or its path; or rows, as `add` takes them. Files on an object store are read with the
                storage options of this table.
            on: the key column, or several; the table and the source both have them. NULL matches nothing.
            columns: the columns to load; by default all of the source but the keys.
            format: ``parquet``, ``csv``, ``json`` or ``lance``; by default the extension of the files.
            on_missing: ``keep`` or ``null`` the values of rows whose key the source lacks, or ``error``: load nothing.
            on_duplicate: ``error``: load nothing if several rows of the source have one key; or the ``first`` or the
                ``last`` of them counts.
            where: SQL filter on the rows of the table; the other rows keep their values.
            adopt: load values of a computed column; they count as computed by its function from its current inputs.
            runner: ``inline``: DuckDB joins in this process, and spills to disk; ``spark``: a cluster joins; ``auto``:
                Spark for files of more than 2 GiB.
            sizing: see :class:`airflow_geneva.engine.plan.sizing.Sizing`.

        Returns:
            The result: `rows_loaded` counts the rows whose values changed, `rows_missing` those whose key the source
            lacks, and `rows_skipped` all others.

        Raises:
            InvalidInput: an argument is not valid, or a column, a type or a key does not fit; nothing was loaded.
            JobFailed: the load failed; ``.result`` has the counts of what is visible.

        Example:
            ```python
            table.load_columns("s3://deliveries/2026-11/*.parquet", on="id", columns=["caption", "embedding"])
            ```
        """
        from airflow_geneva.bar import progress_bar
        from airflow_geneva.engine.job.meter import Stopwatch
        from airflow_geneva.engine.load.request import LoadRequest, plan_load
        from airflow_geneva.engine.run.choice import check_runner
        from airflow_geneva.engine.run.pipeline import run_new
        from airflow_geneva.engine.run.prepare import Udfs

        check_runner(runner)
        request = LoadRequest(
            source, on, columns, format, on_missing, on_duplicate, where, adopt, sizing=sizing
        )  # fmt: skip
        watch, location = Stopwatch(), self.location.patient()
        with progress_bar(f"{location.name}.load"):
            planned = plan_load(location, request)
            if runner == "auto":
                runner = "spark" if planned.delivery.source.size_bytes > _INLINE_BYTES else "inline"
            return run_new(planned.plan, location, Udfs({}), runner, watch)
