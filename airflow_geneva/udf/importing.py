"""Import the modules of UDFs so that they cannot end the process, and inspect their source without running it."""

from __future__ import annotations

import dis
import importlib
import os
import signal
import symtable
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from airflow_geneva.errors import InvalidInput


def import_udf_module(import_path: str) -> ModuleType:
    """Import the module of a UDF; `InvalidInput` if the import raised, `SystemExit` included."""
    module = import_path.partition(":")[0]
    try:
        return importlib.import_module(module)
    except BaseException as error:
        if _is_from_outside(error):
            raise
        raise _cannot_import(import_path, error) from error


def check_stored_path(import_path: str) -> None:
    """Reject an import path found in a table unless its module's source binds the name at its top level.

    No code of the module or its packages runs for this check. A module that is imported already may bind it in any way.
    """
    module, _, name = import_path.partition(":")
    name = name.partition(".")[0]
    if name in vars(sys.modules.get(module, ModuleType(""))):
        return
    if module.rpartition(".")[2] == "__main__":
        why = "it is a program, which would run"
    else:
        spec = _locate(module)
        if spec is None:
            missing = ModuleNotFoundError(f"No module named {module!r}", name=module)
            raise _cannot_import(import_path, missing) from missing
        why = "it is a module of Python itself" if _is_of_python(spec) else _unbound(spec, name)
    if why:
        raise InvalidInput(
            f"UDF {import_path!r} cannot be loaded: a table names it, and module {module!r} is not imported, "
            f"because {why}. Such a path is followed only to a name that the module's source binds at its top level, "
            "by def, class, assignment or import, but not by `import *`. Bind it there, or import the module first."
        )


def _unbound(spec: ModuleSpec, name: str) -> str:
    """Return why a module's source does not bind a name; "" if it does."""
    try:
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except (AttributeError, ImportError):
        source = None
    if source is None:
        return f"it has no source ({spec.origin})"
    try:
        symbol = symtable.symtable(source, spec.origin or spec.name, "exec").lookup(name)
    except KeyError:
        return f"its source {spec.origin} does not mention {name!r}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"its source {spec.origin} is not Python ({error})"
    return "" if symbol.is_assigned() or symbol.is_imported() else f"its source {spec.origin} does not bind {name!r}"


def _locate(module: str) -> ModuleSpec | None:
    """Find a module like an import does, but without importing its parent packages."""
    first, *rest = module.split(".")
    found = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec is not None), None)
    name = first
    for part in rest:
        if spec is None:
            return None
        package = sys.modules.get(name)
        inside = spec.submodule_search_locations if package is None else getattr(package, "__path__", None)
        if inside is None:
            return None
        # Search by the last part only: for the full name a namespace package would import its parent.
        spec = PathFinder.find_spec(part, list(inside))
        name = f"{name}.{part}"
    return spec


def _is_of_python(spec: ModuleSpec) -> bool:
    if spec.origin is None or not os.path.isabs(spec.origin):
        return spec.origin is not None
    parts = Path(spec.origin).parts
    home = Path(sysconfig.get_path("stdlib")).parts
    return parts[: len(home)] == home and parts[len(home)] not in ("site-packages", "dist-packages")


def _is_from_outside(error: BaseException) -> bool:
    """Whether a signal ended an import, as Ctrl-C and Airflow's timeouts do, rather than the imported code."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        last, at = at, at.tb_next
    if isinstance(error, (Exception, SystemExit)):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def _cannot_import(import_path: str, error: BaseException) -> InvalidInput:
    return InvalidInput(
        f"UDF {import_path!r} cannot be loaded: importing module {import_path.partition(':')[0]!r} raised {error!r}. "
        f"Python {sys.version.split()[0]} looked in {sys.path[:5]!r} and {max(len(sys.path) - 5, 0)} more places. "
        "Put the module where this process finds it, and install what it imports."
    )
