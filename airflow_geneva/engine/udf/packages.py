"""Say which Python package is missing, for which interpreter, and how to install it there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata

from airflow_geneva.errors import InvalidInput

_MISSING = re.compile(r"(?:ModuleNotFoundError\b.{0,20}No module named|The package) '([\w-]+)")
# Packages whose modules have another name.
_PACKAGES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "dateutil": "python-dateutil", "fitz": "pymupdf",
    "lance": "pylance", "sklearn": "scikit-learn", "skimage": "scikit-image", "yaml": "PyYAML",
}  # fmt: skip
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?) ?([0-9A-Za-z.,<>=!~*+ -]*)")
_OF_TASKS = ("pyarrow", "pylance", "cloudpickle")
_WITH_THEM = {"numpy", *_OF_TASKS}


def check_requirements(given: Iterable[str]) -> tuple[str, ...]:
    """Return the requirements of a UDF; `InvalidInput` if one is not a package with versions, as pip takes it."""
    if isinstance(given, str):
        raise InvalidInput(f"requirements={given!r} is one requirement. Give a list: requirements=[{given!r}].")
    return tuple(one for one, _, _ in map(_parse, given))


def check_installed(name: str, requirements: Sequence[str]) -> None:
    """Raise `InvalidInput` if this process lacks packages that a UDF requires, or has other versions of them."""
    wrong = []
    for one, package, allows in map(_parse, requirements):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            wrong.append(f"{one} is not installed")
            continue
        if not allows(version):
            wrong.append(f"{one}: version {version} is installed")
    if wrong:
        todo = _install(" ".join(f"'{one}'" for one in requirements), _is_worker())
        raise InvalidInput(
            f"UDF {name!r} lacks what its requirements name, in {sys.executable}, the Python of "
            f"{_whose(_is_worker())}: {', '.join(wrong)}. {todo}"
        )


def _parse(requirement: str) -> tuple[str, str, Callable[[str], bool]]:
    """Return a requirement, its package, and whether it allows a version of it."""
    found = _REQUIREMENT.fullmatch(requirement) if isinstance(requirement, str) else None
    if found is None:
        raise InvalidInput(
            f'{requirement!r:.200} in requirements is not valid: give a package as "rapidocr", "rapidocr==3.*" or '
            '"torch>=2.4,<3".'
        )
    package, versions = found.groups()
    if not versions:
        return requirement, package, lambda _: True
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
    except ModuleNotFoundError:
        todo = how_to_install("packaging")
        raise InvalidInput(
            f"{requirement!r} in requirements names versions, which `packaging` compares. {todo}"
        ) from None
    try:
        allowed = SpecifierSet(versions)
    except InvalidSpecifier as error:
        raise InvalidInput(f"{requirement!r:.200} in requirements is not valid: {error}.") from None
    return requirement, package, lambda version: bool(allowed.contains(version, prereleases=True))


def missing_package(text: str) -> str:
    """Return the package that is not installed according to an error's text; "" if it names none."""
    found = _MISSING.search(text)
    return _PACKAGES.get(found[1], found[1]) if found else ""


def how_to_install(package: str, python: str = "") -> str:
    """Say for which Python a package is missing, and how to install it.

    Args:
        python: the interpreter of Spark's workers; "": the one of this process, which may be such a worker.
    """
    of_workers = bool(python) or _is_worker()
    python = python or sys.executable
    needed = " ".join(_OF_TASKS) if package in _WITH_THEM else package
    return (
        f"The package {package!r} is not installed for {python}, the Python of {_whose(of_workers)}. "
        f"{_install(needed, of_workers, python)}."
    )


def _install(packages: str, of_workers: bool, python: str = sys.executable) -> str:
    where = "there, on every machine" if of_workers else "there"
    return f"Install it {where}: {python} -m pip install {packages}"


def _is_worker() -> bool:
    return "pyspark.worker" in sys.modules


def _whose(of_workers: bool) -> str:
    return "Spark's workers (PYSPARK_PYTHON or spark.pyspark.python)" if of_workers else "this process"
