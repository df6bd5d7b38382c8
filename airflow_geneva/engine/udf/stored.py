"""Import the UDFs that tables name, if the module's source, which is read but not run, binds the name to a UDF."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from inspect import getattr_static
from typing import TypeAlias

from airflow_geneva.engine.udf.code_archive import is_of_python
from airflow_geneva.engine.udf.decorator import UDF
from airflow_geneva.engine.udf.shipping import cannot_import, load_udf, split_path
from airflow_geneva.errors import InvalidInput

_PACKAGE = __package__.partition(".")[0]
_DECORATORS = {(module, "udf") for module in (_PACKAGE, f"{_PACKAGE}.udf", f"{_PACKAGE}.udf.decorator")}
_OURS = (f"{_PACKAGE}.functions",)
_PASSING_ON = {"partial", "replace"}
"""Functions of the standard library that return something like their first argument."""
_DEEPEST = 50
"""The maximum number of names that are followed from one to the next."""

_makers: ContextVar[Sequence[str]] = ContextVar("udf_modules", default=())

_Scope: TypeAlias = ast.Module | ast.ClassDef


@contextmanager
def udf_modules(modules: Sequence[str]) -> Iterator[None]:
    """Set modules and packages whose functions make UDFs: in this block, names bound to their results are imported."""
    token = _makers.set(modules)
    try:
        yield
    finally:
        _makers.reset(token)


def load_stored_udf(import_path: str) -> UDF:
    """Import the UDF that a table names; the module is imported only if its source binds the name to a UDF.

    Raises:
        InvalidInput: see `load_udf`; or the source does not bind the name to a UDF.
    """
    module, name = split_path(import_path)
    if _is_imported(module, name):
        return load_udf(import_path)
    if why := _why_no_udf(import_path, module, name):
        raise InvalidInput(
            f"UDF {import_path!r} cannot be loaded: a table names it, and module {module!r} is not imported, "
            f"because {why}. Such a path is followed only to a name that the module's source decorates with @udf, or "
            "binds to what is so decorated, or to a call of a function that makes UDFs, of a module that [geneva] "
            "udf_modules names. Do one of these, give the function to the call (udf=...), or import the module first."
        )
    return load_udf(import_path)


def _is_imported(module: str, name: str) -> bool:
    """Whether this process has already imported the UDF, however its name was bound; runs no code."""
    found: object = sys.modules.get(module)
    try:
        for part in name.split("."):
            found = getattr_static(found, part)
    except AttributeError:
        return False
    return isinstance(found, UDF)


def _why_no_udf(import_path: str, module: str, name: str) -> str:
    """Return why a module's source does not bind a name to a UDF, or ""; runs no code of it or its packages."""
    if module.rpartition(".")[2] == "__main__":
        return "it is a program, which would run"
    spec = _find_spec(module)
    if spec is None:
        missing = ModuleNotFoundError(f"No module named {module!r}", name=module)
        raise cannot_import(import_path, missing) from missing
    if is_of_python(spec):
        return "it is a module of Python itself"
    source = _read_source(spec)
    if source is None:
        return f"it has no source ({spec.origin})"
    try:
        tree = ast.parse(source)
        if _Reader().makes_udf(module, tree, name.split(".")):
            return ""
        bound = any(_bound(tree, name.partition(".")[0]))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"its source {spec.origin} is not Python ({error})"
    return f"its source {spec.origin} " + (f"makes no UDF of {name!r}" if bound else f"does not bind {name!r}")


@dataclass
class _Reader:
    """Follows names through the sources of modules; a name that leads back to itself is no UDF."""

    trees: dict[str, ast.Module | None] = field(default_factory=dict)
    seen: set[tuple[str, int, str]] = field(default_factory=set)

    def makes_udf(self, module: str, scope: _Scope, names: Sequence[str]) -> bool:
        """Whether a scope of a module binds a dotted name to a UDF, or to something that makes one."""
        key = (module, id(scope), ".".join(names))
        if key in self.seen or len(self.seen) > _DEEPEST:
            return False
        self.seen.add(key)
        return any(self._is_udf(module, scope, bound, names[0], names[1:]) for bound in _bound(scope, names[0]))

    def _is_udf(self, module: str, scope: _Scope, bound: ast.AST, name: str, rest: Sequence[str]) -> bool:
        match bound:
            case ast.ClassDef() if rest:
                return self.makes_udf(module, bound, rest)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                decorated = any(self._derives(module, scope, one) for one in bound.decorator_list)
                return decorated or (not rest and _is_below(module, _makers.get()))
            case ast.ImportFrom():
                origin = _absolute(module, bound, self._is_package(module))
                given = next(one.name for one in bound.names if (one.asname or one.name) == name)
                return self._is_of(origin, [given, *rest])
            case ast.Import():
                given = next(one.name for one in bound.names if (one.asname or one.name.partition(".")[0]) == name)
                return self._is_of(name if name == given.partition(".")[0] else given, rest)
            case ast.expr():
                return self._derives(module, scope, bound, rest)
        return False

    def _derives(self, module: str, scope: _Scope, value: ast.expr, rest: Sequence[str] = ()) -> bool:
        """Whether an expression is the decorator, or a call of what derives from it, or a name of one of these."""
        match value:
            case ast.Name():
                if self.makes_udf(module, scope, [value.id, *rest]):
                    return True
                tree = self._tree(module)
                return tree is not None and scope is not tree and self.makes_udf(module, tree, [value.id, *rest])
            case ast.Attribute():
                return self._derives(module, scope, value.value, [value.attr, *rest])
            case ast.Call() if not rest:
                called = value.func
                plain = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
                if plain in _PASSING_ON and value.args:
                    return self._derives(module, scope, value.args[0])
                return self._derives(module, scope, called)
            case ast.IfExp():
                return any(self._derives(module, scope, one, rest) for one in (value.body, value.orelse))
        return False

    def _is_of(self, module: str, names: Sequence[str]) -> bool:
        """Whether a dotted name in another module is the decorator, or is a UDF or makes one."""
        if not module or not names:
            return False
        if (len(names) == 1 and (module, names[0]) in _DECORATORS) or _is_below(module, (*_OURS, *_makers.get())):
            return True
        tree = self._tree(module)
        if tree is not None and self.makes_udf(module, tree, names):
            return True
        # The first of the names may be a module of a package.
        return self._is_of(f"{module}.{names[0]}", names[1:])

    def _is_package(self, module: str) -> bool:
        spec = _find_spec(module)
        return spec is not None and spec.submodule_search_locations is not None

    def _tree(self, module: str) -> ast.Module | None:
        """Parse the source of a module; None if it has none, or is part of Python."""
        if module not in self.trees:
            spec = _find_spec(module)
            source = None if spec is None or is_of_python(spec) else _read_source(spec)
            self.trees[module] = None if source is None else ast.parse(source)
        return self.trees[module]


def _bound(scope: _Scope, name: str) -> Iterator[ast.AST]:
    """Yield what a scope binds to a name: definitions, imports and assigned values."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
                continue
            case ast.Import() | ast.ImportFrom():
                names = (one.asname or (one.name.partition(".")[0] if isinstance(node, ast.Import) else one.name)
                         for one in node.names)  # fmt: skip
                if name in names:
                    yield node
                continue
            case ast.Assign(targets=targets, value=value) if any(_is_name(target, name) for target in targets):
                yield value
            case ast.AnnAssign(target=target, value=ast.expr() as value) if _is_name(target, name):
                yield value
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            waiting += ast.iter_child_nodes(node)


def _is_name(target: ast.AST, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    """Return the absolute name of the module in a `from ... import`."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _is_below(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _read_source(spec: ModuleSpec) -> str | None:
    try:
        return spec.loader.get_source(spec.name)  # type: ignore[union-attr,no-any-return]
    except (AttributeError, ImportError, SyntaxError, OSError):
        return None


def _find_spec(module: str) -> ModuleSpec | None:
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
