"""Source files as syntax trees: where a function or class is defined, and which outside names it reads.

Imports only the standard library, so that any Python version can load it and gets the same results.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from airflow_geneva.errors import InvalidInput

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition: TypeAlias = _Function | ast.ClassDef


class SourceFile:
    """A parsed source file.

    `imports` maps each name that `from ... import ...` binds to the level and the dotted name of the import.
    `changed_globals` are the module-level names that functions of the file assign.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.imports: dict[str, tuple[int, str]] = {}
        self.changed_globals: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Global):
                self.changed_globals.update(node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    dotted = f"{node.module or ''}.{alias.name}"
                    self.imports.setdefault(alias.asname or alias.name, (node.level, dotted))

    @staticmethod
    def read(filename: str | None, namespace: dict[str, Any], label: str) -> SourceFile:
        """Parse a source file; a notebook cell or a file inside a zip is found through `linecache` and `namespace`."""
        linecache.checkcache(filename or "")
        text = "".join(linecache.getlines(filename or "", namespace))
        if not text:
            typed = str(filename).startswith("<")
            hint = ": Python's prompt keeps none, put it in a file or a notebook" if typed else ""
            raise InvalidInput(f"the source of {label} is not available{hint}")
        try:
            return _parse(text)
        except SyntaxError as error:
            raise InvalidInput(f"the source of {label} cannot be parsed: {error}") from error

    def functions(self, function: types.FunctionType) -> list[Definition]:
        """Return the nodes at the function's position in the source: one, or several lambdas on one line."""
        code = function.__code__
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            and isinstance(node, ast.Lambda) == (code.co_name == "<lambda>")
            and getattr(node, "name", code.co_name) == code.co_name
            and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) == code.co_firstlineno
        ]

    def classes(self, cls: type, method_lines: list[int]) -> list[Definition]:
        """Return the definitions of a class by its qualified name; if several match, those with one of its methods."""
        named = [node for name, node in _classes(self.tree, "") if name == cls.__qualname__]
        if not method_lines:
            return [*named]
        return [n for n in named if any(n.lineno <= line <= (n.end_lineno or n.lineno) for line in method_lines)]


def package_of(namespace: dict[str, Any]) -> str:
    """Return the package to which relative imports of a module refer."""
    name = str(namespace.get("__name__") or "")
    return str(namespace.get("__package__") or (name if "__path__" in namespace else name.rpartition(".")[0]))


def absolute_name(level: int, name: str, package: str) -> str:
    """Resolve a relative import of a package to a full name; without a package, return it as written."""
    parts = package.split(".") if package else []
    if not 0 < level <= len(parts):
        return "." * level + name
    return ".".join([*parts[: len(parts) - level + 1], *filter(None, name.split("."))])


_parse = functools.lru_cache(maxsize=16)(SourceFile)


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            yield from _classes(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _classes(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _classes(child, prefix)


def significant_fields(node: ast.AST, top: bool) -> Iterator[tuple[str, Any]]:
    """Return the fields of a node that affect behavior: no empty fields, docstrings, or decorators of the `top` node.

    Newer Python versions add fields (`type_params`); these are empty in code that older versions can parse.
    """
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "type_comment") or (top and name == "decorator_list"):
            continue
        if name == "body" and isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = value if ast.get_docstring(node, clean=False) is None else value[1:]
        if name == "values" and isinstance(node, ast.JoinedStr):
            value = list(_merge_strings(value))
        if value is None or value == [] or (name == "format_spec" and not value.values):
            continue
        yield name, value


def _merge_strings(parts: list[ast.expr]) -> Iterator[ast.expr]:
    """Join adjacent literal parts of an f-string: Python before and after 3.12 splits them differently."""
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, ast.Constant)):
        if not is_text:
            yield from group
        elif text := "".join(str(part.value) for part in group if isinstance(part, ast.Constant)):
            yield ast.Constant(text)


def free_names(definition: Definition) -> set[str]:
    """Return the names that a definition reads from outside, except in its annotations and decorators."""
    scope = _Scope()
    scope.define(definition)
    return scope.used | scope.nested


class _Scope(ast.NodeVisitor):
    """Names read and bound in one scope; `nested` are the free names of its inner functions."""

    def __init__(self, enclosing_scope: _Scope | None = None) -> None:
        self.used: set[str] = set()
        self.nested: set[str] = set()
        self.bound: set[str] = set()
        self.outer: set[str] = set()
        self.enclosing_scope = enclosing_scope

    def define(self, node: Definition) -> None:
        """Visit a definition without its decorators and annotations."""
        outside: Sequence[ast.AST | None]
        inside: Sequence[ast.AST]
        local: set[str] = set()
        if isinstance(node, ast.ClassDef):
            outside, inside = [*node.bases, *node.keywords], node.body
        else:
            outside = [*node.args.defaults, *node.args.kw_defaults]
            inside = node.body if isinstance(node.body, list) else [node.body]
            local = {parameter.name for parameter in getattr(node, "type_params", [])}
            local |= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        inner = _Scope()
        inner.bound |= local
        for part in filter(None, outside):
            self.visit(part)
        for part in inside:
            inner.visit(part)
        # A method does not see the names of its class body.
        hidden = inner.nested if isinstance(node, ast.ClassDef) else inner._free(inner.nested)
        self.nested |= inner._free(inner.used) | hidden

    visit_Lambda = define

    def _free(self, names: set[str]) -> set[str]:
        return (names - self.bound) | (names & self.outer)

    def visit_Name(self, node: ast.Name) -> None:
        (self.used if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.outer.update(node.names)
        self.used.update(node.names)

    visit_Nonlocal = visit_Global

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.bound.add(node.name)
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.define(node)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        inner = _Scope(enclosing_scope=self)
        for child in ast.iter_child_nodes(node):
            inner.visit(child)
        self.nested |= inner._free(inner.used | inner.nested)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self
        while scope.enclosing_scope is not None:
            scope = scope.enclosing_scope
        scope.bound.add(node.target.id)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).split(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            self.bound.add(name)
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = visit_ExceptHandler
