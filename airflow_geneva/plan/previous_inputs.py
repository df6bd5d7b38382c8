"""Values that a column's UDF computed from previous input columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.facts import ColumnState, load_state
from airflow_geneva.checkpoint.provenance import Provenance, add_rows
from airflow_geneva.checkpoint.view_snapshot import Snapshot
from airflow_geneva.lance_io.fragments import Columns, FragmentFiles, columns_of, field_ids, live_offsets, read_manifest
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.computed_rows import ComputedRows
from airflow_geneva.plan.source_changes import VIEW_VERSION
from airflow_geneva.storage.files import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    import lance


@dataclass(frozen=True)
class PreviousInputs:
    """The rows of a column that were computed from previous inputs.

    Args:
        inputs: their field ids, as facts name them.
        computed_rows: finds the rows computed from these inputs.
        manifest: the table's fragments with the data files of these inputs.
        comparable: whether all of these inputs still exist, so that values can be compared.
    """

    inputs: str
    computed_rows: ComputedRows
    manifest: Mapping[int, FragmentFiles]
    comparable: bool

    @staticmethod
    def of(dataset: lance.LanceDataset, columns: Columns, state: ColumnState, inputs: str) -> PreviousInputs:
        names = {column.id(): column.name() for column in dataset.lance_schema.fields()}
        ids = [int(part) for part in inputs.split(",")]
        # Data files still name the fields of a dropped column.
        fields = tuple(field_ids(dataset, names[i]) if i in names else (i,) for i in ids)
        previous_inputs = Columns(fields, (), columns.output)
        comparable = all(i in names for i in ids)
        wanted = (*(names.get(i, "") for i in ids), names[columns.output[0]])
        manifest = read_manifest(dataset, previous_inputs)
        computed_rows = ComputedRows(dataset, previous_inputs, wanted, manifest, state.about(inputs))
        return PreviousInputs(inputs, computed_rows, manifest, comparable)

    def known(self, files: FragmentFiles, unknown: Ranges) -> dict[Provenance, Ranges]:
        """Return the rows of a fragment that hold a value computed from these inputs.

        Args:
            unknown: live offsets about which nothing else is known.
        """
        then = self.manifest[files.id]
        found = self.computed_rows.of(then)
        rest = unknown - Ranges.union(found.values())
        if rest and self.comparable:
            add_rows(found, self.computed_rows.by_value(then, rest).items())
        return {
            Provenance(f"{p.maker}/{self.inputs}"): rows & unknown
            for p, rows in found.items()
            if not p.failures and rows & unknown
        }


def version_label(version: str) -> str:
    """Format a version for the user."""
    name, _, inputs = version.partition("/")
    return f"{name} with other input columns" if inputs else name


def failed_addresses(dataset: lance.LanceDataset, checkpoints: Storage, column: str) -> Iterator[int]:
    """Yield the row addresses, at a table version, of the rows whose last UDF call failed."""
    columns = Columns((), (), field_ids(dataset, column))
    state = load_state(checkpoints, columns.output[0])
    for inputs in sorted(state.other_inputs("")):
        asked = PreviousInputs.of(dataset, columns, state, inputs)
        for files in asked.manifest.values():
            yield from _failed(dataset, files, asked.computed_rows, asked.comparable)


def failed_source_addresses(dataset: lance.LanceDataset, reads: Sequence[str], snapshot: Snapshot) -> Iterator[int]:
    """Yield the row addresses, at a version of a view's source, of the rows on which a UDF of the view failed last.

    Args:
        reads: the columns that the view reads.
        snapshot: the source as the view reflects it.
    """
    columns = columns_of(dataset, reads, (), None)
    manifest = read_manifest(dataset, columns)
    state = snapshot.state(VIEW_VERSION, columns.inputs_text)
    computed_rows = ComputedRows(dataset, columns, tuple(reads), manifest, state)
    for files in manifest.values():
        yield from _failed(dataset, files, computed_rows, comparable=True)


def _failed(
    dataset: lance.LanceDataset, files: FragmentFiles, computed_rows: ComputedRows, comparable: bool
) -> Iterator[int]:  # fmt: skip
    known = computed_rows.of(files)
    live = live_offsets(dataset, files)
    if files.signature not in computed_rows.state.facts and comparable:
        known.update(computed_rows.by_value(files, live - Ranges.union(known.values())))
    failed = live & Ranges.union(rows for provenance, rows in known.items() if provenance.failures)
    yield from (files.id << 32 | offset for offset in failed.offsets().tolist())
