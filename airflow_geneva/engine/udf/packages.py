"""Say which Python package is missing, for which interpreter, and how to install it there."""

from __future__ import annotations

import re
import sys

_MISSING = re.compile(r"(?:ModuleNotFoundError\b.{0,20}No module named|The package) '([\w-]+)")
# Packages whose modules have another name.
_PACKAGES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "dateutil": "python-dateutil", "fitz": "pymupdf",
    "lance": "pylance", "sklearn": "scikit-learn", "skimage": "scikit-image", "yaml": "PyYAML",
}  # fmt: skip
_OF_TASKS = ("pyarrow", "pylance", "cloudpickle")
_WITH_THEM = {"numpy", *_OF_TASKS}


def missing_package(text: str) -> str:
    """Return the package that is not installed according to an error's text; "" if it names none."""
    found = _MISSING.search(text)
    return _PACKAGES.get(found[1], found[1]) if found else ""


def how_to_install(package: str, python: str = "") -> str:
    """Say for which Python a package is missing, and how to install it.

    Args:
        python: the interpreter of Spark's workers; "": the one of this process, which may be such a worker.
    """
    of_workers = bool(python) or "pyspark.worker" in sys.modules
    whose = "Spark's workers (PYSPARK_PYTHON or spark.pyspark.python)" if of_workers else "this process"
    where = "there, on every machine" if of_workers else "there"
    python = python or sys.executable
    needed = " ".join(_OF_TASKS) if package in _WITH_THEM else package
    return (
        f"The package {package!r} is not installed for {python}, the Python of {whose}. "
        f"Install it {where}: {python} -m pip install {needed}."
    )
