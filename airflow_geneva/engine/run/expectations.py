"""Check expectations on the values in staged data files, before a commit or a swap makes them visible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import lance
import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.records import StagedFragment, decode_runs, encode_runs
from airflow_geneva.engine.checkpoint.reuse import BrokenFile
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.folder import CHECKED, COMMIT, JobFolder
from airflow_geneva.engine.lance_io.blobs import is_blob, scan_bytes
from airflow_geneva.engine.lance_io.data_file import LanceFile
from airflow_geneva.engine.lance_io.fragments import FragmentFiles, live_offsets, offsets_of, open_fragment
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.table_key import RowNames
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.plan.freshness import computed_offsets
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.saved_plan import SavedPlan
from airflow_geneva.engine.results import MOST_EXAMPLES, Checked
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.expect import FAIL, Expectation, Verdict
from airflow_geneva.engine.udf.of_process import find_udf
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID
from airflow_geneva.engine.write.data_files import WINDOW_ROWS, fit_rows, staged_file
from airflow_geneva.errors import ExpectationFailed

logger = logging.getLogger("airflow_geneva.run")
_SHOWN = 80


@dataclass(frozen=True)
class ValueChecks:
    """The expectations of the columns that a job computes.

    Args:
        written: the table or view, in whose folder the staged files are.
        spec: the planned job.
        database: where the UDFs of its columns were given.
        names: returns the keys of rows, which name the examples; called only for rows that are not as expected.
    """

    written: lance.LanceDataset
    spec: JobSpec
    database: str
    names: Callable[[], RowNames]

    @cached_property
    def expected(self) -> list[tuple[str, Expectation]]:
        udfs, where = self.spec.udfs.items(), self.database
        of_udfs = [(column, one) for column, udf in udfs for one in _with_functions(column, udf, where)]
        return [*of_udfs, *self.spec.expectations]

    def check(self, staged: Iterable[StagedFragment]) -> list[Checked]:
        """Read computed values batch by batch; rows on which a UDF failed are not checked."""
        columns = list(dict.fromkeys(column for column, _ in self.expected))
        found: list[Checked | None] = [None] * len(self.expected)
        whole = {at: list[tuple[RowIds, pa.Table]]() for at, (_, one) in enumerate(self.expected) if one.needs_table}
        for ids, batch in self._batches(staged, columns) if columns else ():
            fault_point("values.check")
            for at, (column, one) in enumerate(self.expected):
                values = pa.table({column: batch.column(column)})
                if at in whole:
                    whole[at].append((ids, values))
                else:
                    new = _checked(column, one, ids, values)
                    found[at] = new if (old := found[at]) is None else old + new
        for at, parts in whole.items():
            if parts:
                ids, values = np.concatenate([ids for ids, _ in parts]), pa.concat_tables(part for _, part in parts)
                found[at] = _checked(*self.expected[at], ids, values)
        fault_point("values.checked")
        return [
            replace(checked, passed=one.allows(checked.wrong, checked.rows), keys=self._keys(checked))
            for (_, one), checked in zip(self.expected, found, strict=True)
            if checked is not None
        ]

    def _keys(self, checked: Checked) -> tuple[str, ...]:
        return tuple(self.names().of([row for row, _ in checked.examples])) if checked.examples else ()

    def _batches(
        self, staged: Iterable[StagedFragment], columns: Sequence[str]
    ) -> Iterator[tuple[RowIds, pa.RecordBatch]]:  # fmt: skip
        plain = self.spec.plain_blobs
        blobs = [name for name in columns if is_blob(self.written.schema.field(name)) and not plain]
        siblings = self.spec.columns[1:]
        output = Output.of(self.written, self.spec.columns[0]) if siblings else Output(())
        readable = [*output.columns] if siblings else [name for name in columns if name not in blobs]
        for fragment in staged:
            offsets, ids = decode_runs(fragment.runs)
            failed = fragment.failures.all.mask(offsets)
            nulls = {name: rows for name, rows in fragment.nulls if name in blobs}
            if len(nulls) < len(blobs):
                raise BrokenFile(fragment.file) from ValueError("It was written before its NULLs were kept.")
            file, read = staged_file(self.written, fragment.file), readable
            positions = offsets[~failed]
            if fragment.dense:
                # The file of a view: an exploded source row has several rows in it, or none.
                read, positions = [*readable, SOURCE_ROW_ID], np.arange(fragment.physical_rows)
            at, known = 0, ids[~failed]
            while at < len(positions):
                window = positions[at : at + WINDOW_ROWS]
                batch, rows = fit_rows(partial(_read, file, read, window, self.spec.sizing.batch_bytes), len(window))
                if siblings:
                    batch = pa.record_batch([output.joined(batch.columns)], names=[self.spec.columns[0]])
                for name, there in nulls.items():
                    batch = batch.append_column(name, pa.array(np.ones(rows, np.bool_), mask=there.mask(window[:rows])))
                if fragment.dense:
                    of = batch.column(SOURCE_ROW_ID).to_numpy().view(np.uint64)
                    kept = ~np.isin(of, ids[failed])
                    yield of[kept], batch.filter(pa.array(kept))
                else:
                    yield known[at : at + rows], batch
                at += rows


def without_deleted(staged: StagedFragment, dataset: lance.LanceDataset, files: FragmentFiles) -> StagedFragment:
    """Return a staged fragment of a column without the rows that were deleted in a version since it was staged."""
    if files.deletion == staged.deletion:
        return staged
    offsets, ids = decode_runs(staged.runs)
    live = live_offsets(dataset, files).mask(offsets)
    return staged if live.all() else replace(staged, runs=encode_runs(offsets[live], ids[live]))


def _read(file: LanceFile, columns: Sequence[str], positions: Offsets, max_bytes: float, rows: int) -> pa.RecordBatch:
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return file.read(columns, positions[:rows], max_bytes)


def _with_functions(column: str, udf: UdfDefinition, database: str) -> Iterator[Expectation]:
    """Yield the planned expectations, with the functions of the UDF in this process."""
    planned = udf.expectations
    if not any(one.needs_function for one in planned):
        yield from planned
        return
    advice = "Move it to a module, or check its values in the process that made it."
    found = find_udf(udf, database, f"column {column!r}", advice)
    here = {(one.kind, one.arguments): one.function for one in found.expect}
    for one in planned:
        function = here.get((one.kind, one.arguments))
        if one.needs_function and function is None:
            raise ExpectationFailed(
                f"Expectation {one} of column {column!r} was planned, and UDF {udf.name!r} does not have it here. Its "
                "code was changed since: clear the plan task with its downstream tasks."
            )
        yield replace(one, function=function)


def _checked(column: str, one: Expectation, ids: RowIds, values: pa.Table) -> Checked:
    verdict = one.judge(values) if values.num_rows else Verdict()
    named = verdict.wrong[:MOST_EXAMPLES]
    shown = (mask_secrets(repr(values.column(0)[at].as_py()))[:_SHOWN] for at in named)
    examples = tuple((int(ids[at]), text) for at, text in zip(named, shown, strict=True))
    return Checked(
        column, str(one), one.level, True, values.num_rows, len(verdict.wrong), examples, mask_secrets(verdict.why)
    )


def found_in_job(folder: JobFolder, saved: SavedPlan, finished: Sequence[Checked]) -> tuple[Checked, ...]:
    """Return the results of the checks in the commits of a job's shards and in its `finish`."""
    if not (saved.spec.expectations or any(udf.expect for udf in saved.spec.udfs.values())):
        return ()
    shards = (folder.read_shard(saved.fingerprint, index, COMMIT) for index in range(len(saved.shards)))
    found = (Checked.from_json(document) for shard in shards for document in shard.get(CHECKED, ()))
    return tuple(total([*found, *finished]))


def total(found: Iterable[Checked]) -> list[Checked]:
    """Add up the results of the checks of several parts of a job's rows."""
    sums: dict[tuple[str, str, str], Checked] = {}
    for checked in found:
        key = (checked.column, checked.expectation, checked.level)
        sums[key] = sums[key] + checked if key in sums else checked
    return list(sums.values())


def stop_if_not_met(found: Sequence[Checked], what: str) -> None:
    """Raise an error or log a warning for expectations that are not met.

    Args:
        what: names the values that stay invisible.

    Raises:
        ExpectationFailed: an expectation of level `fail` is not met.
    """
    wrong = [checked for checked in found if not checked.passed]
    for checked in wrong:
        logger.warning("%s", _sentence(checked))
    stopping = [_sentence(checked) for checked in wrong if checked.level == FAIL]
    if stopping:
        raise ExpectationFailed(
            f"{' '.join(stopping)} {what} stays invisible; computed rows are kept in checkpoints. Repair the function "
            "or the expectation, and run it again: a change of the expectation alone computes nothing again."
        )


def _sentence(checked: Checked) -> str:
    text = str(checked)
    return f"{text[0].upper()}{text[1:]}."


class StoredValues:
    """Checks the expectations of a column on the values that a table version holds.

    Fragments that are unchanged since the last call are not read again.
    """

    def __init__(self, location: TableLocation, column: str, udf: UdfDefinition) -> None:
        self.location = location
        self.column = column
        self.expected = list(_with_functions(column, udf, location.database_uri))
        self.inputs = udf.input_columns or ()
        self._known: dict[tuple[int, str, str], tuple[list[Checked], tuple[RowIds, pa.Table]]] = {}

    def check(self, dataset: lance.LanceDataset) -> list[Checked]:
        """Check the computed values of a version; rows on which the UDF failed are left out."""
        if not self.expected:
            return []
        now = dict[tuple[int, str, str], tuple[list[Checked], tuple[RowIds, pa.Table]]]()
        for files, rows in computed_offsets(dataset, self.location.checkpoints, self.inputs, self.column):
            key = (files.id, files.signature, files.deletion)
            if rows:
                now[key] = self._known.get(key) or self._read(dataset, files, rows)
        self._known = now
        found = total(checked for parts, _ in now.values() for checked in parts)
        whole = [values for _, values in now.values()]
        if whole and any(one.needs_table for one in self.expected):
            ids, table = np.concatenate([ids for ids, _ in whole]), pa.concat_tables(part for _, part in whole)
            found += [_checked(self.column, one, ids, table) for one in self.expected if one.needs_table]
        allowed = {str(one): one for one in self.expected}
        return [replace(one, passed=allowed[one.expectation].allows(one.wrong, one.rows)) for one in found]

    def _read(
        self, dataset: lance.LanceDataset, files: FragmentFiles, rows: Ranges
    ) -> tuple[list[Checked], tuple[RowIds, pa.Table]]:
        output = Output.of(dataset, self.column)
        fragment = open_fragment(dataset, files.id)
        scanner = scan_bytes(dataset, list(output.columns), fragment, with_row_id=True, with_row_address=True)
        parts, kept = list[Checked](), list[tuple[RowIds, pa.Table]]()
        keeps = any(one.needs_table for one in self.expected)
        for batch in scanner.to_batches():
            chosen = batch.filter(pa.array(rows.mask(offsets_of(batch))))
            found = output.joined([chosen.column(name) for name in output.columns])
            ids, values = chosen.column("_rowid").to_numpy(), pa.table({self.column: found})
            parts += [_checked(self.column, one, ids, values) for one in self.expected if not one.needs_table]
            kept += [(ids, values)] if keeps else []
        values = pa.concat_tables([part for _, part in kept]) if kept else pa.table({})
        return total(parts), (np.concatenate([ids for ids, _ in kept] or [np.empty(0, np.uint64)]), values)
