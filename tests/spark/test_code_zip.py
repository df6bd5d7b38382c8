"""The code zip: whole, the same bytes each time, and importable from the Python path."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf import shipping as code_zip
from airflow_geneva.engine.udf.shipping import zip_code
from airflow_geneva.errors import InvalidInput

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
    (tmp_path / "code.zip").write_bytes(code)
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'code.zip')!r}); import {module} as m; print(m.value)"
    printed = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == value


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
        file.truncate(code_zip.MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidInput, match=r"model.bin' has 50,000,001 bytes"):
        zip_code("zipped_package.udfs:f")
