"""The code archive: whole, the same bytes each time, and imported like the package that was planned."""

from __future__ import annotations

import importlib
import io
import os
import re
import socket
import stat
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf import code_archive
from airflow_geneva.engine.udf.code_archive import DamagedArchive, archive_name, foreign_modules, read_entries, zip_code
from airflow_geneva.engine.udf.shipping import UdfReference, load_udf
from airflow_geneva.errors import InvalidInput

ROOT = Path(__file__).parents[2]
FILES = {
    "zipped_package/__init__.py": "",
    "zipped_package/udfs.py": "from zipped_package.inner.helpers import value\n",
    "zipped_package/inner/__init__.py": "",
    "zipped_package/inner/helpers.py": "value = 'package'\n",
    "zipped_package/inner/words.txt": "a\nb\n",
    "zipped_package/.hidden": "x",
    "zipped_package/.git/config": "x",
    "zipped_package/__pycache__/udfs.pyc": "x",
    "zipped_package/inner/old.pyc": "x",
    "zipped_alone.py": "value = 'alone'\n",
    "zipped_namespace/udfs.py": "from zipped_namespace.deeper.helpers import value\n",
    "zipped_namespace/deeper/helpers.py": "value = 'namespace'\n",
    "zipped_shared/ours/__init__.py": "",
    "zipped_shared/ours/udfs.py": "value = 'shared'\n",
    "zipped_shared/theirs/__init__.py": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(root)
    for name in [name for name in sys.modules if name.startswith("zipped_")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return root


def run_script(script: str) -> str:
    """Run Python in a process that has this package, but not the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _names(import_path: str) -> list[str]:
    code = zip_code(import_path)
    assert code is not None
    return [name for name in zipfile.ZipFile(io.BytesIO(code)).namelist() if not name.endswith("/")]


def test_the_zip_holds_the_top_level_package_without_caches_and_hidden_files(project: Path) -> None:
    assert _names("zipped_package.udfs:f") == [
        "zipped_package/__init__.py",
        "zipped_package/inner/__init__.py",
        "zipped_package/inner/helpers.py",
        "zipped_package/inner/words.txt",
        "zipped_package/udfs.py",
    ]
    assert _names("zipped_package:f") == _names("zipped_package.inner.helpers:f") == _names("zipped_package.udfs:f")


def test_a_single_module_is_zipped_alone(project: Path) -> None:
    assert _names("zipped_alone:f") == ["zipped_alone.py"]


def test_a_namespace_package_gives_its_own_folder_and_not_its_neighbours(project: Path) -> None:
    assert _names("zipped_namespace.udfs:f") == ["zipped_namespace/deeper/helpers.py", "zipped_namespace/udfs.py"]
    assert _names("zipped_shared.ours.udfs:f") == ["zipped_shared/ours/__init__.py", "zipped_shared/ours/udfs.py"]


@pytest.mark.parametrize(
    ("module", "value"),
    [
        ("zipped_package.udfs", "package"),
        ("zipped_alone", "alone"),
        ("zipped_namespace.udfs", "namespace"),
        ("zipped_shared.ours.udfs", "shared"),
    ],
)
def test_a_process_that_has_only_the_zip_imports_the_module(
    project: Path, tmp_path: Path, module: str, value: str
) -> None:
    code = zip_code(f"{module}:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    archive.write_bytes(code)
    for before in ("", "import airflow_geneva.engine.udf.shipping; "):  # as a zip, and unpacked
        script = f"import sys; sys.path.insert(0, {str(archive)!r}); {before}import {module} as m; print(m.value)"
        assert run_script(script) == value


def test_the_same_files_give_the_same_bytes_and_other_files_others(project: Path) -> None:
    first = zip_code("zipped_package.udfs:f")
    assert first is not None
    os.utime(project / "zipped_package" / "udfs.py", (1, 1))
    (project / "zipped_package" / "udfs.py").chmod(0o600)
    assert zip_code("zipped_package.udfs:f") == first
    (project / "zipped_package" / "inner" / "words.txt").write_text("c\n")
    changed = zip_code("zipped_package.udfs:f")
    assert changed is not None
    assert sha256(changed) != sha256(first)
    assert len(sha256(first)) == 64


@pytest.mark.parametrize("path", ["math:sqrt", "json.decoder:JSONDecoder", "airflow_geneva.udf:udf"])
def test_what_every_worker_has_is_not_zipped(path: str) -> None:
    assert zip_code(path) is None


@pytest.mark.parametrize("path", ["no_such_module:f", "no_such_package.inner:f", "zipped_namespace:f"])
def test_a_module_that_is_no_file_is_refused(project: Path, path: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be packed"):
        zip_code(path)


def test_a_large_file_is_refused_by_name(project: Path) -> None:
    with (project / "zipped_package" / "model.bin").open("wb") as file:
        file.truncate(code_archive.MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidInput, match=r"model.bin' has 50,000,001 bytes"):
        zip_code("zipped_package.udfs:f")


def test_many_files_and_large_packages_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_FILES", 4)
    with pytest.raises(InvalidInput, match=r"more than 4 files.*outside the package"):
        zip_code("zipped_package.udfs:f")
    monkeypatch.setattr(code_archive, "MAX_FILES", 5)
    assert zip_code("zipped_package.udfs:f") is not None
    monkeypatch.setattr(code_archive, "MAX_BYTES", 10)
    with pytest.raises(InvalidInput, match=r"bytes together, and 10 are allowed.*outside the package"):
        zip_code("zipped_package.udfs:f")


def test_links_in_a_package_and_out_of_it_are_followed(project: Path, tmp_path: Path) -> None:
    package, outside = project / "zipped_package", tmp_path / "outside"
    outside.mkdir()
    (outside / "__init__.py").write_text("")
    (outside / "shared.py").write_text("value = 'linked'\n")
    (outside / "words.txt").write_text("c")
    (package / "linked").symlink_to(outside)
    (package / "again").symlink_to(package / "inner")
    (package / "words.txt").symlink_to(outside / "words.txt")
    found = _names("zipped_package.udfs:f")
    assert {"zipped_package/linked/shared.py", "zipped_package/again/helpers.py", "zipped_package/words.txt"} <= {
        *found
    }
    (project / "zipped_link").symlink_to(package)
    assert {name.partition("/")[2] for name in _names("zipped_link.udfs:f")} == {n.partition("/")[2] for n in found}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def _bytes_name(path: Path) -> None:
    Path(os.fsdecode(os.fsencode(path) + b"\xff.py")).write_text("")


# What lies in a package, made by a function of its path, and what the error says of it.
UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "/thing', a link to 'nowhere', cannot be read"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    "a link to its folder": (lambda path: path.symlink_to(path.parent), "is a link to a folder that contains it"),
    "a link far up": (lambda path: path.symlink_to(path.parents[1]), "is a link to a folder that contains it"),
    "a FIFO": (_fifo, "/thing' is neither a file nor a folder"),
    "a link to a FIFO": (lambda path: (_fifo(path.with_name(".x")), path.symlink_to(".x")), "is neither a file nor"),
    "a socket": (_socket, "/thing' is neither a file nor a folder"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "/thing' is neither a file nor a folder"),
    "a name that is not UTF-8": (_bytes_name, r"thing\\xff.py' is not UTF-8"),
    "a backslash": (lambda path: path.with_name("a\\b.txt").touch(), r"a\\b.txt' leads out of a folder on some"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_packed_is_refused_by_name_and_never_opened(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = UNFIT[name]
    monkeypatch.chdir(project)
    make(project / "zipped_package" / "inner" / "thing")
    with pytest.raises(InvalidInput, match=re.escape(words)) as refused:
        zip_code("zipped_package.udfs:f")
    assert "UDF 'zipped_package.udfs:f' cannot be packed" in str(refused.value)


def test_a_module_named_like_one_of_the_standard_library_is_refused(project: Path) -> None:
    (project / "sched.py").write_text("def f(x: int) -> int: return x\n")
    (project / "wsgiref").mkdir()
    (project / "wsgiref" / "__init__.py").write_text("")
    (project / "wsgiref" / "udfs.py").write_text("")
    script = (
        f"import sys; sys.path.insert(0, {str(project)!r}); "
        "from airflow_geneva.engine.udf.code_archive import zip_code\n"
        "for path in ('sched:f', 'wsgiref.udfs:f'):\n    try: zip_code(path)\n    except ValueError as e: print(e)"
    )
    said = run_script(script).splitlines()
    assert ["is also a module of Python's standard library" in line for line in said] == [True, True]


def test_files_that_change_while_they_are_read_are_read_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, helper = project / "zipped_package" / "udfs.py", project / "zipped_package" / "inner" / "helpers.py"
    read, changes = code_archive._Packing._read, list[str]()

    def read_and_change(packing: Any, path: Path) -> bytes:
        data = read(packing, path)
        if path == helper and len(changes) < most:
            changes.append("")
            for file in (module, helper):
                file.write_text(f"value = {len(changes)}\n")
        return data

    monkeypatch.setattr(code_archive._Packing, "_read", read_and_change)
    most = 2
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    entries = dict(read_entries(code))
    assert entries["zipped_package/udfs.py"] == entries["zipped_package/inner/helpers.py"] == b"value = 2\n"
    most = 99
    with pytest.raises(InvalidInput, match="its files change while they are read"):
        zip_code("zipped_package.udfs:f")


@pytest.mark.slow
def test_data_beside_the_module_and_its_folder_are_there_where_it_is_unpacked(project: Path, tmp_path: Path) -> None:
    (project / "zipped_package" / "udfs.py").write_text(
        "import importlib.resources\nimport inspect\nfrom pathlib import Path\n"
        "def f() -> str:\n"
        "    beside = (Path(__file__).parent / 'inner' / 'words.txt').read_text().split()\n"
        "    files = sorted(path.name for path in Path(__file__).parent.iterdir() if path.suffix == '.py')\n"
        "    text = importlib.resources.files('zipped_package.inner').joinpath('words.txt').read_text().split()\n"
        "    return repr((beside, files, text, inspect.getsource(f)[:5]))\n"
    )
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    archive.write_bytes(code)
    script = (
        f"import sys; sys.path.insert(1, {str(archive)!r}); import airflow_geneva.engine.udf.shipping; "
        "from zipped_package.udfs import f; print(f())"
    )
    wanted = repr((["a", "b"], ["__init__.py", "udfs.py"], ["a", "b"], "def f"))
    assert run_script(script) == wanted
    assert run_script(script) == wanted
    folder = tmp_path / "unpacked-code"
    assert [path.name for path in folder.iterdir()] == [archive.name]  # processes share it, and leave no drafts


@pytest.mark.slow
def test_processes_that_unpack_at_once_get_whole_packages(project: Path, tmp_path: Path) -> None:
    for at in range(200):
        (project / "zipped_package" / f"part_{at:03}.py").write_text(f"value = {at}\n")
    (project / "zipped_package" / "udfs.py").write_text(
        "total = sum(__import__(f'zipped_package.part_{at:03}', fromlist=['value']).value for at in range(200))\n"
    )
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    archive.write_bytes(code)
    script = (
        f"import sys; sys.path.insert(1, {str(archive)!r}); import airflow_geneva.engine.udf.shipping; "
        "from zipped_package.udfs import total; print(total)"
    )
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(run_script, [script] * 4)} == {str(sum(range(200)))}
    assert len(list((tmp_path / "unpacked-code").iterdir())) == 1


def test_an_archive_in_a_read_only_place_is_unpacked_into_the_users_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    archive.write_bytes(code)
    (tmp_path / "unpacked-code").write_text("not a folder")
    monkeypatch.setattr(code_archive.tempfile, "gettempdir", lambda: str(tmp_path))
    found = code_archive.unpacked(str(archive))
    assert found.parent.name == f"airflow-geneva-code-{os.getuid()}"
    assert (found / "zipped_package" / "udfs.py").is_file()
    old = found.parent / "code-0000000000000000.zip"
    old.mkdir()
    os.utime(old, (1, 1))
    code_archive.unpacked(str(archive))
    assert [path.name for path in found.parent.iterdir()] == [archive.name]
    found.parent.chmod(0o777)
    with pytest.raises(DamagedArchive, match="belongs to another user"):
        code_archive.unpacked(str(archive))


COMPILED = {
    "zipped_package/fast.cpython-399-sparc-linux-gnu.so": False,
    "zipped_package/fast.cp399-win_amd64.pyd": False,
    "zipped_package/fast.so": True,
    "zipped_package/fast.abi3.so": True,
    f"zipped_package/fast{sysconfig.get_config_var('EXT_SUFFIX')}": True,
    "zipped_package/libfast.so.1": True,
    "zipped_package/fast.py": True,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_module_that_this_python_cannot_import_is_noticed(name: str) -> None:
    assert foreign_modules([name, "zipped_package/__init__.py"]) == ([] if COMPILED[name] else [name])
    assert foreign_modules([name, "zipped_package/fast.py"]) == []


@pytest.mark.slow
def test_an_archive_of_another_platform_hides_no_installed_package(project: Path, tmp_path: Path) -> None:
    (project / "zipped_package" / "fast.cpython-399-sparc-linux-gnu.so").write_bytes(b"x")
    (project / "zipped_package" / "udfs.py").write_text(
        "from airflow_geneva import udf\n\n@udf\ndef f(x: int) -> int:\n    return x\n"
    )
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    archive.write_bytes(code)
    installed = tmp_path / "installed" / "zipped_package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    script = (
        f"import sys; sys.path[1:1] = [{str(archive)!r}, {str(installed.parent)!r}]\n"
        "from airflow_geneva.engine.udf.shipping import UdfReference\n"
        f"reference = UdfReference('zipped_package.udfs:f', sys.argv[1], archives=({archive.name!r},))\n"
        "try: print(reference.open().code_version)\n"
        "except ValueError as error: print(error)"
    )
    run = lambda version: run_script(script.replace("sys.argv[1]", repr(version)))  # noqa: E731
    assert "fast.cpython-399-sparc-linux-gnu.so was compiled for another Python or platform" in run("v")
    (installed / "udfs.py").write_text((project / "zipped_package" / "udfs.py").read_text())
    said = run("v")
    assert "and v was planned" in said
    version = re.search(r"has version (\w+)", said)
    assert version
    assert run(version[1]) == version[1]


def test_a_process_that_runs_several_jobs_runs_for_each_the_code_that_was_planned(
    project: Path, tmp_path: Path
) -> None:
    """The function is the same in both, so that its version does not tell; its helper differs."""
    (project / "zipped_package" / "udfs.py").write_text(
        "from airflow_geneva import udf\nfrom zipped_package.inner import helpers\n\n"
        "@udf(version='one')\ndef f(x: int) -> str:\n    return helpers.value\n"
    )
    names = []
    for value in ("first", "second"):
        (project / "zipped_package" / "inner" / "helpers.py").write_text(f"value = {value!r}\n")
        code = zip_code("zipped_package.udfs:f")
        assert code is not None
        names.append(archive_name("code", code))
        (tmp_path / names[-1]).write_bytes(code)
    script = (
        "import sys\nfrom airflow_geneva.engine.udf.shipping import UdfReference\n"
        f"places = {[str(tmp_path / name) for name in names]!r}\nnames = {names!r}\n"
        "for at in (0, 1, 0, 1, 1, 0):\n"
        "    if places[at] not in sys.path: sys.path.insert(1, places[at])\n"
        "    print(UdfReference('zipped_package.udfs:f', 'one', archives=(names[at],)).open().func(1))"
    )
    assert run_script(script).split() == ["first", "second", "first", "second", "second", "first"]


@pytest.mark.slow
def test_code_that_changes_or_vanishes_after_the_plan_runs_as_planned_or_the_task_says_so(project: Path) -> None:
    module = project / "zipped_package" / "udfs.py"
    module.write_text("from airflow_geneva import udf\n\n@udf\ndef f(x: int) -> int:\n    return x + 1\n")
    reference = UdfReference.of(load_udf("zipped_package.udfs:f"))
    elsewhere = (
        f"import sys; sys.path.insert(0, {str(project)!r})\n"
        "from airflow_geneva.engine.udf.shipping import UdfReference\n"
        f"try: print(UdfReference('zipped_package.udfs:f', {reference.version!r}).open().func(1))\n"
        "except ValueError as error: print(error)"
    )
    assert run_script(elsewhere) == "2"
    module.write_text(module.read_text().replace("x + 1", "x + 20"))
    assert reference.open().func(1) == 2  # this process has the planned code
    assert f"{reference.version} was planned: its source changed since" in run_script(elsewhere)
    module.unlink()
    assert reference.open().func(1) == 2
    assert "importing module 'zipped_package.udfs' raised ModuleNotFoundError" in run_script(elsewhere)


def _zip(*entries: tuple[str, int], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, kind
            archive.writestr(info, b"x" * 1_000 if stat.S_ISREG(mode) else b"")
    return buffer.getvalue()


def test_names_of_files_with_colons_are_unpacked(project: Path, tmp_path: Path) -> None:
    (project / "zipped_package" / "00:15:00.json").write_text("{}")
    archive = zip_code("zipped_package.udfs:f")
    assert archive is not None
    place = tmp_path / archive_name("code", archive)
    place.write_bytes(archive)
    assert (code_archive.unpacked(str(place)) / "zipped_package" / "00:15:00.json").read_text() == "{}"


# What `zip_code` never writes.
HOSTILE: dict[str, bytes] = {
    "no zip": b"code of airflow_geneva",
    "nothing": b"",
    "cut": _zip(("a.py", 0o100644))[:-30],
    "a way up": _zip(("../a.py", 0o100644)),
    "a way up inside": _zip(("a/../../a.py", 0o100644)),
    "an absolute name": _zip(("/etc/a.py", 0o100644)),
    "a drive": _zip(("C:/a.py", 0o100644)),
    "a backslash": _zip(("..\\a.py", 0o100644)),
    "an empty part": _zip(("a//b.py", 0o100644)),
    "a dot": _zip(("./a.py", 0o100644)),
    "a link": _zip(("a", 0o120777)),
    "a FIFO": _zip(("a", 0o010644)),
    "a device": _zip(("a", 0o020644)),
    "no kind": _zip(("a", 0o644)),
    "a name twice": _zip(("a.py", 0o100644), ("a.py", 0o100644)),
    "a compressed entry": _zip(("a.py", 0o100644), kind=zipfile.ZIP_DEFLATED),
    "another compression": _zip(("a.py", 0o100644), kind=zipfile.ZIP_BZIP2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_was_not_packed_so_is_not_unpacked(name: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedArchive):
        dict(read_entries(HOSTILE[name]))
    archive = tmp_path / archive_name("code", HOSTILE[name])
    archive.write_bytes(HOSTILE[name])
    with pytest.raises(DamagedArchive):
        code_archive.unpacked(str(archive))
    assert {path.name for path in tmp_path.rglob("*")} <= {archive.name, "unpacked-code"}


def test_a_file_that_says_to_be_smaller_than_it_is_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _zip(("a.py", 0o100644), ("b.py", 0o100644))
    assert sum(len(data) for _, data in read_entries(whole)) == 2_000
    lied = whole.replace((1_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    with pytest.raises(DamagedArchive):
        dict(read_entries(lied))
    monkeypatch.setattr(code_archive, "MAX_FILE_BYTES", 999)
    with pytest.raises(DamagedArchive, match="has 1,000 bytes"):
        dict(read_entries(whole))


def test_bytes_that_change_on_the_way_are_noticed(project: Path, tmp_path: Path) -> None:
    code = zip_code("zipped_package.udfs:f")
    assert code is not None
    archive = tmp_path / archive_name("code", code)
    for at in range(0, len(code), 37):
        archive.write_bytes(code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :])
        with pytest.raises(DamagedArchive, match="SHA-256 differs"):
            code_archive.unpacked(str(archive))
