"""Store a budget in the configuration of a small Lance table without rows, whose commits are conditional.

A write commits one key of the configuration, and Lance refuses it if another process has written the key since. This
works on every store that pylance supports, and needs no server and no package other than pylance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.conflicts import create_new, is_undecided
from airflow_geneva.engine.limits.budget import LATENESS, Budget, own_seconds
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.engine_errors import engine_errors
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.places import check_manifest
from airflow_geneva.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    import lance

_KEY = "geneva::budget"
_KEPT_VERSIONS = 500
_AT_EXIT = {"connect_timeout": "2s", "timeout": "5s", "client_max_retries": "0", "client_retry_timeout": "1"}


@dataclass(frozen=True)
class Found:
    """A budget, the version of the table that contains it, and the time of this machine's clock when it was read."""

    budget: Budget
    version: int
    read_at: float


@dataclass(frozen=True)
class BudgetTable:
    """The budget of one key of a database; `storage` is the folder of the database's limits."""

    storage: Storage
    key: str

    def at_exit(self) -> BudgetTable:
        """Return the same table with short timeouts, for use while a process exits."""
        options = {**dict(self.storage.options), **_AT_EXIT}
        return replace(self, storage=Storage(self.storage.root, tuple(sorted(options.items()))))

    @property
    def uri(self) -> str:
        return self.storage.path(f"{self.key}.lance")

    def read(self) -> Found:
        """Read the newest budget; create the table if it is missing.

        Raises:
            StorageError: the store does not answer, or the table is a link or names another folder.
            CommitConflict: the store refused every attempt to create the table.
        """
        import lance

        if self.storage.is_linked(self.uri):
            raise self._leads_elsewhere()
        began, access = own_seconds(), pylance_access(self.storage.options)
        with engine_errors(lambda error: StorageError(f"Cannot read the limit {self.key!r} at {self.uri}: {error}.")):
            try:
                dataset = lance.LanceDataset(self.uri, **access)
            except (OSError, ValueError):
                made = create_new(f"the table of limit {self.key!r}", self._create, self._exists)
                # Another process may have made it first.
                dataset = lance.LanceDataset(self.uri, **access) if made is None else made
            try:
                text = check_manifest(dataset).config().get(_KEY)
            except InvalidInput as error:
                raise self._leads_elsewhere() from error
        return Found(Budget() if text is None else Budget.from_json(text), dataset.version, began)

    def _create(self) -> lance.LanceDataset:
        import lance

        nothing = pa.table({"nothing": pa.array([], pa.int8())})
        options = pylance_access(self.storage.options)["storage_options"]
        return lance.write_dataset(nothing, self.uri, mode="create", storage_options=options)

    def _exists(self) -> bool:
        return bool(self.storage.list_folder(f"{self.key}.lance/_versions")[1])

    def _leads_elsewhere(self) -> StorageError:
        return StorageError(
            f"The limit {self.key!r} at {self.uri} leads to another folder, by a symbolic link or its manifest. Remove "
            "it, and the next call makes it again."
        )

    def write(self, budget: Budget, found: Found) -> bool:
        """Replace the budget that was read; return False if it changed meanwhile and must be read again."""
        import lance

        # A cleanup may have removed the versions in between, and Lance would not detect that others wrote them.
        if own_seconds() - found.read_at > LATENESS:
            return False
        access = pylance_access(self.storage.options)
        update = lance.LanceOperation.UpdateMap(updates={_KEY: budget.to_json()}, replace=False)
        operation = lance.LanceOperation.UpdateConfig(config_updates=update)
        with engine_errors(lambda error: StorageError(f"Cannot write the limit {self.key!r} at {self.uri}: {error}.")):
            try:
                fault_point("limit.before")
                dataset = lance.LanceDataset.commit(
                    self.uri, operation, read_version=found.version, max_retries=0, **access
                )
            except OSError as error:
                if is_undecided(error):
                    return False
                raise
            fault_point("limit.after")
            if dataset.version % _KEPT_VERSIONS == 0:
                dataset.cleanup_old_versions(retain_versions=_KEPT_VERSIONS)
        return True
