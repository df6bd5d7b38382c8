"""Render the pages: templates whose values are escaped and masked, and the headers of every answer."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from airflow_geneva.engine.display import counted, duration, format_time, step_in_words
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.links.job import PAGES
from airflow_geneva.operators._airflow_internals import redact

STATIC = Path(__file__).parent / "static"

HEADERS = {
    # No resources from other origins, no inline scripts or styles, and no frame around it except Airflow's.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_redact = redact()
NOT_KEPT = {**HEADERS, "Cache-Control": "no-store"}


def masked(value: Any) -> Any:
    """Mask secrets known to Airflow in text; return other values unchanged."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return mask_secrets(str(_redact(value)))


def cut(text: str, most: int) -> str:
    """Truncate text; mask it first, because the masker does not recognize a part of a secret."""
    whole = str(masked(text))
    return whole if len(whole) <= most else f"{whole[:most]}..."


def cut_start(text: str, most: int) -> str:
    """Truncate text at its start, as `cut` does at its end."""
    whole = str(masked(text))
    return whole if len(whole) <= most else f"...{whole[-most:]}"


def first_line(text: str, most: int = 300) -> str:
    return cut(str(masked(text)).partition("\n")[0], most)


def passed(seconds: float) -> float:
    """Return the seconds since a moment; pages.js counts on from there, whatever the browser's clock says."""
    return round(max(datetime.now(timezone.utc).timestamp() - seconds, 0.0), 1)


def age(seconds: float) -> str:
    """Say how long ago a moment was, in its largest unit; pages.js says the same."""
    since = passed(seconds)
    for unit, size in (("day", 86400), ("hour", 3600)):
        if since >= 2 * size:
            return counted(int(since / size), unit)
    return f"{since / 60:.0f} min" if since >= 60 else f"{since:.0f} s"


def ago(seconds: float) -> str:
    return f"{age(seconds)} ago"


@cache
def static_version() -> str:
    """Identify the content of the static files, which browsers keep for a day."""
    files = sorted(STATIC.iterdir())
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def environment() -> Environment:
    loader = PackageLoader("airflow_geneva.pages")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=masked
    )
    made.filters |= {
        "cut": cut,
        "cut_start": cut_start,
        "first_line": first_line,
        "duration": duration,
        "age": age,
        "ago": ago,
        "passed": passed,
        "moment": format_time,
    }
    made.filters |= {
        "counted": counted,
        "doing": step_in_words,
        "number": "{:,}".format,
        "part": lambda value: quote(str(value), safe=""),
    }
    return made


def page(request: Request, template: str, answer: int = 200, **values: Any) -> HTMLResponse:
    """Render a template; all of its values are escaped and masked by Airflow's secrets masker."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    text = environment().get_template(template).render(
        root=root, airflow=root.removesuffix(PAGES), version=static_version(), **values
    )  # fmt: skip
    return HTMLResponse(text, answer, NOT_KEPT)
