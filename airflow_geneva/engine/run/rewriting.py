"""Write a table anew, with stable row ids and the newest storage version, and keep what is known of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.facts import STALE, Fact, Facts, save_facts
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import columns_of, fragment_files
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.rows import as_rows, table_in_memory
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.plan.computed_rows import ComputedRows, TracedFragment
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.definition import PROMOTED_KEY
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_FIRST_VERSION = 1


class RewrittenTable:
    """The rows of a table in new data files of another folder, which no version names until `commit`."""

    def __init__(self, dataset: lance.LanceDataset, target: TableLocation) -> None:
        from lance.fragment import write_fragments

        if blobs := [field.name for field in dataset.schema if is_blob(field)]:
            raise InvalidInput(f"Columns {blobs} hold blobs, which cannot be written anew. Leave out rewrite=True.")
        self.target = target
        self.schema = pa.schema([_without_ids(field) for field in dataset.schema], dataset.schema.metadata)
        rows = as_rows(dataset.scanner().to_reader(), self.schema, None)
        form: dict[str, Any] = {"data_storage_version": DATA_STORAGE_VERSION, "enable_stable_row_ids": True}
        written = write_fragments(rows, target.uri, self.schema, **form, **pylance_access(target.options))
        self.fragments: Sequence[Any] = written
        # Lance numbers the columns of every new table with this schema in the same way.
        self.like = table_in_memory(self.schema, **form)
        self.ends = np.cumsum([fragment.physical_rows for fragment in self.fragments], dtype=np.int64)

    def save_facts(self, output: Output, inputs: Sequence[str], computed: ComputedRows) -> None:
        """Write what is known of the values of an output, as facts about the new files."""
        columns = columns_of(self.like, inputs, (), output)
        # Facts name inputs by field ids, which differ in the new table; also those about earlier inputs.
        texts, signatures = dict[str, str](), dict[str, list[str]]()
        for part, read in (
            (computed, inputs),
            *((one, one.names[: len(one.columns.inputs)]) for one in computed.previous),
        ):
            if all(read):
                now = columns_of(self.like, read, (), output)
                texts[part.columns.inputs_text] = now.inputs_text
                signatures[now.inputs_text] = [fragment_files(one, now).signature for one in self.fragments]
        facts, first = list[Fact](), 0
        for traced in computed.trace():
            live = traced.live.offsets()
            for kind, of_inputs, rows in (*_said(traced, texts), (STALE, "", traced.stale)):
                text = texts.get(of_inputs, columns.inputs_text)
                at = first + np.searchsorted(live, (rows & traced.live).offsets())
                for number, there in self._by_fragment(at):
                    whole = None if len(there) == self.fragments[number].physical_rows else there
                    facts.append(Fact(signatures[text][number], kind, whole, _FIRST_VERSION, None, text))
            first += len(live)
        save_facts(self.target.checkpoints, columns.output[0], Facts.of(facts), _FIRST_VERSION)

    def _by_fragment(self, at: Offsets) -> list[tuple[int, Ranges]]:
        """Cut positions of rows by the new fragments, into offsets in these."""
        begins = self.ends - np.diff(self.ends, prepend=0)
        cuts = np.searchsorted(at, self.ends)
        parts = enumerate(np.split(at, cuts[:-1]))
        return [(number, Ranges.from_offsets(part - begins[number])) for number, part in parts if len(part)]

    def commit(self) -> lance.LanceDataset:
        import lance

        operation = lance.LanceOperation.Overwrite(self.schema, self.fragments)
        return lance.LanceDataset.commit(self.target.uri, operation, enable_stable_row_ids=True, **self.target.access)


def _said(traced: TracedFragment, texts: Mapping[str, str]) -> Iterator[tuple[str, str, Ranges]]:
    """Yield what is known of rows, with the earlier inputs from which they were computed; "" for those of now."""
    for provenance, rows in traced.known.items():
        maker, _, of_inputs = provenance.version.rpartition("/")
        if maker and of_inputs in texts:
            yield Provenance(maker).kind, of_inputs, rows
        else:
            yield provenance.kind, "", rows


def _without_ids(field: pa.Field) -> pa.Field:
    """Return a field without the metadata that names columns by their field ids, which differ in the new table."""
    metadata = {key: value for key, value in (field.metadata or {}).items() if key != PROMOTED_KEY.encode()}
    return field.with_metadata(metadata)
