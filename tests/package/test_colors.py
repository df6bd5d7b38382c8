"""The colors of the pages can be told apart, in light and in dark: WCAG 2.2, success criteria 1.4.3 and 1.4.11."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import airflow_geneva

CSS = (Path(airflow_geneva.__file__).parent / "pages" / "static" / "pages.css").read_text()
SEGMENTS = ("committed", "ready", "checkpointed", "failed")
"""Of a bar, in this order, with what is left after them."""


@pytest.fixture(params=["light", "dark"])
def color(request: pytest.FixtureRequest) -> dict[str, str]:
    found = re.findall(r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", CSS)
    return {name: light if request.param == "light" else dark for name, light, dark in found}


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_segments_of_a_bar_stand_out_from_each_other_and_from_what_is_around_them(color: dict[str, str]) -> None:
    for segment in SEGMENTS:
        for around in ("left", "card", "page"):
            assert contrast(color[segment], color[around]) >= 3, (segment, around)
    for one, other in pairwise(SEGMENTS):
        assert contrast(color[one], color[other]) >= 3, (one, other)
    # Segments that are not neighbors in this order may meet: a line in the color of what is left divides them.
    assert ".bar rect { stroke: var(--left);" in CSS
    assert contrast(color["dim"], color["card"]) >= 3, "the outline of a bar"


def test_texts_can_be_read(color: dict[str, str]) -> None:
    for text in ("text", "dim", "link", "good", "warn", "bad"):
        for behind in ("card", "page"):
            assert contrast(color[text], color[behind]) >= 4.5, (text, behind)
