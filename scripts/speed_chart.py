"""A bar chart as SVG text: speed-ups on a logarithmic scale, bars from the line at 1x, losses to its left.

The text depends on the numbers alone, so that a committed chart can be compared with a new one.
"""

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 224, 64, 78, 36
ROW, BAR, NOTE = 33, 12, 18
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0", "axis": "#59636e"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "grid": "#3d444d", "axis": "#9198a1"},
}
FILLS = {"light": ("#0969da", "#bc4c00"), "dark": ("#4493f8", "#db6d28")}


class Bar(NamedTuple):
    """One candidate of a row; None: not measured."""

    mean: float | None
    worst: float | None


class Row(NamedTuple):
    label: str
    bars: tuple[Bar, ...]


def axis(rows: list[Row]) -> tuple[float, float]:
    """log2 of the scale's ends: powers of two that hold every number, and 1x."""
    values = [v for row in rows for bar in row.bars for v in (bar.mean, bar.worst) if v is not None]
    low = math.floor(math.log2(min([1.0, *values])))
    return min(low, -1), max(math.ceil(math.log2(max([2.0, *values]))), 1)


def number(value: float) -> str:
    return f"{value:.1f}x" if value < 20 else f"{value:.0f}x"


def place(value: float) -> str:
    """A coordinate: two decimals are more than a pixel, and the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def draw(rows: list[Row], series: tuple[str, ...], title: str, subtitle: str, notes: list[str], theme: str):
    """The chart as SVG text; series: the names of each row's bars; notes: lines under it."""
    colours, fills = THEMES[theme], FILLS[theme]
    low, high = axis(rows)
    end = TOP + ROW * len(rows)
    height = end + BOTTOM + NOTE * len(notes)

    def x(value: float) -> float:
        return LEFT + (math.log2(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def text(at_x, at_y, content, colour="text", size=13, anchor="start", extra=""):
        return (
            f'<text x="{place(at_x)}" y="{place(at_y)}" font-size="{size}" fill="{colours[colour]}" '
            f'text-anchor="{anchor}"{extra}>{escape(content)}</text>'
        )

    told = "; ".join(
        f"{row.label}: "
        + ", ".join(f"{number(b.mean)} over {n}" for b, n in zip(row.bars, series, strict=True) if b.mean)
        for row in rows
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{FONT}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(told)}</desc>",
        text(0, 18, title, size=16, extra=' font-weight="600"'),
        text(0, 38, subtitle, "muted", 12),
    ]
    at = 0.0
    for name, fill in zip(series, fills, strict=True):
        parts.append(f'<rect x="{place(at)}" y="51" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(text(at + 18, 62, f"vs {name}"))
        at += 40 + 7.2 * len(name) + 18
    parts.append(f'<path d="M{place(at)} 57h22m0-4v8" stroke="{colours["text"]}" stroke-width="1.5" fill="none"/>')
    parts.append(text(at + 30, 62, "from the mean to the slowest shape", "muted", 12))
    for power in range(low, high + 1):
        line = x(2.0**power)
        one = power == 0
        parts.append(
            f'<path d="M{place(line)} {TOP - 4}V{end + 4}" stroke="{colours["axis" if one else "grid"]}" '
            f'stroke-width="{1.5 if one else 1}"/>'
        )
        parts.append(text(line, end + 20, f"{2.0**power:g}x", "text" if one else "muted", 12, "middle"))
    for i, row in enumerate(rows):
        top = TOP + ROW * i + (ROW - 2 * BAR) / 2
        parts.append(
            text(LEFT - 10, top + BAR + 4.5, row.label, size=12.5, anchor="end", extra=f' font-family="{MONO}"')
        )
        for j, (bar, fill) in enumerate(zip(row.bars, fills, strict=True)):
            y, middle = top + j * BAR, top + j * BAR + BAR / 2
            if bar.mean is None:
                parts.append(text(x(1) + 5, middle + 4, "not measured", "muted", 10.5))
                continue
            begin, finish = sorted((x(1), x(bar.mean)))
            parts.append(
                f'<rect x="{place(begin)}" y="{place(y + 0.5)}" width="{place(max(finish - begin, 1))}" '
                f'height="{BAR - 1}" fill="{fill}"/>'
            )
            if bar.worst is not None and bar.worst < bar.mean:
                parts.append(
                    f'<path d="M{place(x(bar.mean))} {place(middle)}H{place(x(bar.worst))}m0-4v8" '
                    f'stroke="{colours["text"]}" stroke-width="1.5" fill="none"/>'
                )
            parts.append(text(max(finish, x(1)) + 5, middle + 4, number(bar.mean), size=11))
    for i, note in enumerate(notes):
        parts.append(text(0, end + BOTTOM + NOTE * i + 8, note, "muted", 12))
    return "\n".join([*parts, "</svg>"]) + "\n"
