"""An import path found in a table leads to an import only where the source says so, and no import ends its caller."""

from __future__ import annotations

import importlib
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva import connect
from airflow_geneva.engine.udf import UDF, load_stored_udf, load_udf
from airflow_geneva.engine.udf.stored import udf_modules
from airflow_geneva.errors import InvalidInput
from tests.udfs_for_tests import samples

UDF_SOURCE = """
import pyarrow as pa
from airflow_geneva import udf

@udf(data_type=pa.int64())
def grow(x: int) -> int:
    return x + 1
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules that can be imported, and forgets them when the test is over."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))

    def write(path: str, source: str) -> Path:
        file = tmp_path / "code" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        importlib.invalidate_caches()
        return file

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(path: str) -> str:
    """Why a path is refused; nothing was imported for it."""
    package = path.partition(":")[0].partition(".")[0]
    before = sys.modules.get(package)
    with pytest.raises(InvalidInput) as caught:
        load_stored_udf(path)
    assert sys.modules.get(package) is before
    return str(caught.value)


def test_a_path_in_a_table_runs_no_program_in_the_process_that_plans(tmp_path: Path) -> None:
    table = connect(tmp_path).create_table("docs", [{"x": 1}])
    table.add_columns({"n": (samples.add_five, ["x"])})
    definition = samples.add_five.definition(["x"]).to_json()
    for path in ("unittest.__main__:main", "this:s", "antigravity:geohash", "pyspark.shell:spark"):
        stored = definition.replace("tests.udfs_for_tests.samples:add_five", path)
        assert stored != definition
        table.lance.update_field_metadata({"n": {"geneva::udf": stored}})
        with pytest.raises(InvalidInput, match=r"a table names it, and module .* is not imported"):
            table.plan_backfill("n")
        assert path.partition(":")[0] not in sys.modules


@pytest.mark.parametrize(
    "source",
    [
        UDF_SOURCE,
        "from udfs_elsewhere import grow\n",
        "from udfs_elsewhere import grow as other\ngrow = other\n",
        "try:\n    import no_such_module\nexcept ImportError:\n    from udfs_elsewhere import grow\n",
        "if True:\n    with open(__file__):\n        from udfs_elsewhere import grow\n",
        "import udfs_elsewhere\nclass Kept:\n    grow = udfs_elsewhere.grow\n",
        "import airflow_geneva as g\ndef f(x: int) -> int: return x + 1\ngrow = g.udf(version='1')(f)\n",
        "from airflow_geneva import udf as u\nints = u\n@ints\ndef grow(x: int) -> int: return x + 1\n",
        "from functools import partial\nfrom airflow_geneva import udf\nplain = partial(udf, version='1')\n"
        "@plain()\ndef grow(x: int) -> int: return x + 1\n",
        "import elsewhere_pack.udfs\ngrow = elsewhere_pack.udfs.grow\n",
        "from elsewhere_pack import udfs\ngrow = udfs.grow\n",
        "from elsewhere_pack import grow\n",
    ],
)
@pytest.mark.parametrize("home", ["udfs_here.py", "pack_here/__init__.py", "pack_here/deep/udfs.py"])
def test_a_name_that_the_source_binds_to_a_udf_is_imported(write: Write, source: str, home: str) -> None:
    write("udfs_elsewhere.py", UDF_SOURCE)
    write("elsewhere_pack/__init__.py", "from .udfs import grow\n")
    write("elsewhere_pack/udfs.py", UDF_SOURCE)
    write(home, source)
    module = home.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert load_stored_udf(f"{module}:{'Kept.grow' if 'Kept' in source else 'grow'}")(1) == 2


def test_a_module_in_a_zip_file_is_looked_into_as_well(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "dags.zip", "w") as archive:
        archive.writestr("zipped_pack/__init__.py", "")
        archive.writestr("zipped_pack/udfs.py", UDF_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "dags.zip"))
    assert "does not bind 'shrink'" in refused("zipped_pack.udfs:shrink")
    assert load_stored_udf("zipped_pack.udfs:grow")(1) == 2


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "does not bind 'grow'"),
        ("def f():\n    grow = 1\n", "does not bind 'grow'"),
        ("print(grow)\n", "does not bind 'grow'"),
        ("def grow(x: int) -> int:\n    return x\n", "makes no UDF of 'grow'"),
        ("grow = 1\n", "makes no UDF of 'grow'"),
        ("grow = grow\n", "makes no UDF of 'grow'"),
        ("from pack_there.udfs import grow\n", "makes no UDF of 'grow'"),
        ("from os import system as grow\n", "makes no UDF of 'grow'"),
        ("import functools\n@functools.cache\ndef grow(x: int) -> int:\n    return x\n", "makes no UDF of 'grow'"),
        ("def udf(f): return f\n@udf\ndef grow(x: int) -> int:\n    return x\n", "makes no UDF of 'grow'"),
        ("from airflow_geneva import udf\ndef make(): return udf(abs)\ngrow = make()\n", "makes no UDF of 'grow'"),
        ("from os import *\n", "does not bind 'grow'"),
        ("globals()['grow'] = 1\n", "does not bind 'grow'"),
        ("def f(:\n", "is not Python"),
    ],
)
def test_a_name_that_the_source_makes_no_udf_of_is_not_imported_and_no_package_around_it(
    write: Write, source: str, why: str
) -> None:
    write("pack_there/__init__.py", "")
    write("pack_there/udfs.py", source)
    assert why in refused("pack_there.udfs:grow")


FACTORY = """
from airflow_geneva import udf

def make():
    return udf(version="1")(grown)

def grown(x: int) -> int:
    return x + 1
"""


@pytest.mark.parametrize("source", ["from made_there.makers import make\n", "import made_there as m\nmake = m.make\n"])
def test_a_function_that_makes_udfs_counts_if_the_deployment_names_its_module(write: Write, source: str) -> None:
    write("made_there/__init__.py", "from .makers import make\n")
    write("made_there/makers.py", FACTORY)
    write("made_here.py", f"{source}grow = make()\n")
    with udf_modules(["made_elsewhere"]):
        assert "makes no UDF of 'grow'" in refused("made_here:grow")
    with udf_modules(["made_there"]):
        assert load_stored_udf("made_here:grow")(1) == 2


def test_a_ready_made_function_counts(write: Write) -> None:
    write("made_here.py", "from airflow_geneva.functions import text_chunks\nchunks = text_chunks()\n")
    assert isinstance(load_stored_udf("made_here:chunks"), UDF)


def test_what_has_no_source_or_is_a_program_or_is_not_there_is_not_imported(write: Write) -> None:
    write("pack_there/__init__.py", "")
    write("pack_there/__main__.py", "grow = 1\n")
    write(f"pack_there/built{EXTENSION_SUFFIXES[0]}", "")
    assert "it is a program" in refused("pack_there.__main__:grow")
    assert "it has no source" in refused("pack_there.built:grow")
    assert "a module of Python itself" in refused("xxlimited:grow")
    assert "raised ModuleNotFoundError" in refused("pack_there.missing:grow")
    assert "raised ModuleNotFoundError" in refused("nowhere_at_all.udfs:grow")
    assert "is not imported" in refused("__main__:no_such_name")


def test_a_module_that_was_imported_before_may_bind_names_as_it_likes(write: Write) -> None:
    write("udfs_elsewhere.py", UDF_SOURCE)
    write("starred.py", "from udfs_elsewhere import *\ndef __getattr__(name): raise SystemExit(name)\n")
    assert "does not bind 'grow'" in refused("starred:grow")
    importlib.import_module("starred")
    assert isinstance(load_stored_udf("starred:grow"), UDF)
    assert "does not bind 'shrink'" in refused("starred:shrink")


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "raise type('Bye', (BaseException,), {})",
    ],
)
@pytest.mark.parametrize("load", [load_udf, load_stored_udf])
def test_nothing_that_a_module_does_while_it_is_imported_ends_the_caller(write: Write, source: str, load: Any) -> None:
    write("leaving.py", f"{UDF_SOURCE}\n{source}\n")
    with pytest.raises(InvalidInput, match=r"UDF 'leaving:grow' cannot be loaded: importing module 'leaving' raised"):
        load("leaving:grow")


class Timeout(BaseException):
    """As Airflow's AirflowTaskTimeout is one."""


def _time_out(*_: object) -> None:
    raise Timeout


@pytest.mark.parametrize(
    ("number", "handler", "expected"),
    [(signal.SIGALRM, _time_out, Timeout), (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt)],
)
def test_a_signal_during_an_import_ends_it(write: Write, number: int, handler: Any, expected: type) -> None:
    write("slow.py", f"import signal\nsignal.raise_signal({int(number)})\nfor _ in range(10**9): pass\n")
    before = signal.signal(number, handler)
    try:
        with pytest.raises(expected):
            load_udf("slow:grow")
    finally:
        signal.signal(number, before)


def test_a_module_that_imports_a_missing_package_says_how_to_install_it(write: Write) -> None:
    write("needy.py", "import no_such_package.inner")
    with pytest.raises(InvalidInput) as refused:
        load_udf("needy:grow")
    assert f"not installed for {sys.executable}, the Python of this process" in str(refused.value)
    assert f"{sys.executable} -m pip install no_such_package." in str(refused.value)
