"""A Python as a cluster's machines or images have it."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path


def make_bare_python(folder: Path) -> str:
    """Make a Python with pyarrow, pylance and PySpark and without this package, and return its path."""
    venv.create(folder, with_pip=False)
    # A folder named in a .pth file is searched, but its own .pth files (the editable install) are not read.
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (purelib / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(folder / "bin" / "python")
    found = subprocess.run([python, "-c", "import lance, airflow_geneva"], capture_output=True, text=True, cwd="/")
    assert "No module named 'airflow_geneva'" in found.stderr
    return python
