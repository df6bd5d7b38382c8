"""Which fragments the existing versions of a table have, as facts about a column name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.plan.manifest import Columns, fields_present, read_manifest

if TYPE_CHECKING:
    import lance

_MOST_LOOKED_AT = 32


@dataclass(frozen=True)
class ExistingVersions:
    """The versions of a table that are there, tagged ones included.

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
        """Signatures of fragments that exist although facts about them may be older than any version that is there.

        A fragment's files stay together until it is gone, so it lies in the first version that is left, or in one that
        brought it back: a restore, or a commit that was based on a version that is gone. Only these are read.

        Args:
            field_id: the column's field.
            inputs: field ids of inputs, as facts name them.

        Returns:
            None when a version cannot be read, or there are too many to read.
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
