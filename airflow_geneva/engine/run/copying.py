"""Copy a table with its definitions and what its jobs recorded, so that nothing is due in the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from airflow_geneva.engine.checkpoint.facts import ColumnState, Facts, save_facts
from airflow_geneva.engine.checkpoint.view_snapshot import load_snapshot, save_snapshot
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.lance_io.conflicts import create_new
from airflow_geneva.engine.lance_io.fragments import columns_of, output_names
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.plan.computed_rows import ComputedRows
from airflow_geneva.engine.plan.shared_files import OWN, facts_with_history, renumbered, state_with_bases
from airflow_geneva.engine.run.rewriting import RewrittenTable
from airflow_geneva.engine.storage.engine_errors import engine_errors
from airflow_geneva.engine.storage.files import Storage, in_threads
from airflow_geneva.engine.storage.location import TableLocation, locate
from airflow_geneva.engine.storage.places import base_folders
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf.definition import columns_to_take, definition_in, read_definition
from airflow_geneva.engine.views.definition import BASE_DATABASE_KEY, QUERY_KEY, ViewDefinition, is_view
from airflow_geneva.engine.views.state import CommittedViewState, read_advance_note, write_advance_note
from airflow_geneva.errors import GenevaError, InvalidInput, NoSuchTable, StorageError

if TYPE_CHECKING:
    import lance


def copy_table(source: TableLocation, target: TableLocation, rewrite: bool = False) -> None:
    """Copy the newest version of a table or view into another folder, with facts, errors and records of ended jobs.

    Files are copied as they are: rows keep their ids and addresses, and columns their field ids. The version is
    committed last, so that a process that is killed before leaves no table, and the next attempt begins again.

    Args:
        rewrite: write the rows anew, with stable row ids and the newest storage version; the errors of jobs, which name
            rows by their ids, are left out.

    Raises:
        InvalidInput: the table exists, a view's source is not in the other database, or the rows cannot be rewritten.
        StorageError: a store refuses to read or write a file.
    """
    dataset = source.open()
    of_view = is_view(dataset.schema.metadata)
    if of_view and rewrite:
        raise InvalidInput(f"{source.name!r} is a view, which is copied as it is. Leave out rewrite=True.")
    changes = _moved_source(dataset, source, target) if of_view else {}
    if target.exists():
        raise _taken(target)
    target.checkpoints.delete_all(target.checkpoints.list_files())  # of an attempt that was killed
    rewritten = RewrittenTable(dataset, target) if rewrite else None
    for output, state, computed in _computed_outputs(dataset, source.checkpoints):
        if rewritten is not None:
            rewritten.save_facts(output, computed.names[: len(computed.columns.inputs)], computed)
        else:
            facts = _facts(state, computed)
            save_facts(target.checkpoints, computed.columns.output[0], facts, int(dataset.version), state.defined)
    if of_view:
        changes |= _copy_snapshot(CommittedViewState(source, dataset), target)
    in_threads(partial(_copy_job, source.checkpoints, target, not rewrite), job_ids(source.checkpoints))
    fault_point("copy.recorded")
    _make(source, target, rewritten.commit if rewritten is not None else partial(_clone, dataset, target))
    _change_metadata(target, changes)


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


def _copy_snapshot(shown: CommittedViewState, target: TableLocation) -> dict[str, str]:
    """Copy the record of what a view shows; return the schema metadata that names it."""
    newest, checkpoints = shown.newest, shown.location.checkpoints
    if not newest.job_id or newest.changed:
        return {}
    note = read_advance_note(shown.location)
    note = note if note is not None and note.swap == newest.snapshot else None
    for key in {newest.snapshot, *([note.snapshot] if note else [])}:
        if (snapshot := load_snapshot(checkpoints, key)) is not None:
            save_snapshot(target.checkpoints, key, snapshot)
    if note is not None:
        write_advance_note(target, note)
    return newest.metadata


def _moved_source(dataset: lance.LanceDataset, view: TableLocation, target: TableLocation) -> dict[str, str]:
    """Return the metadata by which a copy in another database reads the source there, if the view reads its own's."""
    definition = ViewDefinition.read(dataset.schema.metadata, view.name)
    there = without_credentials(target.database_uri)
    if definition.source_database != without_credentials(view.database_uri) or definition.source_database == there:
        return {}
    try:
        exists = locate(target.database_uri, definition.source_table, target.options).exists()
    except NoSuchTable:
        exists = False
    if not exists:
        raise InvalidInput(
            f"View {view.name!r} is computed from table {definition.source_table!r}, of which {there} has no copy. "
            "Copy that first, then the view."
        )
    moved = replace(definition, source_database=there)
    return {QUERY_KEY: moved.to_json(), BASE_DATABASE_KEY: there}


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


def _clone(dataset: lance.LanceDataset, target: TableLocation) -> lance.LanceDataset:
    return dataset.deep_clone(target.uri, int(dataset.version), target.access["storage_options"])


def _make(source: TableLocation, target: TableLocation, commit: Callable[[], lance.LanceDataset]) -> None:
    def closed(error: BaseException) -> GenevaError:
        return StorageError(f"Table {source.name!r} cannot be copied to {target.uri}: {error}")

    with engine_errors(closed):
        made = None if target.exists() else create_new(f"table {target.name!r}", commit, target.exists)
    if made is None:
        raise _taken(target)


def _taken(target: TableLocation) -> InvalidInput:
    return InvalidInput(f"Table {target.name!r} already exists at {target.uri}. Give another name.")


def _change_metadata(target: TableLocation, changes: Mapping[str, str]) -> None:
    import lance

    dataset = target.open()
    now = dataset.schema.metadata or {}
    if all(now.get(key.encode()) == value.encode() for key, value in changes.items()):
        return
    update = lance.LanceOperation.UpdateConfig(
        schema_metadata_updates=lance.LanceOperation.UpdateMap({**changes}, False)
    )
    lance.LanceDataset.commit(dataset, lance.Transaction(dataset.version, update), **target.access)
