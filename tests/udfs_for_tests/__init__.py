"""Sample UDFs, importable by tests and by the processes that tests start."""

from __future__ import annotations
