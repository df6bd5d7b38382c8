"""Import UDFs by their paths, and send them and their code to other processes."""

from __future__ import annotations

import dis
import importlib
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import cloudpickle  # type: ignore[import-untyped]

from airflow_geneva.engine.storage.engine_errors import raised_by_signal
from airflow_geneva.engine.udf import code_archive
from airflow_geneva.engine.udf.decorator import IMPORT_PATH, UDF, find_in_module, release_instances
from airflow_geneva.engine.udf.packages import how_to_install, missing_package
from airflow_geneva.engine.udf.unpicklable import what_cannot_be_pickled
from airflow_geneva.errors import InvalidInput


def load_udf(import_path: str) -> UDF:
    """Import the UDF at `"module:name"`.

    Raises:
        InvalidInput: the path is malformed, its module cannot be imported here, or there is no `@udf` object.
    """
    module_name, name = split_path(import_path)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # SystemExit, too, must not end this process
        if _is_from_outside(error):
            raise
        raise cannot_import(import_path, error) from error
    found = find_in_module(module, name)
    if isinstance(found, UDF):
        return found
    udfs = sorted(name for name, value in vars(module).items() if isinstance(value, UDF))
    what = f"there is no {name!r} in it" if found is None else f"{name!r} in it is a {type(found).__name__}"
    raise InvalidInput(
        f"UDF {import_path!r} cannot be loaded: {what}, and an import path is used only if it leads to a @udf object. "
        f"The UDFs of module {module.__name__!r} are {udfs!r}."
    )


def split_path(import_path: str) -> tuple[str, str]:
    """Return the module and the name of an import path; `InvalidInput` if it is malformed."""
    found = IMPORT_PATH.fullmatch(import_path)
    if found is None:
        raise InvalidInput(
            f'UDF path {import_path!r} is malformed. Give "module:name", such as "my_project.udfs:embed".'
        )
    return found[1], found[2]


def _is_from_outside(error: BaseException) -> bool:
    """Whether a signal ended an import, as Ctrl-C and Airflow's timeouts do, rather than the imported code."""
    if raised_by_signal(error):
        return True
    if isinstance(error, (Exception, SystemExit)):
        return False
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def cannot_import(import_path: str, error: BaseException) -> InvalidInput:
    """Describe an import that raised."""
    module = import_path.partition(":")[0]
    package = missing_package(repr(error))
    todo = "Put the module where this process finds it, and install what it imports."
    if package and package != module.partition(".")[0]:
        todo = f"{how_to_install(package)} Or, if it is a module of yours, put it into one of these places."
    return InvalidInput(
        f"UDF {import_path!r} cannot be loaded: importing module {module!r} raised {error!r}. "
        f"Python {sys.version.split()[0]} looked in {sys.path[:5]!r} and {max(len(sys.path) - 5, 0)} more places. "
        f"{todo}{_why_unused()}"
    )


@dataclass(frozen=True)
class UdfReference:
    """Refers to a UDF, or its stage, in another process: by import path and planned code version, or as a pickle.

    `archives` are the names of the archives with the code that was planned. With `groups`, it is called once per group.
    """

    import_path: str | None
    version: str
    pickled: bytes | None = field(default=None, repr=False)
    stage: bool = False
    archives: tuple[str, ...] = ()
    groups: bool = False

    @staticmethod
    def of(udf: UDF, stage: bool = False) -> UdfReference:
        """Refer to a UDF, or to its stage; `InvalidInput` if it has no import path, and cannot be pickled."""
        path, version = udf.import_path, udf.code_version
        if udf.dedup:
            _ = udf.value_identity  # computed here, where its source is available
        sent = (udf.stage if stage else None) or udf
        try:
            pickled = None if path else cloudpickle.dumps(sent)
            return UdfReference(path, version, pickled, stage, groups=udf.groups is not None)
        except Exception as error:
            raise InvalidInput(
                f"UDF {sent.name!r} cannot be sent to another process: {what_cannot_be_pickled(sent.func)} cannot be "
                f"pickled ({error}). Create it inside the function, or in the __init__ of a class, or put the UDF into "
                "a module, which the other process imports."
            ) from error

    def open(self) -> UDF:
        """Load the UDF; `InvalidInput` if it cannot be imported here, or has another code version than planned."""
        if self.import_path is None:
            made: UDF = cloudpickle.loads(self.pickled)
            return made
        if others := code_archive.prefer(self.archives):
            _forget_modules(others)
        udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            # A Spark worker that ran an earlier job still has that job's version of the module.
            top = self.import_path.split(":")[0].split(".")[0]
            _forget_modules([name for name in sys.modules if name == top or name.startswith(f"{top}.")])
            udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            raise InvalidInput(
                f"UDF {self.import_path!r} has version {udf.code_version} on the worker, and {self.version} was "
                "planned: its source changed since, or another copy of its module comes first on the worker's path. "
                f"Plan again, or remove that copy, or start a new session.{_why_unused()}"
            )
        if self.groups:
            return udf.of_groups
        return (udf.stage if self.stage else None) or udf


def _forget_modules(names: Sequence[str]) -> None:
    for name in names:
        del sys.modules[name]
    for top in {name.partition(".")[0] for name in names}:
        release_instances(top)
    importlib.invalidate_caches()
    linecache.clearcache()


def _why_unused() -> str:
    return "".join(f" The planned code is not used here: {why}." for why in code_archive.unused.values())


code_archive.install()
