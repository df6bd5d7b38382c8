"""Ctrl-C and SIGTERM: the job of a command ends after its current calls, and keeps what it computed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import typer

from airflow_geneva.cli.database import Command, without_controls
from airflow_geneva.engine import api
from airflow_geneva.spark.local import end_session

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ASKED: ContextVar[list[int]] = ContextVar("geneva_signals")
"""The signals that canceled the job of the running command."""


class JobCommand(Command):
    """A command that runs jobs: the first Ctrl-C or SIGTERM cancels the job, the second one ends the process."""

    def invoke(self, ctx: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return super().invoke(ctx)
        with _canceling():
            found = super().invoke(ctx)
            exit_if_canceled()
        return found


def exit_if_canceled() -> None:
    """End a command whose job was canceled, with the exit code of its signal."""
    if asked := _ASKED.get(None):
        raise typer.Exit(128 + asked[0])


@contextmanager
def _canceling() -> Iterator[None]:
    asked: list[int] = []
    token = _ASKED.set(asked)

    def stop(number: int, frame: FrameType | None) -> None:
        cancel = api.JobMeter.current().cancel  # of the job on which this thread works
        if cancel is None or asked:
            signal.signal(number, before[signal.Signals(number)])
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        asked.append(number)
        # The interrupted code may hold locks of the store and of the terminal. A daemon, because the store may not
        # answer when the second signal ends the process.
        threading.Thread(target=_cancel, args=(cancel,), name="geneva-cancel", daemon=True).start()

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        _ASKED.reset(token)
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked and "pyspark" in sys.modules:
            end_session()


def _cancel(cancel: Callable[[], None]) -> None:
    try:
        cancel()
        said = "The job ends after its current calls. What it computed is kept, and the next run goes on from there."
    except Exception as error:
        said = f"The job cannot be canceled, and goes on: {error}."
    typer.echo(without_controls(f"{said} The next Ctrl-C ends it at once."), err=True)
