"""The HTML around a report: one file with its style and a few lines of script, nothing fetched.

Pieces are functions from values to markup, and each escapes what it is given unless its argument is
named `body`. The page reads without the script, which only adds values under the pointer. Called by
`build.py` and, for a page that changes, by `served.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ridgeline.report.svg import number_text

_LIGHT = ("#2563c9", "#d4621a", "#17835a", "#a83a8c", "#8a6d00", "#0f7f95", "#c22f3d", "#63676f")
_DARK = ("#7fb0ff", "#ff9d5c", "#54c795", "#e58acb", "#d9b73b", "#56c3d8", "#ff7f87", "#a4a9b3")

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbf9;--card:#fff;--ink:#1b1d21;--soft:#636870;--line:#e2e2dd;
--warn:#fdf1dc;--warnline:#d9a441;--inbar:#fff;--wait:#c9ccd2;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e7e8ea;--soft:#9aa0a9;
--line:#33373d;--warn:#3a2f18;--warnline:#b98a2f;--inbar:#101214;--wait:#4b5058;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:27px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:38px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
p{margin:6px 0;max-width:76ch}.note,.sub,.empty{color:var(--soft)}.note{font-size:13px}
.sub{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:center;max-width:none}
.badge{display:inline-block;padding:1px 9px;border-radius:9px;font-size:13px;font-weight:600;
border:1px solid currentColor}.finished{color:var(--c2)}.failed{color:var(--c6)}
.interrupted,.running,.stopped,.silent,.waiting{color:var(--c1)}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:12px 14px;
overflow-x:auto;margin:8px 0}
.warning{background:var(--warn);border-left:3px solid var(--warnline);padding:8px 14px;
border-radius:0 5px 5px 0;max-width:none;margin:12px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:12px;
margin:22px 0 6px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:11px 14px}
.tile b{display:block;font-size:22px;line-height:1.3;font-weight:620;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{display:block;font-size:13px;color:var(--soft);line-height:1.4}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:14px}
figure{margin:0 0 14px;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:12px 14px}
.grid2 figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}
svg{display:block;width:100%;height:auto}svg text{font-size:12px}
.tick{fill:var(--soft)}.strong{fill:var(--ink);font-weight:700}.inbar{fill:var(--inbar);
font-weight:600}.bar text{font-size:15px}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.cursor{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
.curve{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.bar{border-radius:6px;overflow:hidden}.fill.wait{fill:var(--wait)}
.swatch.wait{background:var(--wait)}.swatch.p95{background:var(--ink);border-radius:50%}
.p95{fill:var(--ink);stroke:var(--card);stroke-width:1.5}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:4px 0 6px;padding:0;
font-size:13px;color:var(--soft)}.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;margin:8px 0}
th{text-align:left;color:var(--soft);font-weight:600;font-size:13px}
th,td{min-width:6em;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.mark td{font-weight:650}
summary{cursor:pointer;font-weight:600;margin:8px 0}
#tip{position:fixed;display:none;pointer-events:none;background:var(--card);color:var(--ink);
border:1px solid var(--line);border-radius:6px;padding:6px 10px;font-size:13px;
box-shadow:0 3px 12px #0003;white-space:pre;z-index:9;font-variant-numeric:tabular-nums}
footer{margin-top:44px;color:var(--soft);font-size:13px}
COLOURS
@media print{body{background:#fff;font-size:11pt}main{max-width:none;padding:0}
figure,.tile,table,pre{break-inside:avoid}#tip{display:none!important}
pre{white-space:pre-wrap}}
"""

_SCRIPT = """
(function(){var tip=document.createElement('div');tip.id='tip';document.body.appendChild(tip);
window.plots=function(){tip.style.display='none';
document.querySelectorAll('svg.plot').forEach(function(svg){
var cursor=svg.querySelector('.cursor'),curves=[];
svg.querySelectorAll('path.curve').forEach(function(p){
var px=(p.getAttribute('d').match(/[ML][-\\d.]+/g)||[]).map(function(t){return +t.slice(1)});
var v=p.dataset.v.split(' ').map(function(t){return t.split(':')});
if(px.length&&px.length===v.length)curves.push({n:p.dataset.n,px:px,v:v})});
svg.addEventListener('mousemove',function(e){
var box=svg.getBoundingClientRect(),best=null,lines=[];
var x=(e.clientX-box.left)*svg.viewBox.baseVal.width/box.width;
curves.forEach(function(c){var k=0;c.px.forEach(function(q,i){
if(Math.abs(q-x)<Math.abs(c.px[k]-x))k=i});
if(best===null||Math.abs(c.px[k]-x)<Math.abs(best-x)){
best=c.px[k];lines[0]=svg.dataset.x+' '+c.v[k][0]}
c.k=k});if(best===null)return;
curves.forEach(function(c){if(Math.abs(c.px[c.k]-best)<12)lines.push(c.n+'  '+c.v[c.k][1])});
cursor.setAttribute('x1',best);cursor.setAttribute('x2',best);
tip.textContent=lines.join('\\n');tip.style.display='block';
tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
tip.style.top=Math.min(e.clientY+14,innerHeight-tip.offsetHeight-8)+'px'});
svg.addEventListener('mouseleave',function(){tip.style.display='none';
cursor.setAttribute('x1',-9);cursor.setAttribute('x2',-9)})})};plots()})();
"""


@dataclass(frozen=True)
class Figure:
    """One headline number: what it is, its value, and a word on how to read it."""

    label: str
    value: str
    note: str = ""


def page(title: str, body: str) -> str:
    """A whole document."""
    light = "".join(f"--c{i}:{colour};" for i, colour in enumerate(_LIGHT))
    dark = "".join(f"--c{i}:{colour};" for i, colour in enumerate(_DARK))
    colours = "".join(
        f".curve.c{i}{{stroke:var(--c{i})}}.fill.c{i}{{fill:var(--c{i})}}"
        f".swatch.c{i}{{background:var(--c{i})}}"
        for i in range(len(_LIGHT))
    )
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark).replace("COLOURS", colours)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>\n" if body else ""


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def badge(status: str) -> str:
    return f'<span class="badge {escape(status)}">{escape(status)}</span>'


def tiles(figures: Sequence[Figure]) -> str:
    cells = "".join(
        f'<div class="tile"><span>{escape(f.label)}</span><b>{escape(f.value)}</b>'
        f"<span>{escape(f.note)}</span></div>"
        for f in figures
    )
    return f'<div class="tiles">{cells}</div>'


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_text: int = 1,
    marked: int | None = None,
) -> str:
    """Rows under headers; columns after the first `num_text` are numbers and stand right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i >= num_text else ''}>{escape(value)}</{tag}>"
            for i, value in enumerate(values)
        )

    lines = "".join(
        f"<tr{' class=mark' if i == marked else ''}>{cells('td', row)}</tr>\n"
        for i, row in enumerate(rows)
    )
    head = f"<thead><tr>{cells('th', headers)}</tr></thead>" if any(headers) else ""
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody></table></div>'


def preformatted(text: str, limit: int = 60_000) -> str:
    """Text as it is; very long text is cut, and says so, to keep the page small."""
    cut = f"\n... {len(text) - limit:,} characters more" if len(text) > limit else ""
    return f"<pre>{escape(text[:limit] + cut)}</pre>"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{number_text(seconds)} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def bytes_text(count: int | None) -> str:
    if count is None:
        return "–"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 999.5 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count} B"


def rate_text(rate: float | None, unit: str) -> str:
    if not rate:
        return "–"
    return (
        f"{number_text(rate / 1e6)} M {unit}/s" if rate >= 1e6 else f"{number_text(rate)} {unit}/s"
    )


def count_text(count: float) -> str:
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e4)):
        if count >= size:
            return f"{count / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{count:,.0f}"


def flops_text(flops: float) -> str:
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.3g} FLOP/s"


def value_text(value: float | None) -> str:
    return "–" if value is None else number_text(value)
