"""A folder of Lance tables, in LanceDB's layout, or a catalog that names tables."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine import api
from airflow_geneva.engine.display import Summarized, Summary, counted
from airflow_geneva.engine.results import DONE, FAILED, PARTIAL, PENDING, RUNNING
from airflow_geneva.engine.storage import catalogs
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.location import TableLocation, locate, locate_new, locate_or_none, table_names
from airflow_geneva.engine.storage.places import allow_databases, with_allowed
from airflow_geneva.engine.storage.secrets import CATALOG, PLACES
from airflow_geneva.engine.storage.uri import check_name, is_local, normalize_uri
from airflow_geneva.engine.udf.lancedb import refuse_view
from airflow_geneva.errors import GenevaError, InvalidInput, NoSuchTable, StorageError
from airflow_geneva.table import Table
from airflow_geneva.view import View

if TYPE_CHECKING:
    import pyarrow as pa
    from lance import LanceDataset
    from lance_namespace import LanceNamespace

    from airflow_geneva.database_plan import DatabasePlan
    from airflow_geneva.engine.api import Job, RowData
    from airflow_geneva.engine.udf import UDF

_STABLE = ("new_table_enable_stable_row_ids", "enable_move_stable_row_ids", "enable_stable_row_ids")

_MODES = ("create", "overwrite")
_SHOWN_TABLES = 20
_READ_AT_ONCE = 100
_NOT_EMPTY = "Directory not empty"
"""Begins pylance's error if a file is written into a local folder while it is being removed."""
_MOST_DROPS = 20


@dataclass(frozen=True, repr=False)
class Database(Summarized):
    """A folder of tables, local or on an object store, or a catalog; created by :func:`connect` or
    :func:`connect_namespace`.

    Args:
        uri: normalized URI; of a catalog ``namespace://IMPL/ADDRESS``.
        options: storage options as sorted pairs; never shown by ``repr``.
    """

    uri: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def _title(self) -> tuple[str, bool]:
        return f"Database {self.uri}", is_local(self.uri)

    def _summary(self, title: str) -> Summary:
        names = self.table_names()
        if not names and self._is_missing:
            return Summary(f"{title}: there is no such folder yet; create_table() makes it")
        tables = [(name, self._state_of(name)) for name in names[:_SHOWN_TABLES]]
        left_out = len(names) - len(tables)
        return Summary(f"{title}: {counted(len(names), 'table')}", ("table", ""), tables, left_out=left_out)

    def _state_of(self, name: str) -> str:
        try:
            return self.open_table(name).state()
        except (GenevaError, OSError) as error:
            return str(error)

    @property
    def _is_missing(self) -> bool:
        return is_local(self.uri) and not os.path.isdir(self.uri)

    @property
    def lance(self) -> LanceNamespace:
        """The plain pylance namespace of this folder, with the same storage options; or the catalog itself."""
        if self.in_catalog:
            return catalogs.client(self.options)
        from lance.namespace import DirectoryNamespace

        options = {f"storage.{name}": value for name, value in self.options if name != PLACES}
        # Without a manifest table: the tables are the folders in this folder.
        return DirectoryNamespace(root=self.uri, manifest_enabled="false", **options)  # type: ignore[no-untyped-call]

    @property
    def in_catalog(self) -> bool:
        """Whether it is a catalog, and not a folder."""
        return catalogs.catalog_uri(self.options) is not None

    def table_names(self, namespace: Sequence[str] = ()) -> list[str]:
        """Return the names of all tables, sorted; tables whose name is not a valid one are left out.

        Args:
            namespace: of a catalog, only tables of this namespace and of those in it: ``["prod"]`` for ``prod.docs``.

        Raises:
            InvalidInput: there is no such namespace, or the database is a folder, which has none.
        """
        if namespace and not self.in_catalog:
            raise InvalidInput(
                f"{self.uri} is a folder of tables and has no namespace {list(namespace)}: leave it out."
            )
        return table_names(self.uri, self.options, namespace)

    def location(self, name: str) -> TableLocation:
        """Return the location of a table that exists, or in a folder could be created; asks a catalog.

        Raises:
            InvalidInput: the name would leave the database's folder, or a catalog has no such table.
        """
        return locate(self.uri, name, self.options)

    def plan(self, what_if: Mapping[str, UDF | str] | None = None) -> DatabasePlan:
        """Plan a run of all computed columns and views, in order of their dependencies; writes nothing.

        For each it says how many rows are due now and why, how many more may become due once everything above it has
        run, the seconds and the cost of that by earlier jobs, and what is blocked.

        Args:
            what_if: other UDFs, or their import paths, by ``table.column`` or ``view.column``: the plan is then that
                of a run with this code, which computes all rows of these columns again.

        Raises:
            InvalidInput: `what_if` names no computed column, or gives no UDF.

        Example:
            ```python
            print(db.plan(what_if={"docs.embedding": embed_v2}))
            ```
        """
        from airflow_geneva.database_plan import plan_database

        return plan_database(self, what_if)

    def jobs(
        self,
        newest: int | None = 100,
        table: str | None = None,
        state: str | None = None,
        dag_id: str | None = None,
        since: datetime | None = None,
    ) -> list[Job]:
        """Return the newest jobs, newest first; older jobs are not read.

        Args:
            newest: maximum number of jobs; None for all.
            table: only jobs of this table.
            state: only jobs in this state: PENDING, RUNNING, DONE, PARTIAL or FAILED.
            dag_id: only jobs that this DAG planned.
            since: only jobs that were started then or later.

        Raises:
            InvalidInput: there is no such table or state.
        """
        states = (PENDING, RUNNING, DONE, PARTIAL, FAILED)
        if state is not None and state not in states:
            raise InvalidInput(f"state={state!r} is unknown. Use one of {states}.")
        if newest is not None and newest < 0:
            raise InvalidInput(f"newest={newest} is not valid: give the maximum number of jobs, or None for all.")
        names = self.table_names() if table is None else [self.open_table(table).name]
        first = "" if since is None else f"{since.astimezone(timezone.utc):%Y%m%dT%H%M%S%f}"
        listed = api.JobList.of({name: self.location(name).checkpoints for name in names}).between(first)
        most, found = len(listed.ids) if newest is None else newest, list[api.Job]()
        # Filters leave jobs out, so more are read than are returned.
        at_once = max(most if state is dag_id is None else max(most, _READ_AT_ONCE), 1)
        for start in range(0, len(listed.ids), at_once):
            if len(found) >= most:
                break
            read = listed.read(start, at_once)
            found += [job for job in read if state in (None, job.state) and dag_id in (None, job.dag_id)]
        return found[:most]

    def job(self, job_id: str) -> Job:
        """Return a job with the progress of each shard.

        Raises:
            InvalidInput: no table has such a job.
        """
        for name in self.table_names():
            job = api.read_job(api.JobFolder.of(self.location(name).checkpoints, job_id))
            if job is not None:
                return job
        raise InvalidInput(f"There is no job {job_id!r} in {self.uri}. db.jobs() lists the newest.")

    def cancel_job(self, job_id: str) -> None:
        """Ask a job that runs anywhere to end, as PARTIAL, after the calls that run now.

        What is computed is kept, and that of a column is committed. The next backfill or refresh goes on from there.

        Raises:
            InvalidInput: no table has such a job, or it has ended, or no process works on it any more.
        """
        job = self.job(job_id)
        if not job.open:
            state = "no process works on it any more" if job.dead else f"it is {job.state}"
            raise InvalidInput(f"Job {job_id} cannot be canceled: {state}.")
        api.JobFolder.of(self.location(job.table).checkpoints, job_id).cancel()

    def open_table(self, name: str) -> Table:
        """Open a table; a materialized view is returned as a :class:`airflow_geneva.View`.

        Raises:
            InvalidInput: there is no such table; the message lists the existing ones.
        """
        return self.open_newest(name)[0]

    def open_newest(self, name: str) -> tuple[Table, LanceDataset]:
        """Open a table or view, and return it with its newest version; raises as `open_table` does."""
        check_name(name, "table")
        try:
            location = self.location(name)
            dataset = location.open()
        except InvalidInput:
            names = self._names_beside(name)
            if name in names:
                raise
            listed = ", ".join(names[:20]) or "none"
            if self._is_missing:
                listed = "none, for there is no such folder"
            advice = f"Create it first: db.create_table({name!r}, data)."
            if similar := difflib.get_close_matches(name.removesuffix(".lance"), names, 1):
                advice = f"Did you mean {similar[0]!r}? Else create it first: db.create_table({name!r}, data)."
            raise NoSuchTable(f"There is no table {name!r} in {self.uri}. Tables: {listed}. {advice}") from None
        return (View if api.is_view(dataset.schema.metadata) else Table)(location), dataset

    def _names_beside(self, name: str) -> list[str]:
        """Return the names of all tables; of a catalog, those in the namespace of a name."""
        if not self.in_catalog:
            return self.table_names()
        try:
            return self.table_names(name.split(".")[:-1])
        except InvalidInput:  # there is no such namespace
            return []

    def open_view(self, name: str, sources: Iterable[str | os.PathLike[str] | Database] = ()) -> View:
        """Open a materialized view; its source may be in another database only if that database is named here.

        A view's definition names its source, and anyone with write access to the view can change the definition. So a
        source in another database is opened only in the process that created the view, or if `sources` names it.

        Args:
            sources: paths or URIs of other databases that may contain the source, or the databases themselves; another
                catalog is given as :func:`connect_namespace` returned it.

        Raises:
            InvalidInput: the table does not exist, or is not a view.
        """
        found = self.open_table(name)
        if not isinstance(found, View):
            refuse_view(name, found.schema.metadata)
            raise InvalidInput(f"{name!r} is a table and not a view. Open it with db.open_table({name!r}).")
        if isinstance(sources, (str, os.PathLike)):
            allow_databases(sources)  # which says to give a list
        given = list(sources)
        others = (one.options for one in given if isinstance(one, Database))
        options = catalogs.with_sources(found.location.options, others)
        allowed = allow_databases(one.uri if isinstance(one, Database) else one for one in given)
        return View(replace(found.location, options=options), allowed)

    def create_table(
        self,
        name: str,
        data: RowData | None = None,
        schema: pa.Schema | None = None,
        storage_options: Mapping[str, str] | None = None,
        mode: str = "create",
        exist_ok: bool = False,
        key: str | Sequence[str] | None = None,
        **write_options: Any,
    ) -> Table:
        """Create a table, by default with stable row ids.

        Args:
            name: its name.
            data: rows: an Arrow table, batch or stream of batches, a data frame of pandas or polars, a dict of columns,
                or dicts; None for an empty table of ``schema``. A stream is not read into memory as a whole.
            schema: Arrow schema of the table, to which the data are converted; needed without data.
            storage_options: ``{"new_table_enable_stable_row_ids": "false"}`` creates a table without stable row ids. A
                table that is overwritten keeps the row ids it has.
            mode: ``create``, or ``overwrite`` to replace all rows and columns of a table that exists, in a new version
                of it.
            exist_ok: open a table that exists, as it is, if it has the columns of the data or the schema, with their
                types.
            key: the column, or several, whose values name rows in errors, see :meth:`Table.set_key`.
            write_options: passed to :func:`lance.write_dataset`, e.g. ``max_rows_per_file``.

        Raises:
            InvalidInput: the table exists, or neither data nor schema was given, or the data are no rows or do not fit,
                or the key is none of their columns.
            CommitConflict: the store refused every attempt to create the table.
        """
        location = locate_or_none(self.uri, name, self.options)
        if mode not in _MODES:
            raise InvalidInput(f"mode={mode!r} is not valid: give one of {', '.join(map(repr, _MODES))}.")
        if data is None and schema is None:
            raise InvalidInput(f"Table {name!r} needs data or a schema. Give one of them.")
        found = self.open_table(name) if location is not None and location.exists() else None
        if found is not None and not exist_ok and mode == "create":
            raise InvalidInput(
                f"Table {name!r} already exists in {self.uri}. Open it with db.open_table({name!r}), or give "
                'exist_ok=True, or mode="overwrite" to replace its rows and columns.'
            )
        if isinstance(found, View) and mode == "overwrite":
            raise InvalidInput(
                f"{name!r} is a view: its rows come from its query. Drop it first, db.drop_table({name!r})."
            )
        existing = found.schema if found is not None and mode == "create" else None
        rows_per_file = write_options.get("max_rows_per_file")
        given_rows = api.GivenRows.of(name, () if data is None else data, schema, existing, rows_per_file)
        if found is not None and existing is not None:
            given_rows.check_same(self.uri, existing, key)
            return found
        given_rows = given_rows.with_key(key)
        given = storage_options or {}
        if unknown := [key for key in given if key not in _STABLE]:
            raise InvalidInput(
                f"create_table takes {_STABLE[0]!r} as a storage option, not {unknown}. Give credentials to connect()."
            )
        stable = all(str(value).lower() != "false" for value in given.values())
        if found is not None and given and found.lance.has_stable_row_ids != stable:
            raise InvalidInput(
                f"Table {name!r} was created with{'out' * stable} stable row ids, which overwriting its rows does not "
                f"change. Leave out {_STABLE[0]!r}, or drop the table first: db.drop_table({name!r})."
            )
        options = {"enable_stable_row_ids": stable, **write_options}
        with locate_new(self.uri, name, self.options) as place:
            # pylance itself would declare a table that it creates.
            how = "overwrite" if self.in_catalog else mode
            made = given_rows.create(place, mode == "create", **{**options, "mode": how})
        if not made:
            return self.create_table(name, given_rows.rows, None, storage_options, mode, exist_ok, key, **write_options)
        return Table(place)

    def copy_table(self, source: str | Table, name: str | None = None, rewrite: bool = False) -> Table:
        """Copy a table or view into this database, with its definitions and what its jobs recorded: nothing is due.

        The copy has the newest version only. Its files are its own, also if the table was cloned; rows keep their ids.
        Facts about computed values, errors and records of ended jobs are copied, and indexes; tags, older versions,
        running jobs and their checkpoints are not. A view of a table of its own database reads the table of that name
        in this database, of which the copy must be made first.

        Args:
            source: the name of a table of this database, or a table or view of any database.
            name: the name of the copy; by default that of a table of another database.
            rewrite: write the rows anew, with stable row ids and the newest storage version, for a table that was made
                without; rows get other ids, and indexes and error records are left out.

        Raises:
            InvalidInput: there is no such table, or the name is taken, or a view's source is not in this database.
            StorageError: a store refuses to read or write a file.

        Example:
            ```python
            db.copy_table("docs", "docs_staging")
            connect("s3://other/db").copy_table(db.open_table("docs"))
            ```
        """
        table = self.open_table(source) if isinstance(source, str) and "/" not in source else source
        if not isinstance(table, Table):
            raise InvalidInput(
                f"source={source!r:.200} is no table. Give the name of a table of this database, or a table of another "
                "one: connect(...).open_table(...)."
            )
        name = name or table.name
        with locate_new(self.uri, name, self.options) as place:
            api.copy_table(table.location, place, rewrite)
        return self.open_table(name)

    def has_table(self, name: str) -> bool:
        """Whether there is a table or view of this name."""
        location = locate_or_none(self.uri, name, self.options)
        return location is not None and location.exists()

    def drop_table(self, name: str) -> None:
        """Delete a table or view with its checkpoints and job records; this cannot be undone.

        Raises:
            InvalidInput: there is no such table.
            StorageError: a job kept writing into its folder.
        """
        import lance

        table = self.open_table(name)
        if self.in_catalog:
            catalogs.drop(table.location.options)
            return
        for _ in range(_MOST_DROPS):
            try:
                lance.LanceDataset.drop(table.uri, **table.location.access)
                return
            except OSError as error:
                if _NOT_EMPTY not in str(error):
                    raise
        raise StorageError(
            f"Table {name!r} cannot be dropped, because a job writes into {table.uri} again and again. Cancel the job, "
            "and delete the folder."
        )


def connect(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    allowed_places: Iterable[str | os.PathLike[str]] | Mapping[str, Mapping[str, str] | None] = (),
) -> Database:
    """Open a database: a local folder or an object-store prefix that holds Lance tables.

    Args:
        uri: a path, or a URI such as ``s3://bucket/db``.
        storage_options: credentials and settings as pylance takes them; kept out of plans, logs and ``repr``.
        allowed_places: folders outside of the database in which its tables may name files, such as
            ``["s3://bucket/photos"]``: blobs that lie elsewhere, files that a function such as ``read_file`` reads, and
            the files of tables that were cloned from there. A mapping gives a place its own storage options, for what
            ``read_file`` reads: ``{"s3://other/scans": {"aws_access_key_id": ...}}``; for ``https://`` places they are
            headers of the requests.

    Raises:
        InvalidInput: the path leads to a file or to a table, or the URI or a place holds credentials.

    Example:
        ```python
        db = connect("path/to/db")
        table = db.open_table("docs")
        ```
    """
    options = with_allowed(freeze_options(storage_options), allowed_places)
    database = Database(normalize_uri(uri), options)
    if database.uri.startswith(catalogs.SCHEME):
        raise InvalidInput(
            f"{database.uri} is a catalog, which is opened with its properties: connect_namespace(impl, properties)."
        )
    if is_local(database.uri):
        _check_folder(Path(database.uri))
    if is_local(database.uri) and (similar := similar_folder(database.uri)):
        warnings.warn(f"There is no folder {database.uri} yet. Did you mean {similar}?", stacklevel=2)
    return database


def connect_namespace(
    impl: str,
    properties: Mapping[str, str],
    storage_options: Mapping[str, str] | None = None,
    allowed_places: Iterable[str | os.PathLike[str]] | Mapping[str, Mapping[str, str] | None] = (),
) -> Database:
    """Open a catalog as a database: tables lie where it says, and are opened with the credentials that it hands out.

    A table's name holds its namespace, as in ``prod.docs``.

    Args:
        impl: ``rest``, ``dir``, or the import path of a ``lance_namespace.LanceNamespace``, as
            ``lance_namespace.connect`` takes it.
        properties: what that kind of catalog takes, as text; kept out of plans, logs and ``repr``.
        storage_options: settings of the store, as pylance takes them; those that the catalog hands out win.
        allowed_places: folders in which its tables may name files, as :func:`connect` takes them; beside those, a table
            may name files in its own folder, and, if the catalog lists a folder (``dir``), in that one.

    Raises:
        InvalidInput: there is no such kind of catalog, or it takes other properties, or a place is not valid.

    Example:
        ```python
        db = connect_namespace("rest", {"uri": "https://catalog.example"})
        table = db.open_table("prod.docs")
        ```
    """
    settings = {**dict(freeze_options(storage_options)), CATALOG: catalogs.catalog_option(impl, properties)}
    options = with_allowed(freeze_options(settings), allowed_places)
    catalogs.client(options)
    return Database(catalogs.catalog_uri(options) or "", options)


def _check_folder(path: Path) -> None:
    found = next((place for place in (path, *path.parents) if place.exists()), path)
    if found.exists() and not found.is_dir():
        raise InvalidInput(
            f"{path} cannot be a database, because {found} is a file. Give a folder of tables: one that exists, or one "
            "that create_table() shall make."
        )
    if (path / "_versions").is_dir():
        raise InvalidInput(
            f"{path} is a table and not a database, which is the folder it lies in. Open it with "
            f"connect({str(path.parent)!r}).open_table({path.stem!r})."
        )


def similar_folder(path: str) -> str | None:
    """Return the database for whose name a name of a folder that does not exist may be a mistake."""
    place, name = os.path.split(path)
    if os.path.isdir(path) or not (os.path.isdir(place) and os.access(place, os.R_OK)):
        return None
    # A number distinguishes objects that share a name on purpose.
    plain = re.sub(r"\d", "", name)
    others = (found for found in os.listdir(place) if re.sub(r"\d", "", found) != plain)
    close = (Path(place, found) for found in difflib.get_close_matches(name, others))
    return next((str(found) for found in close if any(found.glob("*.lance"))), None)
