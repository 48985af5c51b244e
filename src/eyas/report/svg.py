"""Small line charts as SVG, for a page that needs nothing else; names and labels are escaped here."""

from collections.abc import Mapping, Sequence
from html import escape

from markupsafe import Markup

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_COLORS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)")


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> Markup:
    """Draw named series of (x, y) points on common axes, with a legend when there are several."""
    points = [p for line in series.values() for p in line]
    if not points:
        return Markup("<p>no data</p>")
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)}">']
    for i in range(5):
        value = y_low + (y_high - y_low) * i / 4
        _, y = at(x_low, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        x_value = x_low + (x_high - x_low) * i / 4
        x, _ = at(x_value, y_low)
        shown = f"{x_value:.0f}" if x_high - x_low >= 8 else f"{x_value:.4g}"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{shown}</text>')
    for number, (name, line) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        if len(series) > 1:
            y = _TOP + 14 + 20 * number
            parts.append(f'<text x="{_WIDTH - _RIGHT - 4}" y="{y}" text-anchor="end" style="fill:{color}">')
            parts.append(f"{escape(name)}</text>")
    x = (_LEFT + _WIDTH) / 2
    parts.append(f'<text x="{x}" y="{_HEIGHT - 2}" text-anchor="middle">{escape(x_label)}</text></svg>')
    return Markup("".join(parts))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
