"""Copy a table with its definitions and what its jobs recorded, so that nothing is due in the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from airflow_geneva.engine.checkpoint.facts import ColumnState, Facts, save_facts
from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot, SourceFragment, load_snapshot, save_snapshot
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.lance_io.conflicts import create_new
from airflow_geneva.engine.lance_io.fragments import columns_of, ids_by_name, output_names
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.plan.computed_rows import ComputedRows
from airflow_geneva.engine.plan.due_columns import Decisions
from airflow_geneva.engine.plan.refresh import compare_source
from airflow_geneva.engine.plan.shared_files import (
    OWN,
    facts_with_history,
    renamed_signatures,
    renumbered,
    state_with_bases,
)
from airflow_geneva.engine.run.rewriting import RewrittenTable
from airflow_geneva.engine.storage.documents import well_typed
from airflow_geneva.engine.storage.engine_errors import engine_errors
from airflow_geneva.engine.storage.files import Storage, in_threads
from airflow_geneva.engine.storage.location import TableLocation, locate_or_none
from airflow_geneva.engine.storage.places import Options, base_folders
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf.definition import columns_to_take, definition_in, read_definition
from airflow_geneva.engine.udf.of_process import give_to_copy
from airflow_geneva.engine.views.definition import BASE_DATABASE_KEY, QUERY_KEY, ViewDefinition, is_view
from airflow_geneva.engine.views.state import CommittedViewState, read_advance_note, write_advance_note
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError

if TYPE_CHECKING:
    import lance


_NOT_ALL = "not all rows"
"""Stands for the deletion file of a fragment of which a snapshot has some rows only."""
_COPYING = "copying.json"
"""Beside the copy of a view until its schema metadata is changed: a `_Begun`."""


@dataclass(frozen=True)
class _Begun:
    """What is left to do after the clone of a view: changes of its schema metadata.

    Args:
        of: the URI of the view that is copied.
        version: its version, which the clone has, too.
    """

    of: str
    version: int
    changes: dict[str, str]

    @staticmethod
    def read(target: TableLocation) -> _Begun | None:
        try:
            return well_typed(_Begun(**(target.checkpoints.read_document(_COPYING) or {})))
        except TypeError:
            return None


@dataclass(frozen=True)
class _MovedSource:
    """The source of a view, and its copy in another database, from which the copy of the view is computed.

    The source is None if it was dropped.
    """

    source: TableLocation | None
    copy: TableLocation
    metadata: Mapping[str, str]


def copy_table(source: TableLocation, target: TableLocation, rewrite: bool = False) -> None:
    """Copy the newest version of a table or view into another folder, with facts, errors and records of ended jobs.

    Files are copied as they are: rows keep their ids and addresses, and columns their field ids. The version is
    committed last, so that a process that is killed before leaves no table, and the next attempt begins again; after
    it, the next attempt completes the copy.

    Args:
        rewrite: write the rows anew, with stable row ids and the newest storage version; the errors of jobs, which name
            rows by their ids, are left out.

    Raises:
        InvalidInput: the table exists, a view's source is not in the other database, the rows cannot be rewritten, or
            a function of a notebook has the name and version of another one in the other database.
        StorageError: a store refuses to read or write a file.
    """
    dataset = source.open()
    of_view = is_view(dataset.schema.metadata)
    if of_view and ViewDefinition.read(dataset.schema.metadata, source.name).grouping is not None:
        raise InvalidInput(
            f"{source.name!r} is a view of groups, whose copy would have to find all groups anew. Copy its source, and "
            "create the view with the same query there; or copy its rows: db.create_table(name, view.to_arrow())."
        )
    if of_view and rewrite:
        raise InvalidInput(f"{source.name!r} is a view, which is copied as it is. Leave out rewrite=True.")
    moved = _moved_source(dataset, source, target) if of_view else None
    if target.exists():
        begun = _Begun.read(target)
        if begun is None or begun.of != without_credentials(source.uri):
            raise _taken(target)
        _complete(target, begun)
        return
    _give_udfs(dataset, source, target, moved)
    target.checkpoints.delete_all(target.checkpoints.list_files())  # of an attempt that was killed
    rewritten = RewrittenTable(dataset, target) if rewrite else None
    for output, state, computed in _computed_outputs(dataset, source.checkpoints):
        if rewritten is not None:
            rewritten.save_facts(output, computed.names[: len(computed.columns.inputs)], computed)
        else:
            facts = _facts(state, computed)
            save_facts(target.checkpoints, computed.columns.output[0], facts, int(dataset.version), state.defined)
    begun = None
    if of_view:
        shown = _copy_snapshot(CommittedViewState(source, dataset), target, moved)
        changes = {**shown, **(moved.metadata if moved is not None else {})}
        begun = _Begun(without_credentials(source.uri), int(dataset.version), changes)
        target.checkpoints.write_json(_COPYING, asdict(begun))
    in_threads(partial(_copy_job, source.checkpoints, target, not rewrite), job_ids(source.checkpoints))
    fault_point("copy.recorded")
    _make(source, target, rewritten.commit if rewritten is not None else partial(_clone, source, dataset, target))
    fault_point("copy.cloned")
    if begun is not None:
        _complete(target, begun)


def _give_udfs(
    dataset: lance.LanceDataset, source: TableLocation, target: TableLocation, moved: _MovedSource | None
) -> None:
    """Let this process find the functions of the table for the copy, too."""
    if is_view(dataset.schema.metadata):
        query = ViewDefinition.read(dataset.schema.metadata, source.name)
        udfs = {column.name: column.udf for column in query.columns}
        before, after = query.source_database, query.source_database if moved is None else target.database_uri
    else:
        udfs = {field.name: definition_in(field) for field in dataset.schema}
        before, after = source.database_uri, target.database_uri
    for name, definition in udfs.items():
        if definition is not None:
            give_to_copy(definition, before, after, f"column {name!r} of {target.uri}")


def _facts(state: ColumnState, computed: ComputedRows) -> Facts:
    """Return all facts about an output, as facts about a copy without base paths; the copy has no history."""
    facts = facts_with_history(state, computed)
    if base_folders(computed.dataset):
        return renumbered(facts, computed.dataset, computed.columns.output, lambda folder: folder, lambda folder: OWN)
    return facts


def _computed_outputs(
    dataset: lance.LanceDataset, checkpoints: Storage
) -> Iterator[tuple[Output, ColumnState, ComputedRows]]:
    """Yield the columns that each function fills, with all facts about them."""
    schema = dataset.schema
    computed = [field.name for field in schema if definition_in(field) is not None]
    for output in Output.all_of(dataset, computed):
        inputs = read_definition("", schema, output.column).input_columns or columns_to_take(schema, output.column)
        columns = columns_of(dataset, inputs, (), output)
        state = state_with_bases(dataset, checkpoints, columns)
        names = (*inputs, *output_names(dataset, columns.output))
        yield output, state, ComputedRows.of_column(dataset, columns, names, state)


def _copy_snapshot(shown: CommittedViewState, target: TableLocation, moved: _MovedSource | None) -> dict[str, str]:
    """Copy the record of what a view shows; return the schema metadata that names it."""
    newest, checkpoints = shown.newest, shown.location.checkpoints
    if not newest.job_id or newest.changed:
        return {}
    note = read_advance_note(shown.location)
    note = note if note is not None and note.swap == newest.snapshot else None
    for key in {newest.snapshot, *([note.snapshot] if note else [])}:
        if (snapshot := load_snapshot(checkpoints, key)) is not None:
            save_snapshot(target.checkpoints, key, snapshot if moved is None else _of_copy(snapshot, moved))
    if note is not None:
        write_advance_note(target, note)
    return newest.metadata


def _of_copy(snapshot: Snapshot, moved: _MovedSource) -> Snapshot:
    """Return a snapshot with what a plan would find in the history of the source, which the copy of it does not have.

    It is one of the version that was copied, but for rows that changed or came since; what the view shows of changed
    and deleted rows stays in fragments that the copy does not have.
    """
    copied = min(version["version"] for version in moved.copy.open().version_refs())
    then = None if moved.source is None else open_version_or_none(moved.source.open(), copied)
    names = tuple(name for name, _ in snapshot.reads)
    if then is None or not names or not set(names) <= set(ids_by_name(then)):
        return snapshot
    changes = compare_source(then, names, snapshot, Decisions.none())
    signatures = renamed_signatures(changes.history.manifest, lambda folder: folder, lambda folder: OWN)
    due = {item.files.signature: item for item in changes.changed}
    found, there = list[SourceFragment](), Ranges.empty()
    for one in changes.fragments:
        item = due.get(one.signature)
        if item is not None:
            known = one.live - item.rows
            one = replace(one, deletion=_NOT_ALL, live=known, ids=item.ids_of(known))
        if one.live:
            there = there | one.ids
            found.append(replace(one, signature=signatures[one.signature]))
    for one in snapshot.fragments:
        if rest := one.ids - there:
            found.append(replace(one, signature=f"before {copied}: {one.signature}", ids=rest))
    return replace(snapshot, source_version=copied, fragments=tuple(found))


def _moved_source(dataset: lance.LanceDataset, view: TableLocation, target: TableLocation) -> _MovedSource | None:
    """Return the copy of a view's source that its copy in another database reads; None if it reads what the view does.

    The view has its source in its own database then.
    """
    definition = ViewDefinition.read(dataset.schema.metadata, view.name)
    there = without_credentials(target.database_uri)
    if definition.source_database != without_credentials(view.database_uri) or definition.source_database == there:
        return None
    source, copy = (_found(place.database_uri, definition.source_table, place.options) for place in (view, target))
    if copy is None:
        raise InvalidInput(
            f"View {view.name!r} is computed from table {definition.source_table!r}, of which {there} has no copy. "
            "Copy that first, then the view."
        )
    moved = replace(definition, source_database=there)
    return _MovedSource(source, copy, {QUERY_KEY: moved.to_json(), BASE_DATABASE_KEY: there})


def _found(database_uri: str, name: str, options: Options) -> TableLocation | None:
    """Return the location of a table that exists; None if there is none."""
    found = locate_or_none(database_uri, name, options)
    return found if found is not None and found.exists() else None


def _copy_job(source: Storage, target: TableLocation, errors: bool, job_id: str) -> None:
    """Copy the record and perhaps the error records of a job that has ended, under the name of the copy."""
    before, after = (JobFolder.of(place, job_id) for place in (source, target.checkpoints))
    record = before.read(RECORD) or {}
    if "ended" not in record:
        return
    names = {part: target.name for part in ("table", "view") if part in record}
    for name in before.storage.list_files("errors") if errors else ():
        after.storage.write_bytes(name, before.storage.read_bytes(name))
    after.storage.write_json(RECORD, {**record, **names})


def _clone(source: TableLocation, dataset: lance.LanceDataset, target: TableLocation) -> lance.LanceDataset:
    access = source.access
    if access.get("namespace_client_managed_versioning"):
        # Lance then refuses a target outside of the table's folder.
        options = tuple(sorted(access["storage_options"].items()))
        dataset = TableLocation(source.uri, source.name, options, alone=True).open(int(dataset.version))
    return dataset.deep_clone(target.uri, int(dataset.version), target.access["storage_options"])


def _make(source: TableLocation, target: TableLocation, commit: Callable[[], lance.LanceDataset]) -> None:
    def closed(error: BaseException) -> GenevaError:
        return StorageError(f"Table {source.name!r} cannot be copied to {target.uri}: {error}")

    with engine_errors(closed):
        made = None if target.exists() else create_new(f"table {target.name!r}", commit, target.exists)
    if made is None:
        raise _taken(target)


def _taken(target: TableLocation) -> InvalidInput:
    return InvalidInput(
        f"Table {target.name!r} already exists at {target.uri}. Give the copy another name: "
        f"db.copy_table(..., {target.name + '_copy'!r})."
    )


def _complete(target: TableLocation, begun: _Begun) -> None:
    """Change the schema metadata of the copy of a view; InvalidInput if others have changed the copy since."""
    import lance

    dataset = target.open()
    now = dataset.schema.metadata or {}
    if any(now.get(key.encode()) != value.encode() for key, value in begun.changes.items()):
        if dataset.version > begun.version:
            raise _taken(target)
        update = lance.LanceOperation.UpdateConfig(
            schema_metadata_updates=lance.LanceOperation.UpdateMap({**begun.changes}, False)
        )
        lance.LanceDataset.commit(dataset, lance.Transaction(dataset.version, update), **target.access)
    target.checkpoints.delete_all([_COPYING])
