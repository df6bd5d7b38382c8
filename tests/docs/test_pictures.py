"""The pictures of the documentation can be read on a light and on a dark page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = sorted((Path(__file__).parents[2] / "docs" / "images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def test_there_are_pictures() -> None:
    assert len(PICTURES) >= 3


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_every_colour_of_a_picture_has_another_in_the_dark(picture: Path) -> None:
    drawing = ElementTree.parse(picture).getroot()
    [style] = [element.text or "" for element in drawing.iter(f"{SVG}style")]
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    colours = re.compile(r"^([.\w]+) \{[^}]*(?:fill|stroke): #", re.MULTILINE)
    assert set(colours.findall(light)) == set(colours.findall(dark))
    assert not [element for element in drawing.iter() if {"fill", "stroke"} & element.attrib.keys()]
