"""Send a UDF to another process."""

from __future__ import annotations

import importlib
import linecache
import sys
from dataclasses import dataclass, field

import cloudpickle  # type: ignore[import-untyped]

from airflow_geneva.errors import InvalidInput
from airflow_geneva.udf.decorator import UDF, load_udf


@dataclass(frozen=True)
class UdfReference:
    """Refers to a UDF in another process: by its import path, or as a pickle if it has none.

    Args:
        import_path: the path that the other process imports, or None.
        version: the planned code version; the imported UDF must have it.
        pickled: the pickled UDF, if it was defined in the caller's process and has no import path.
    """

    import_path: str | None
    version: str
    pickled: bytes | None = field(default=None, repr=False)

    @staticmethod
    def of(udf: UDF) -> UdfReference:
        path = udf.import_path
        return UdfReference(path, udf.code_version, None if path else cloudpickle.dumps(udf))

    def open(self) -> UDF:
        """Load the UDF in this process.

        Raises:
            InvalidInput: it cannot be imported here, or has another code version than planned.
        """
        if self.import_path is None:
            made: UDF = cloudpickle.loads(self.pickled)
            return made
        udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            # A Spark worker that ran an earlier job still has that job's version of the module.
            _forget_module(self.import_path)
            udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            raise InvalidInput(
                f"UDF {self.import_path!r} has version {udf.code_version} on the worker, and {self.version} was "
                "planned: another copy of its module comes first on the worker's path. Remove that one, or start a new "
                "session."
            )
        return udf


def _forget_module(import_path: str) -> None:
    top = import_path.split(":")[0].split(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    linecache.clearcache()
