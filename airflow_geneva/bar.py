"""A progress bar while a job runs in this process: on a terminal, or in a notebook."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine import api

if TYPE_CHECKING:
    from airflow_geneva.engine.api import JobMeter

_FIRST_AFTER = 0.5
"""Seconds; what is done sooner needs no bar."""
_EVERY = 0.5


@contextmanager
def progress_bar(target: str) -> Iterator[None]:
    """Show a bar while the body runs a job, unless the output is a log or a file."""
    meter = api.JobMeter(target)
    with show(meter), meter.measuring():
        yield


def show(meter: JobMeter) -> AbstractContextManager[None]:
    """Show a bar of a job that another thread may run, for as long as the body runs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):
        return _in_notebook(meter)
    return _on_terminal(meter) if sys.stderr.isatty() else nullcontext()


@contextmanager
def _on_terminal(meter: JobMeter) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def draw() -> Any:
        if meter.seconds < _FIRST_AFTER:
            return ""
        grid = Table.grid(padding=(0, 1))
        done = meter.rows_done
        bar = ProgressBar(total=max(meter.rows, 1), completed=done, width=24, pulse=not done)
        grid.add_row(Text(meter.target), bar, Text(str(meter)))
        return grid

    # What is printed meanwhile stays where it was meant to go, if that is no terminal.
    redirected = sys.stdout.isatty()
    console = Console(stderr=True)
    with Live(get_renderable=draw, console=console, refresh_per_second=4, transient=True, redirect_stdout=redirected):
        yield


@contextmanager
def _in_notebook(meter: JobMeter) -> Iterator[None]:
    notebook: Any = import_module("IPython.display")
    shown: list[Any] = []
    ended = threading.Event()

    def draw() -> None:
        bar = notebook.HTML(_html(meter))
        if shown:
            shown[0].update(bar)
        else:
            shown.append(notebook.display(bar, display_id=True))

    def draw_on() -> None:
        pause = _FIRST_AFTER
        while not ended.wait(pause):
            draw()
            pause = _EVERY

    # A thread's output appears in this cell only if it runs in the cell's context.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(draw_on,), name="geneva-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if shown:
            draw()


def _html(meter: JobMeter) -> str:
    value = f' value="{meter.rows_done}" max="{meter.rows}"' if meter.rows_done else ""
    return f"<div><b>{escape(meter.target)}</b> <progress{value}></progress> {escape(str(meter))}</div>"
