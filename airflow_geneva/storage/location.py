"""The location of a table and how to open it; the only object that carries credentials."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.uri import join

if TYPE_CHECKING:
    import lance

# On every DataReplacement commit Lance warns on standard error that the operation is unstable, and Airflow logs that
# as an error. The user can do nothing about it. Lance reads the variable once, on import; the user's own value wins.
os.environ.setdefault("LANCE_LOG", "warn,lance_table::transaction::manifest_build=error")


@dataclass(frozen=True)
class TableLocation:
    """A Lance table and the credentials to reach it.

    Args:
        uri: normalized URI of its folder.
        name: the table's name in its database.
        options: storage options as sorted pairs; never shown by ``repr``.
    """

    uri: str
    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"TableLocation({self.uri!r})"

    @property
    def checkpoints(self) -> Storage:
        """The folder of checkpoints, plans and job records."""
        return Storage(join(self.uri, "_checkpoints"), self.options)

    @property
    def database_uri(self) -> str:
        """The URI of the folder that contains the table."""
        return self.uri.rpartition("/")[0]

    @property
    def storage_options(self) -> dict[str, str] | None:
        return dict(self.options) or None

    def exists(self) -> bool:
        """Whether the table has a version; a process that was killed while creating it leaves only files."""
        return bool(Storage(self.uri, self.options).list_folder("_versions")[1])

    def open(self, version: int | None = None) -> lance.LanceDataset:
        """Open the newest version, or the given one.

        Raises:
            InvalidInput: there is no such table or version.
        """
        import lance

        def closed(error: BaseException) -> InvalidInput:
            what = f"Table {self.name!r}" if version is None else f"Version {version} of table {self.name!r}"
            return InvalidInput(
                f"{what} cannot be opened at {self.uri}: {error}. Check the name, the location and the credentials"
                + ("." if version is None else "; a version that was cleaned up cannot be opened.")
            )

        with engine_errors(closed):
            return lance.dataset(self.uri, version=version, storage_options=self.storage_options)
