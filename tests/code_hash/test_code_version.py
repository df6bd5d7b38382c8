"""The version of a UDF's code: stable where it must be, different where results may be."""

from __future__ import annotations

import ast
import importlib
import json
import linecache
import os
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva.engine.code_hash.hasher import code_version
from airflow_geneva.engine.code_hash.syntax import free_names
from airflow_geneva.engine.udf import udf
from airflow_geneva.errors import InvalidInput
from tests.udfs_for_tests import portable, samples

ROOT = Path(__file__).parents[2]

GOLDEN = {
    "plain": "187b26ba80a91c98",
    "documented": "df59f4b505f80245",
    "with_references": "e0bbbd4c6296d6e4",
    "with_fstrings": "9163a557e9561069",
    "with_match": "5f9388a89ca4b174",
    "with_state": "47ab974f009926f9",
    "with_lambda": "c1370fa6469101d5",
    "with_decorator": "8a0af289bb0176db",
    "Model": "c6bac06e95b3984e",
    "closure": "a92847bae0dc0e87",
    "model": "e4edc9864174ff06",
    "anonymous": "3442bd41c0e3c936",
}

PRINT_VERSIONS = """
import json, sys
from airflow_geneva.engine.code_hash.hasher import code_version
from tests.udfs_for_tests import portable
assert "pyarrow" not in sys.modules
print(json.dumps({name: code_version(getattr(portable, name)) for name in portable.EVERYTHING}))
"""


def _other_pythons() -> dict[str, str]:
    """One interpreter of each supported minor version on this machine, other than the one running."""
    roots = [Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser(), Path("~/.local/share/uv/python").expanduser()]
    candidates = [shutil.which(f"python3.{minor}") or "" for minor in range(10, 15)]
    candidates += [str(path) for root in roots for path in sorted(root.glob("**/bin/python3"))]
    running = ".".join(map(str, sys.version_info[:2]))
    found: dict[str, str] = {}
    for candidate in filter(None, candidates):
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        minor = asked.stdout.strip()
        if minor in {"3.10", "3.11", "3.12", "3.13", "3.14"} and minor != running:
            found.setdefault(minor, candidate)
    return found


def _load(source: str, name: str = "written_code", **more: Any) -> types.ModuleType:
    """Run source text as a module whose source Python can find, as a notebook does with its cells."""
    filename = f"<{name} {abs(hash(source))}>"
    module = types.ModuleType(name)
    vars(module).update(more)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), vars(module))
    return module


def _version(source: str, function: str = "f", **more: Any) -> str:
    return code_version(getattr(_load(source, **more), function))


def test_versions_are_those_computed_when_the_format_was_fixed() -> None:
    assert {name: code_version(getattr(portable, name)) for name in portable.EVERYTHING} == GOLDEN


def test_another_process_computes_the_same_versions_without_pyarrow_and_under_another_hash_seed() -> None:
    for seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", PRINT_VERSIONS],
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(printed.stdout) == GOLDEN


@pytest.mark.slow
def test_every_other_python_on_this_machine_computes_the_same_versions() -> None:
    for minor, python in _other_pythons().items():
        printed = subprocess.run(
            [python, "-c", PRINT_VERSIONS],
            env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert printed.returncode == 0, f"Python {minor}: {printed.stderr}"
        assert json.loads(printed.stdout) == GOLDEN, f"Python {minor} computes other versions"


@pytest.mark.parametrize(
    "other",
    [
        "N = 3\ndef g(x):\n    return x\n\n\n# why\ndef f(x, k=2):\n    'docstring'\n    return (g(x)  +  N)*k  # how",
        "import json\nN = 1 + 2\ndef f(x,\n      k = 2):\n    return (g(x) + N) * k\ndef g(x):\n    'd'\n    return x",
        "N = 3\ng = lambda x: x\ndef h(f): return f\ndef g(x): return x\n@h\ndef f(x, k=2): return (g(x) + N) * k",
    ],
    ids=[
        "comments, docstrings, formatting",
        "order and other code of the module",
        "a decorator that returns its function",
    ],
)
def test_what_does_not_change_results_does_not_change_the_version(other: str) -> None:
    base = "N = 3\ndef g(x):\n    return x\ndef f(x, k=2):\n    return (g(x) + N) * k\n"
    assert _version(base) == _version(other)


@pytest.mark.parametrize(
    "other",
    [
        "N = 4\ndef g(x): return x\ndef f(x, k=2): return (g(x) + N) * k",
        "N = 3.0\ndef g(x): return x\ndef f(x, k=2): return (g(x) + N) * k",
        "N = True\ndef g(x): return x\ndef f(x, k=2): return (g(x) + N) * k",
        "N = 3\ndef g(x): return -x\ndef f(x, k=2): return (g(x) + N) * k",
        "N = 3\ndef g(x): return x\ndef f(x, k=3): return (g(x) + N) * k",
        "N = 3\ndef g(x): return x\ndef f(x, k=2): return (g(x) - N) * k",
        "N = 3\nfrom math import floor as g\ndef f(x, k=2): return (g(x) + N) * k",
    ],
)
def test_what_may_change_results_changes_the_version(other: str) -> None:
    base = "N = 3\ndef g(x): return x\ndef f(x, k=2): return (g(x) + N) * k\n"
    assert _version(base) != _version(other)


EXPRESSIONS = st.recursive(
    st.sampled_from(
        ["x", "N", "1", "2.5", "'text'", "b'b'", "None", "f'{x:>5}'", "[y for y in x]", "(lambda z: z)(x)"]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "and", "==", "<"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        inner.map(lambda e: f"g({e}, key={e})"),
        inner.map(lambda e: f"({e} if x else -{e})"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=4), st.data())
def test_formatting_and_comments_never_change_the_version(expressions: list[str], data: st.DataObject) -> None:
    names = [f"v{i}" for i in range(len(expressions))]
    lines = [
        "def f(x):",
        *(f"    {n} = {e}" for n, e in zip(names, expressions, strict=True)),
        f"    return {names[-1]}",
    ]
    source = "N = 7\ndef g(x, key): return x\n" + "\n".join(lines) + "\n"
    noisy = ["# first", "", "N=7", "def g(x, key):", "    '''doc'''", "    return x", "", lines[0], "    'docstring'"]
    for line in lines[1:]:
        noisy += data.draw(st.sampled_from([[], ["    # a comment"], ["", "    # two", ""]]))
        code = ast.unparse(ast.parse(line.strip().replace("return ", ""))) if "return" not in line else line.strip()
        noisy.append("    " + code.replace(" = ", "=" if data.draw(st.booleans()) else "   =  ", 1) + "  # end")
    assert _version(source) == _version("\n".join(noisy) + "\n")


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
def test_two_functions_have_one_version_only_if_their_trees_are_equal(one: str, other: str) -> None:
    head = "N = 7\ndef g(x, key): return x\n"
    same = ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    assert (_version(f"{head}def f(x): return {one}") == _version(f"{head}def f(x): return {other}")) == same


def test_closure_cells_count_by_value() -> None:
    source = "def make(step):\n    def f(x):\n        return x + step\n    return f\n"
    make = _load(source).make
    assert code_version(make(1)) == code_version(make(1))
    assert code_version(make(1)) != code_version(make(2))


def test_a_function_in_a_closure_counts_by_its_source() -> None:
    source = "def make(g):\n    def f(x):\n        return g(x)\n    return f\n"
    module = _load(f"{source}one = make(lambda x: x)\ntwo = make(lambda x: -x)\n")
    assert code_version(module.one) != code_version(module.two)


def test_functions_that_refer_to_each_other_have_versions_that_follow_each() -> None:
    source = "def f(n): return n and g(n - 1)\ndef g(n): return n and f(n - {})\n"
    assert _version(source.format(1)) == _version(source.format(1))
    assert _version(source.format(1)) != _version(source.format(2))


def test_a_wrapper_of_the_same_module_counts_with_what_it_wraps() -> None:
    source = (
        "import functools\n"
        "def twice(g):\n    @functools.wraps(g)\n    def wrapper(x):\n        return g(x) * {}\n    return wrapper\n"
        "@twice\ndef f(x):\n    return x + {}\n"
    )
    versions = {_version(source.format(a, b)) for a, b in ((2, 1), (3, 1), (2, 4))}
    assert len(versions) == 3


def test_all_methods_of_a_class_and_the_literals_they_read_count() -> None:
    source = (
        "N = {}\nclass f:\n    k = {}\n    def __init__(self): self.n = N\n    def __call__(self, x): return x + {}\n"
    )
    versions = {_version(source.format(*values)) for values in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))}
    assert len(versions) == 4


def test_a_base_class_of_the_same_module_counts() -> None:
    source = "class B:\n    def g(self, x): return x + {}\nclass f(B):\n    def __call__(self, x): return self.g(x)\n"
    assert _version(source.format(1)) != _version(source.format(2))


def test_the_attributes_of_an_instance_count() -> None:
    assert code_version(samples.Adder(1)) == code_version(samples.Adder(1))
    assert code_version(samples.Adder(1)) != code_version(samples.Adder(2))


def test_sets_count_by_their_members_in_any_order() -> None:
    words = [f"word{i}" for i in range(50)]
    source = "def f(x): return x in WORDS"
    assert _version(source, WORDS=set(words)) == _version(source, WORDS={*words[25:], *words[:25]})
    assert _version(source, WORDS=set(words)) != _version(source, WORDS=set(words[1:]))


def test_a_container_of_functions_that_refer_to_it_has_a_version() -> None:
    source = "def f(x): return len(ALL)\ndef g(x): return f(x) + {}\nALL = {{f, g}}\n"
    assert _version(source.format(1)) == _version(source.format(1))
    assert _version(source.format(1)) != _version(source.format(2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.int32()),
        (np.arange(3), np.arange(3.0)),
        (np.array([1, 2]), np.array([1, 3])),
        (np.float32(1), np.float64(1)),
        (Path("a"), Path("b")),
        ((1, 2), [1, 2]),
        (-0.0, 0.0),
        (1, True),
        ("a", b"a"),
    ],
)
def test_values_of_other_types_or_contents_make_other_versions(one: Any, other: Any) -> None:
    source = "def f(x): return x, VALUE"
    assert _version(source, VALUE=one) == _version(source, VALUE=one)
    assert _version(source, VALUE=one) != _version(source, VALUE=other)


def test_a_name_that_functions_assign_to_is_state_and_not_code() -> None:
    source = "_model = None\ndef f(x):\n    global _model\n    _model = _model or object()\n    return x\n"
    module = _load(source)
    before = code_version(module.f)
    module.f(1)
    assert code_version(module.f) == before


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("CLIENT = object()\ndef f(x): return CLIENT", "'CLIENT'"),
        ("def make(client):\n    def f(x): return client\n    return f\nf = make(object())", "'client'"),
        ("def f(x, client=object()): return client", "default values"),
        ("HOLDS = {'a': [object()]}\ndef f(x): return HOLDS", "'HOLDS'"),
        ("f, g = (lambda x: x), (lambda x: -x)", "<lambda>"),
    ],
)
def test_what_has_no_stable_hash_is_refused_by_name_with_what_to_do(source: str, names: str) -> None:
    function = _load(source).f
    with pytest.raises(InvalidInput, match=r"version=.*deps=") as refused:
        code_version(function, name="mine")
    assert names in str(refused.value)
    assert "UDF 'mine'" in str(refused.value)


def test_code_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {}
    # Python 3.13 keeps the source of `python -c` as that of "<string>".
    exec(compile("def f(x): return x", "<stdin>", "exec"), namespace)
    with pytest.raises(InvalidInput, match=r"the source of .* is not available: .* put it in a file or a notebook\."):
        code_version(namespace["f"])


def test_deps_answer_for_what_has_no_stable_hash(tmp_path: Path) -> None:
    function = _load("CLIENT = object()\ndef f(x): return CLIENT").f
    assert code_version(function, deps=["model-1"]) == code_version(function, deps=["model-1"])
    assert code_version(function, deps=["model-1"]) != code_version(function, deps=["model-2"])


def test_deps_cover_functions_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions() -> list[str]:
        importlib.invalidate_caches()
        for name in ("dep_module", "dep_package"):
            sys.modules.pop(name, None)
        module, package = importlib.import_module("dep_module"), importlib.import_module("dep_package")
        return [code_version(portable.plain, deps=[d]) for d in (module.h, module, tmp_path / "model.bin", package)]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "dep_package").mkdir()
    (tmp_path / "dep_package" / "__init__.py").touch()
    files = {"dep_module.py": "def h(x): return x\n", "model.bin": "weights", "dep_package/inner.py": "N = 1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = versions()
    assert len({*before, code_version(portable.plain)}) == 5
    (tmp_path / "dep_module.py").write_text("# changed\ndef h(x):\n    return x\n")
    assert versions() == before
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write("def h(x): return -x\n")
    assert not set(before) & set(versions())


@pytest.mark.parametrize(
    "text",
    [
        "from .helpers import clean\ndef f(x): return clean(x)\n",
        "from . import clean\ndef f(x): return clean(x)\n",
        "def f(x):\n    from .helpers import clean\n    return clean(x)\n",
        "from .helpers import Base\nclass f(Base):\n    def __call__(self, x): return x\n",
    ],
)
def test_a_relative_import_counts_by_the_full_name_of_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def load(package: str, text: str) -> Any:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("def clean(x): return x\n")
        (folder / "helpers.py").write_text("class Base: pass\ndef clean(x): return x\n")
        (folder / "udfs.py").write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.udfs")

    monkeypatch.syspath_prepend(tmp_path)
    one, other = load("one_package", text), load("other_package", text)
    assert code_version(one.f) != code_version(other.f)
    assert code_version(portable.plain, deps=[one]) != code_version(portable.plain, deps=[other])
    full = text.replace("from .helpers", "from one_package.helpers").replace("from . ", "from one_package ")
    assert code_version(load("third_package", full).f) == code_version(one.f)


def test_a_udf_counts_as_its_function_or_by_the_version_it_was_given() -> None:
    assert samples.factorial.code_version == code_version(samples.factorial.func)
    source = "def f(x): return helper(x)"
    one, other = udf(data_type=pa.int64())(portable.plain), udf(data_type=pa.int64())(portable.documented)
    assert _version(source, helper=one) != _version(source, helper=other)
    pinned = [udf(data_type=pa.int64(), version="1")(function) for function in (portable.plain, portable.documented)]
    assert _version(source, helper=pinned[0]) == _version(source, helper=pinned[1])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, *b, c=D, **e): return a + b + c + e + G", {"D", "G"}),
        ("def f(x):\n    for i in x: y = i\n    return [z for z in y if z in W]", {"W"}),
        ("def f(x):\n    def g(): return x + y + H\n    y = 1\n    return g", {"H"}),
        ("def f(x: T) -> U:\n    y: V = W\n    return y", {"W"}),
        ("class f(B):\n    n = 1\n    def g(self): return n", {"B", "n"}),
        ("def f(x):\n    global G\n    G = x", {"G"}),
        ("def f(x):\n    import a.b as c, d.e\n    return c, d, (k := x), [(m := y) for y in x], k, m", set()),
        ("def f(x):\n    try: pass\n    except E as e: return e", {"E"}),
        ("def f(x):\n    match x:\n        case K(v=y) | [y, *z] | {'a': y, **w}: return y, z, w", {"K"}),
        ("@decorate\ndef f(x):\n    @inner\n    def g(): pass\n    return lambda q=Q: q", {"inner", "Q"}),
    ],
)
def test_names_read_from_outside_are_those_python_would_look_up(source: str, expected: set[str]) -> None:
    assert free_names(ast.parse(source).body[0]) == expected


def test_the_tree_walk_ignores_fields_that_newer_pythons_add(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _version("def f(x): return x")
    linecache.clearcache()
    newer: Callable[..., Any] = ast.FunctionDef
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*newer._fields, "added_in_a_later_python"))  # type: ignore[attr-defined]
    monkeypatch.setattr(ast.FunctionDef, "added_in_a_later_python", [], raising=False)
    assert _version("def f(x): return x") == before


def test_a_changed_source_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path: pathlib.Path = tmp_path / "edited_later.py"
    path.write_text("def f(x): return x\n")
    function = importlib.import_module("edited_later").f
    path.write_text("\n\n\ndef f(x): return -x\n")
    with pytest.raises(InvalidInput, match="no longer where it was when it was imported"):
        code_version(function)
