"""The version of a UDF's code: a hash that is the same in every process and on every supported Python.

Imports only the standard library, so that any Python version can load it and gets the same results.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import hashlib
import itertools
import marshal
import pathlib
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

from airflow_geneva.engine.code_hash.syntax import (
    Definition,
    SourceFile,
    absolute_name,
    free_names,
    package_of,
    significant_fields,
)
from airflow_geneva.engine.code_hash.values import (
    cells_of,
    dotted_name,
    function_in,
    is_code,
    is_udf,
    label_of,
    module_of,
    plain_tokens,
)
from airflow_geneva.errors import InvalidInput


def code_version(target: Any, deps: Iterable[Any] = (), name: str = "udf", preprocess: Any = None) -> str:
    """Hash what a callable does, as 16 hex digits.

    The hash covers the source (without comments, formatting, docstrings and decorators), and the values of defaults,
    closure cells and module-level literals. Functions and classes of the same module are hashed by their source,
    everything from other modules by its dotted name. Names that functions assign with `global` or `nonlocal` are
    state: only the name is hashed.

    Args:
        target: a function, a class with `__call__`, or an instance of one with plain literals as attributes.
        deps: more things to hash: a function or class (source), a module (its source file; a package: all of them), a
            `pathlib.Path` (the file's bytes), a string or other literal (itself). With deps, an object without a
            stable hash is not an error: only its name is hashed.
        name: the UDF's name, for messages.
        preprocess: the UDF that makes the input of this one, or None.

    Raises:
        InvalidInput: the code refers to something without a stable hash, or its source is not available.
    """
    deps = tuple(deps)
    hasher = _Hasher(tolerant=bool(deps))
    try:
        hasher.add_source(target, "the UDF itself")
        for dep in deps:
            hasher.dep(dep)
        hasher.preprocess(preprocess)
    except InvalidInput as error:
        raise InvalidInput(
            f"The version of UDF {name!r} cannot be computed: {error}. Give @udf(version=...) and change it whenever "
            "results change, or name what the code depends on: @udf(deps=[...])."
        ) from error
    return hasher.hexdigest()


def identity_of_code(target: Any, preprocess: Any = None) -> str:
    """Hash a callable as far as possible; code without source is hashed by its bytecode.

    The hash distinguishes functions within a few processes, such as those of a notebook. It may differ between Python
    versions.
    """
    hasher = _Hasher(tolerant=True, by_bytecode=True)
    hasher.add_source(target, "the function")
    hasher.preprocess(preprocess)
    return hasher.hexdigest()


def deps_version(deps: Iterable[Any], name: str = "udf") -> str:
    """Hash only the `deps` of a UDF; "" if there are none. The hash is stored beside a code version."""
    hasher = _Hasher(tolerant=True)
    given = tuple(deps)
    try:
        for dep in given:
            hasher.dep(dep)
    except InvalidInput as error:
        raise InvalidInput(f"deps of UDF {name!r} cannot be hashed: {error}.") from error
    return hasher.hexdigest() if given else ""


class _Hasher:
    """Builds one hash; a definition that occurs again is hashed by its number."""

    def __init__(self, tolerant: bool, by_bytecode: bool = False) -> None:
        self._sha = hashlib.sha256()
        self._tolerant = tolerant
        self._by_bytecode = by_bytecode
        # Keep the object too, so that Python does not reuse its id.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._open_containers: list[int] = []

    def hexdigest(self) -> str:
        return self._sha.hexdigest()[:16]

    def _feed(self, *tokens: str | bytes) -> None:
        for token in tokens:
            data = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token
            self._sha.update(b"%d:%b" % (len(data), data))

    def _seen_before(self, value: Any) -> bool:
        if id(value) in self._numbers:
            self._feed("again", str(self._numbers[id(value)][0]))
            return True
        self._numbers[id(value)] = (len(self._numbers), value)
        return False

    def _unstable(self, problem: str) -> None:
        if not self._tolerant:
            raise InvalidInput(problem)
        self._feed("opaque")

    def dep(self, dep: Any) -> None:
        self._feed("dep")
        if isinstance(dep, types.ModuleType):
            self._module_files(dep)
        elif isinstance(dep, pathlib.Path):
            try:
                self._feed("file", dep.read_bytes())
            except OSError as error:
                raise InvalidInput(f"the file {str(dep)!r} in deps= cannot be read ({error})") from error
        elif is_code(dep) or is_udf(dep):
            self.add_source(dep, "an entry of deps=")
        else:
            self._value(dep, "an entry of deps=", "")

    def _module_files(self, module: types.ModuleType) -> None:
        label = f"module {module.__name__!r} in deps="
        package = package_of(vars(module))
        if not hasattr(module, "__path__"):
            self._tree(SourceFile.read(module.__file__, vars(module), label).tree, package)
            return
        roots = [pathlib.Path(root) for root in module.__path__]
        files = {path.relative_to(root).as_posix(): path for root in roots for path in root.rglob("*.py")}
        for relative in sorted(files):
            self._feed("module", relative)
            if files[relative].stat().st_size:
                inside = ".".join([package, *pathlib.PurePosixPath(relative).parent.parts])
                self._tree(SourceFile.read(str(files[relative]), {}, label).tree, inside)

    def add_source(self, value: Any, where: str) -> None:
        """Hash a callable by its source, whichever module it comes from."""
        if is_udf(value):
            self._udf(value)
        elif isinstance(value, types.MethodType):
            self._feed("method")
            self.add_source(value.__func__, where)
            self._value(value.__self__, f"the object that {where} is a method of", module_of(value))
        elif isinstance(value, functools.partial):
            self._feed("partial")
            self.add_source(value.func, where)
            self._value([value.args, value.keywords], f"an argument of {where}", "")
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif is_code(value):
            self._feed("wrapped", type(value).__name__)
            self.add_source(value.__wrapped__, where)
        else:
            self._instance(value, where)

    def _udf(self, value: Any) -> None:
        # Hash its parts, not its code_version, because two UDFs may refer to each other.
        self._feed("udf", value.version or "")
        if value.version is None and not self._seen_before(value):
            self.add_source(value.func, f"UDF {value.name!r}")
            for dep in value.deps:
                self.dep(dep)
            self.preprocess(value.preprocess)

    def preprocess(self, stage: Any) -> None:
        """Hash the UDF that makes the input of this one, if there is one, and its data type."""
        if stage is not None:
            self._feed("preprocess", str(stage.data_type))
            self._udf(stage)

    def _function(self, function: types.FunctionType) -> None:
        if self._seen_before(function):
            return
        label, module = label_of(function), module_of(function)
        try:
            source = SourceFile.read(function.__code__.co_filename, function.__globals__, label)
            node = _only_definition(source.functions(function), label)
        except InvalidInput as error:
            self._unstable(str(error))
            self._bytecode(function)
            return
        self._feed("function")
        self._tree(node, package_of(function.__globals__))
        for tag, defaults in (("defaults", function.__defaults__), ("kwdefaults", function.__kwdefaults__)):
            if defaults:
                self._feed(tag)
                self._value(defaults, f"the default values of {label}", module)
        self._references(node, cells_of([function]), function.__globals__, source, label)

    def _bytecode(self, *functions: types.FunctionType) -> None:
        for function in functions if self._by_bytecode else ():
            self._feed("bytecode", marshal.dumps(function.__code__))

    def _class(self, cls: type) -> None:
        if self._seen_before(cls):
            return
        label = label_of(cls)
        methods = [m for m in map(function_in, vars(cls).values()) if m and module_of(m) == cls.__module__]
        namespace = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        if methods:
            namespace = methods[0].__globals__
        filename = methods[0].__code__.co_filename if methods else namespace.get("__file__")
        try:
            source = SourceFile.read(filename, namespace, label)
            node = _only_definition(source.classes(cls, [method.__code__.co_firstlineno for method in methods]), label)
        except InvalidInput as error:
            self._unstable(str(error))
            self._bytecode(*methods)
            return
        self._feed("class")
        self._tree(node, package_of(namespace))
        for base in cls.__bases__:
            if base is not object:
                imported_as = self._imported(base.__name__, source, namespace)
                self._value(base, f"a base class of {label}", cls.__module__, imported_as)
        self._references(node, cells_of(methods), namespace, source, label)

    def _instance(self, value: Any, where: str) -> None:
        if self._seen_before(value):
            return
        cls = type(value)
        self._feed("instance")
        self._class(cls)
        names = {*getattr(value, "__dict__", {}), *(slot for c in cls.__mro__ for slot in vars(c).get("__slots__", ()))}
        for name in sorted(name for name in names if hasattr(value, name) and name not in ("__dict__", "__weakref__")):
            self._feed("attribute", name)
            self._value(getattr(value, name), f"attribute {name!r} of {where} ({label_of(cls)})", cls.__module__)

    def _tree(self, node: ast.AST, package: str = "", top: bool = True) -> None:
        if isinstance(node, ast.Constant):
            self._value(node.value, "a constant", "")
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            dotted = absolute_name(node.level, node.module or "", package)
            level = 0 if dotted[0] != "." else node.level
            node = ast.ImportFrom(dotted.lstrip(".") or None, node.names, level)
        self._feed("(", type(node).__name__)
        for name, value in significant_fields(node, top):
            self._feed(name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self._tree(part, package, top=False)
                else:
                    self._feed(str(part))
        self._feed(")")

    def _references(
        self, node: Definition, cells: dict[str, Any], namespace: dict[str, Any], source: SourceFile, label: str
    ) -> None:
        module = namespace.get("__name__", "")
        nonlocals = {name for part in ast.walk(node) if isinstance(part, ast.Nonlocal) for name in part.names}
        state = nonlocals | (source.changed_globals - cells.keys())
        for name in sorted(free_names(node)):
            self._feed("name", name)
            if name in state:
                self._feed("state")
            elif name in cells:
                self._value(cells[name], f"{name!r}, which {label} refers to,", module)
            elif name in namespace:
                imported_as = self._imported(name, source, namespace)
                self._value(namespace[name], f"{name!r}, which {label} refers to,", module, imported_as)
            else:
                self._feed("builtin" if hasattr(builtins, name) else "unbound")

    def _imported(self, name: str, source: SourceFile, namespace: dict[str, Any]) -> str:
        """Return the dotted name that a module imports under a name; "" if there is none."""
        level, dotted = source.imports.get(name, (0, ""))
        return absolute_name(level, dotted, package_of(namespace))

    def _value(self, value: Any, where: str, module: str, imported_as: str = "") -> None:
        """Hash a value that code of `module` refers to; `imported_as`: its dotted name if it was imported."""
        kind = type(value)
        tokens = plain_tokens(value)
        if tokens:
            self._feed(*tokens)
        elif isinstance(value, re.Pattern):
            self._feed("pattern", str(int(value.flags)))
            self._value(value.pattern, where, module)
        elif isinstance(value, enum.Enum):
            self._feed("enum", str(value.name))
            self._value(kind, where, module)
        elif isinstance(value, (tuple, frozenset)) or kind in (list, dict, set, types.MappingProxyType):
            self._container(value, f"an item of {where.rstrip(',')}", module)
        elif isinstance(value, types.ModuleType):
            self._feed("import", value.__name__)
        elif is_udf(value):
            self._udf(value)
        elif isinstance(value, functools.partial):
            self._feed("partial")
            self._value([value.func, value.args, value.keywords], where, module)
        elif is_code(value) and module_of(value) == module:
            self.add_source(value, where)
        elif dotted := imported_as or dotted_name(value):
            self._feed("import", dotted)
        elif is_code(value):
            self.add_source(value, where)
        elif kind.__module__ == module:
            self._instance(value, where)
        else:
            self._unstable(f"{where} is a {label_of(kind)} object, which has no stable hash")

    def _container(self, value: Any, where: str, module: str) -> None:
        if id(value) in self._open_containers:
            self._feed("cycle", str(self._open_containers.index(id(value))))
            return
        self._open_containers.append(id(value))
        if isinstance(value, (set, frozenset)):
            digests = []
            for item in value:
                alone = _Hasher(self._tolerant, self._by_bytecode)
                alone._numbers, alone._open_containers = dict(self._numbers), list(self._open_containers)
                alone._value(item, where, module)
                digests.append(alone._sha.digest())
            self._feed("set", str(len(digests)), *sorted(digests))
        else:
            is_mapping = isinstance(value, (dict, types.MappingProxyType))
            self._feed("mapping" if is_mapping else "list" if isinstance(value, list) else "tuple", str(len(value)))
            for item in itertools.chain.from_iterable(value.items()) if is_mapping else value:
                self._value(item, where, module)
        self._open_containers.pop()


def _only_definition(nodes: list[Definition], label: str) -> Definition:
    if not nodes:
        raise InvalidInput(f"the source of {label} is no longer where it was when it was imported")
    digests = set()
    for node in nodes:
        alone = _Hasher(tolerant=False)
        alone._tree(node)
        digests.add(alone.hexdigest())
    if len(digests) > 1:
        raise InvalidInput(f"the source of {label} cannot be distinguished from another definition on the same line")
    return nodes[0]
