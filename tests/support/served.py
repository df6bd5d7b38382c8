"""The pages on a port of this machine, for a browser."""

from __future__ import annotations

import threading
import time
from typing import Any

import uvicorn
from airflow.api_fastapi.app import create_auth_manager
from fastapi import FastAPI, Request

from airflow_geneva.pages.app import app
from tests.support.rights import Rights


class ServedPages:
    """The pages, opened by the user `reader`."""

    def __init__(self) -> None:
        token = Rights.token("reader", create_auth_manager())
        self._whole = FastAPI()
        self._whole.mount("/geneva", app)

        @self._whole.middleware("http")
        async def log_in(request: Request, go_on: Any) -> Any:
            request.scope["headers"].append((b"authorization", f"Bearer {token}".encode()))
            return await go_on(request)

        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = uvicorn.Server(uvicorn.Config(self._whole, port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/geneva{path}"
