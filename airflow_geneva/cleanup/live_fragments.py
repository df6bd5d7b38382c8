"""Fragment signatures of a table's existing versions, in the form that column facts use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.lance_io.fragments import Columns, fields_present, read_manifest

if TYPE_CHECKING:
    import lance

_MOST_LOOKED_AT = 32


@dataclass(frozen=True)
class ExistingVersions:
    """The existing versions of a table, tagged ones included.

    Args:
        dataset: the table at its newest version.
        numbers: the versions.
    """

    dataset: lance.LanceDataset
    numbers: frozenset[int]

    @staticmethod
    def of(dataset: lance.LanceDataset) -> ExistingVersions:
        return ExistingVersions(dataset, frozenset(int(ref["version"]) for ref in dataset.version_refs()))

    def signatures(self, field_id: int, inputs: Iterable[str]) -> set[str] | None:
        """Return the signatures of existing fragments whose facts may be older than every existing version.

        A fragment keeps its files until it is removed. So it is in the oldest version of each unbroken series, or in a
        version that brought it back: a restore, or a commit based on a removed version. Only these versions are read.

        Args:
            field_id: the column's field.
            inputs: field ids of the inputs, in the form of facts.

        Returns:
            The signatures; None if a version cannot be read, or there are too many.
        """
        found: set[str] = set()
        try:
            with engine_errors():
                versions = self._to_look_at()
                if len(versions) > _MOST_LOOKED_AT:
                    return None
                for version in versions:
                    dataset = self.dataset.checkout_version(version)
                    output = fields_present(dataset, (field_id,))
                    for text in inputs if output else ():
                        fields = tuple(fields_present(dataset, (int(part),)) for part in text.split(","))
                        manifest = read_manifest(dataset, Columns(fields, (), output))
                        found.update(fragment.signature for fragment in manifest.values())
        except EngineError:
            return None
        return found

    def _to_look_at(self) -> list[int]:
        import lance

        found = {max(self.numbers)}
        for version in self.numbers:
            if version - 1 not in self.numbers:
                found.add(version)
                continue
            transaction = self.dataset.read_transaction(version)
            if (
                transaction is None
                or isinstance(transaction.operation, lance.LanceOperation.Restore)
                or transaction.read_version not in self.numbers
            ):
                found.add(version)
        return sorted(found)
