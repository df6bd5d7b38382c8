"""Plots as SVG images that are readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 40, 190, 16, 34
_NAMES, _VALUES, _BAR, _GAP = 280, 60, 15, 8
_LIGHT = ("#4051b5", "#c62828", "#2e7d32", "#a15c00", "#6a1b9a")
_DARK = ("#8c9eff", "#ef9a9a", "#a5d6a7", "#ffcc80", "#ce93d8")


def plot_lines(
    title: str, across: str, up: str, lines: Mapping[str, Sequence[float]], places: Sequence[float] = ()
) -> str:
    """Draw at most five lines with the same number of positive values; ``across`` and ``up`` label the axes.

    Values are drawn at the given x positions, which label the axis, or at equal distances.
    """
    count = max(len(values) for values in lines.values())
    top = max(max(values) for values in lines.values())
    step = 10 ** math.floor(math.log10(top)) / (1 if top >= 4 * 10 ** math.floor(math.log10(top)) else 2)
    highest = step * math.ceil(top / step)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(at: int) -> float:
        share = places[at] / max(places) if places else at / max(count - 1, 1)
        return round(_LEFT + width * share, 1)

    def y(value: float) -> float:
        return round(_TOP + height * (1 - value / highest), 1)

    axes = f"{across}; {up}" if places else f"{across}, 1 to {count}; {up}"
    marks = [step * i for i in range(round(highest / step) + 1)]
    parts = [
        *_page(title, _HEIGHT, len(lines)),
        *(f'<path d="M{_LEFT} {y(mark)}H{_LEFT + width}" class="grid"/>' for mark in marks),
        *(f'<text x="{_LEFT - 6}" y="{y(mark) + 4}" class="up">{mark:g}</text>' for mark in marks),
        *(f'<text x="{x(at)}" y="{_HEIGHT - 20}" class="across">{place:g}</text>' for at, place in enumerate(places)),
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{escape(axes)}</text>',
    ]
    # Names are placed at the ends of their lines, at least one line of text apart.
    below = float("-inf")
    for number, (name, values) in sorted(enumerate(lines.items()), key=lambda line: y(line[1][1][-1])):
        points = " ".join(f"{x(at)},{y(value)}" for at, value in enumerate(values))
        below = max(y(values[-1]) + 4, below + 16)
        parts.append(f'<polyline points="{points}" class="l{number}"/>')
        parts.append(f'<text x="{_LEFT + width + 8}" y="{below}" class="n{number}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def plot_bars(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Draw the seconds of at most five sides in each group as bars on a logarithmic axis; a group may lack a side."""
    sides = list(dict.fromkeys(side for group in groups.values() for side in group))
    lowest, highest = (
        rounded(math.log10(end(seconds for group in groups.values() for seconds in group.values())))
        for rounded, end in ((math.floor, min), (math.ceil, max))
    )
    rows = sum(map(len, groups.values()))
    bottom = _TOP + _BAR * rows + _GAP * len(groups)
    height, width = bottom + _BOTTOM + 6, _WIDTH - _NAMES - _VALUES

    def x(seconds: float) -> float:
        return round(_NAMES + width * (math.log10(seconds) - lowest) / max(highest - lowest, 1), 1)

    marks = [10.0**power for power in range(lowest, max(highest, lowest + 1) + 1)]
    parts = [
        *_page(title, height, len(sides)),
        *(f'<path d="M{x(mark)} {_TOP}V{bottom}" class="grid"/>' for mark in marks),
        *(f'<text x="{x(mark)}" y="{bottom + 16}" class="across">{mark:g} s</text>' for mark in marks),
    ]
    at = float(_TOP)
    for name, group in groups.items():
        middle = at + _BAR * len(group) / 2 + 4
        parts.append(f'<text x="{_NAMES - 8}" y="{middle:g}" class="up">{escape(name)}</text>')
        for side, seconds in group.items():
            end, number = x(seconds), sides.index(side)
            size = f'width="{max(end - _NAMES, 1):.1f}" height="{_BAR - 2}"'
            parts.append(f'<rect x="{_NAMES}" y="{at:g}" {size} class="b{number}"/>')
            parts.append(f'<text x="{max(end, _NAMES) + 5:.1f}" y="{at + _BAR - 4:g}">{seconds:.2g} s</text>')
            at += _BAR
        at += _GAP
    for number, side in enumerate(sides):
        left = _NAMES + number * width / len(sides)
        parts.append(f'<text x="{left:.1f}" y="{height - 4}" class="n{number}">\u25a0 {escape(side)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _page(title: str, height: float, colors: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-labelledby="t">',
        f'<title id="t">{escape(title)}</title>',
        _style(colors),
        f'<rect width="{_WIDTH}" height="{height:g}" rx="4" class="page"/>',
    ]


def _style(count: int) -> str:
    def colors(of: Sequence[str], page: str, text: str, grid: str) -> list[str]:
        return [
            f".page {{ fill: {page} }}",
            f"text {{ font: 12px sans-serif; fill: {text} }}",
            f".grid {{ stroke: {grid} }}",
            *(f".l{number} {{ fill: none; stroke: {of[number]}; stroke-width: 2 }}" for number in range(count)),
            *(f".n{number}, .b{number} {{ fill: {of[number]} }}" for number in range(count)),
        ]

    light, dark = colors(_LIGHT, "#fff", "#222", "#ddd"), colors(_DARK, "#1e2129", "#e2e4e9", "#3a3f4b")
    styles = [
        *light,
        ".up { text-anchor: end }",
        ".across { text-anchor: middle }",
        "@media (prefers-color-scheme: dark) {",
        *dark,
        "}",
    ]
    return "\n".join(["<style>", *styles, "</style>"])
