"""A picture of a tile grid for the documentation: tiles, their halos, and who sends to whom.

Drawn by hand as SVG, in the colours of whatever page it stands on. Called where the documentation is
built; nothing in training needs it.
"""

from __future__ import annotations

from ridgeline.errors import UsageError
from ridgeline.parallel.spatial.grid import cut_evenly

_IMAGE_PX = 320.0
_GAP_PX = 34.0
"""Between tiles, so that arrows have room."""
_MARGIN_PX = 16.0

_STYLE = (
    ".tile{fill:#4c78a8;fill-opacity:.25;stroke:#4c78a8}"
    ".halo{fill:#f58518;fill-opacity:.35}"
    ".send{stroke:#f58518;stroke-width:1.5;fill:none;marker-end:url(#tip)}"
    "text{font:12px sans-serif;fill:currentColor;text-anchor:middle}"
)


def tile_map_svg(height: int, width: int, grid: tuple[int, int], halo: int) -> str:
    """An image of `height` x `width` on a `grid` of ranks whose windows reach `halo` pixels over.

    Orange is what a rank holds besides its tile while a layer runs; an arrow is a message.
    """
    num_rows, num_columns = grid
    if min(grid) < 1 or height < num_rows or width < num_columns:
        raise UsageError(
            f"an image of {height}x{width} cannot be drawn on a grid of {num_rows}x{num_columns}; "
            "every rank needs a row and a column"
        )
    scale = _IMAGE_PX / max(height, width)
    rows, columns = cut_evenly(height, num_rows), cut_evenly(width, num_columns)
    tiles, halos, arrows, words = [], [], [], []
    for i, (top, bottom) in enumerate(rows):
        for j, (left, right) in enumerate(columns):
            x = _MARGIN_PX + left * scale + j * _GAP_PX
            y = _MARGIN_PX + top * scale + i * _GAP_PX
            w, h = (right - left) * scale, (bottom - top) * scale
            tiles.append(_rect("tile", x, y, w, h))
            name, span = f"rank {i * num_columns + j}", f"{bottom - top}x{right - left}"
            words.append(
                _text(x + w / 2, y + h / 2 - 4, name) + _text(x + w / 2, y + h / 2 + 12, span)
            )
            # Halos stay inside the image: at its border there is padding instead.
            above, below = min(halo, top), min(halo, height - bottom)
            before, after = min(halo, left), min(halo, width - right)
            halos.append(_frame(x, y, w, h, above, below, before, after, scale))
            if j + 1 < num_columns and halo:
                arrows += _pair(x + w, y + h / 2, x + w + _GAP_PX, y + h / 2)
            if i + 1 < num_rows and halo:
                arrows += _pair(x + w / 2, y + h, x + w / 2, y + h + _GAP_PX)
    total_w = width * scale + (num_columns - 1) * _GAP_PX + 2 * _MARGIN_PX
    total_h = height * scale + (num_rows - 1) * _GAP_PX + 2 * _MARGIN_PX + 18
    caption = f"{height}x{width} pixels on {num_rows}x{num_columns} ranks, halo {halo}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w:.0f} {total_h:.0f}" '
        f'width="{total_w:.0f}" height="{total_h:.0f}" role="img" aria-label="{caption}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="#f58518"/></marker></defs>',
        *halos,
        *tiles,
        *arrows,
        *words,
        _text(total_w / 2, total_h - 6, caption),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _rect(kind: str, x: float, y: float, w: float, h: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{words}</text>'


def _frame(
    x: float,
    y: float,
    w: float,
    h: float,
    above: int,
    below: int,
    before: int,
    after: int,
    scale: float,
) -> str:
    """The halo around a tile, never wider than half the gap, so that two do not overlap."""
    up, down, left, right = (min(n * scale, _GAP_PX / 2 - 2) for n in (above, below, before, after))
    if not any((up, down, left, right)):
        return ""
    outer = f"M{x - left:.1f} {y - up:.1f}h{w + left + right:.1f}v{h + up + down:.1f}"
    outer += f"h{-(w + left + right):.1f}z"
    inner = f"M{x:.1f} {y:.1f}v{h:.1f}h{w:.1f}v{-h:.1f}z"
    return f'<path class="halo" fill-rule="evenodd" d="{outer}{inner}"/>'


def _pair(x0: float, y0: float, x1: float, y1: float) -> list[str]:
    """One arrow each way, side by side."""
    across = 6.0 if x0 != x1 else 0.0
    along = 6.0 if x0 == x1 else 0.0
    ends = [(x0 - along, y0 - across, x1 - along, y1 - across)]
    ends.append((x1 + along, y1 + across, x0 + along, y0 + across))
    return [f'<path class="send" d="M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}"/>' for a, b, c, d in ends]
