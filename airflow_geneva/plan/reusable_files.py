"""Check whether a staged data file can still be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.lance_io.blobs import is_blob
from airflow_geneva.lance_io.data_file import LanceFile
from airflow_geneva.lance_io.fragments import FragmentFiles
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import RefreshSpec

if TYPE_CHECKING:
    import lance


def staged_fits(
    dataset: lance.LanceDataset,
    staged: StagedFragment,
    files: FragmentFiles,
    live: Ranges,
    due: Ranges,
    output_fields: tuple[int, ...],
    settled: Ranges,
) -> bool:
    """Whether a commit may replace a fragment's column with a staged data file.

    Args:
        files: the fragment now.
        live: its live offsets.
        due: the offsets that must be computed.
        output_fields: field ids of the output column.
        settled: rows of the file that need no further work, see
            :meth:`airflow_geneva.checkpoint.reuse.ReuseRules.done_rows`.
    """
    if staged.output_field_ids != output_fields or staged.output_files != files.output:
        return False
    if staged.physical_rows != files.physical_rows or not settled.contains(due):
        return False
    if staged.deletion != files.deletion and not staged.live.contains(live):
        return False
    return is_staged_complete(dataset, staged)


def is_staged_readable(dataset: lance.LanceDataset, staged: StagedFragment, column: str) -> bool:
    """Whether values can be read from the data file; for blobs, a file alone holds only references."""
    return not is_blob(dataset.schema.field(column)) and is_staged_complete(dataset, staged)


def is_staged_complete(dataset: lance.LanceDataset, staged: StagedFragment) -> bool:
    """Whether the data file exists, is readable, and has the expected number of rows."""
    return LanceFile.of_table(dataset, staged.file).count_rows() == staged.physical_rows


def is_view_file_complete(view: lance.LanceDataset, staged: StagedFragment) -> bool:
    """Whether the staged file of view rows exists, is readable, and has the expected number of rows."""
    return staged.dense and is_staged_complete(view, staged)


def is_view_file_readable(view: lance.LanceDataset, work: RefreshSpec, staged: StagedFragment) -> bool:
    """Whether single source rows can be read from a staged file; not after explode, and not with blob columns."""
    blobs = not work.plain_blobs and any(is_blob(field) for field in view.schema)
    return work.definition.explode is None and not blobs and is_view_file_complete(view, staged)
