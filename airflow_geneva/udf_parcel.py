"""A UDF on its way to another process."""

from __future__ import annotations

import importlib
import linecache
import sys
from dataclasses import dataclass, field

import cloudpickle  # type: ignore[import-untyped]

from airflow_geneva.errors import InvalidInput
from airflow_geneva.udf import UDF, load_udf


@dataclass(frozen=True)
class UdfParcel:
    """A UDF on its way to another process: its import path, or itself where there is none.

    Args:
        import_path: how the other process imports it, or None.
        version: the code version that was planned with; what an import path leads to must have it.
        pickled: the function itself, when it was made in the caller's own process and has no import path.
    """

    import_path: str | None
    version: str
    pickled: bytes | None = field(default=None, repr=False)

    @staticmethod
    def of(udf: UDF) -> UdfParcel:
        path = udf.import_path
        return UdfParcel(path, udf.code_version, None if path else cloudpickle.dumps(udf))

    def open(self) -> UDF:
        """The UDF in this process.

        Raises:
            InvalidInput: it cannot be imported here, or is not the code that was planned with.
        """
        if self.import_path is None:
            made: UDF = cloudpickle.loads(self.pickled)
            return made
        udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            # A worker that served an earlier job has the module as it was then.
            _forget_module(self.import_path)
            udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            raise InvalidInput(
                f"UDF {self.import_path!r} is version {udf.code_version} where it runs, and {self.version} was "
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
