"""A live page of runs, for a browser: `ridgeline watch --serve`.

A small server of Python's own library. It answers GET with two things, the page and its content, which the
page fetches again every few seconds; no file can be had from it. Every request has to carry the token that
the address was printed with, because other users of a login node can reach its ports. Called by
`cli_watch.py`.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from ridgeline.errors import RunError, UsageError
from ridgeline.report.live import LiveRun, Watched, tell_event
from ridgeline.report.page import (
    Figure,
    badge,
    bytes_text,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from ridgeline.report.resources import resource_charts
from ridgeline.report.summary import number
from ridgeline.report.svg import Series, line_chart
from ridgeline.report.terminal import (
    GPU_HEADS,
    HEADS,
    cores_text,
    figures,
    gpu_row,
    newest_gpus,
    pair_text,
    progress_text,
    row_of,
    used_text,
)

PORTS = range(8765, 8785)
"""Tried in turn where none was asked for."""
_EVENT_ROWS = 20
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)

_SCRIPT = """
(function(){var box=document.getElementById('live'),gone=document.getElementById('gone'),last=Date.now();
function again(){fetch('/live'+location.search,{cache:'no-store',signal:AbortSignal.timeout(15000)})
.then(function(answer){
if(!answer.ok)throw answer.status;return answer.text()}).then(function(text){
box.innerHTML=text;last=Date.now();gone.hidden=true;window.plots&&window.plots()}).catch(function(why){
gone.textContent='No answer from `ridgeline watch` for '+Math.round((Date.now()-last)/1000)+' s ('+
(typeof why==='number'?'status '+why:'it has ended, or the connection is lost')+
'). What is below is from '+new Date(last).toLocaleTimeString()+'.';gone.hidden=false
}).finally(function(){setTimeout(again,EVERY)})}
setTimeout(again,EVERY)})();
"""


class Pages:
    """What is served; several browsers share one look at the directories."""

    def __init__(self, watched: Watched, every_s: float) -> None:
        self._watched, self._every_s = watched, every_s
        self._lock = threading.Lock()
        self._runs: list[LiveRun] = []
        self._looked = -1e9

    def content(self, wanted: str, token: str) -> str | None:
        """The part that changes: of the one run, of the run `wanted`, or a table of all. None where there
        is no such run."""
        with self._lock:
            if time.monotonic() - self._looked >= min(self._every_s, 1.0):
                self._runs, self._looked = self._watched.refresh(), time.monotonic()
            now = time.time()
            if len(self._runs) == 1 and not wanted:
                return run_content(self._runs[0], now)
            if not wanted:
                return _table_content(self._runs, now, token)
            found = [live for live in self._runs if str(live.run.path) == wanted]
            return run_content(found[0], now) if found else None

    def page(self, wanted: str, token: str) -> str | None:
        content = self.content(wanted, token)
        if content is None:
            return None
        script = _SCRIPT.replace("EVERY", str(round(1000 * self._every_s)))
        body = (
            '<p class="warning" id="gone" hidden></p>'
            f'<div id="live">{content}</div><script>{script}</script>'
        )
        return page("Ridgeline watch", body)


def run_content(live: LiveRun, now: float) -> str:
    """One run: figures, curves, nodes, events."""
    state = live.state(now)
    words = [live.model_name, f"layout {live.layout}" if live.layout else ""]
    if live.num_ranks:
        words.append(f"{live.num_ranks} × {live.device_name}")
    line = "".join(f"<span>{escape(word)}</span>" for word in words if word)
    shown = [Figure(name, value) for name, value in figures(live)]
    warns = state.word in ("silent", "failed") or state.sentence.startswith("alive")
    return "".join(
        (
            f'<h1>{escape(live.name)}</h1><p class="sub">{badge(state.word)}{line}</p>',
            paragraph(state.sentence, "warning" if warns else "note") if state.sentence else "",
            paragraph(progress_text(live, state)),
            tiles(shown),
            section("Curves", _curves(live)),
            section("Nodes", _nodes(live)),
            section("Resources", resource_charts(live.nodes)),
            section("Events", _events(live)),
            f"<footer>Read at {datetime.fromtimestamp(now).strftime('%H:%M:%S')}, from the run "
            "directory alone.</footer>",
        )
    )


def _table_content(runs: Sequence[LiveRun], now: float, token: str) -> str:
    """A row a run, each with a link to its own page."""
    rows = []
    for live in runs:
        link = f"/?token={token}&run={quote(str(live.run.path), safe='')}"
        cells = row_of(live, now)
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        rows.append(f'<tr><td><a href="{escape(link)}">{escape(cells[0])}</a></td>{rest}</tr>')
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    return (
        f"<h1>{len(runs)} runs</h1>"
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div>"
    )


def _curves(live: LiveRun) -> str:
    if not live.steps:
        return ""
    losses = [Series("train", [(s.step, number(s.loss)) for s in live.steps], 0)]
    evaluated = [(e.step, number(e.metrics["loss"])) for e in live.evals if "loss" in e.metrics]
    losses += [Series("eval", evaluated, 1)] if evaluated else []
    per_sample = live.units_per_sample
    rates = [(float(s.step), s.samples_per_s * per_sample) for s in live.steps]
    names = [n for n in (live.evals[-1].metrics if live.evals else {}) if n != "loss"]
    charts = [
        line_chart([Series(live.unit, rates, 2)], title=f"{live.unit} per second", from_zero=True),
        *(
            line_chart(
                [
                    Series(
                        n, [(e.step, number(e.metrics[n])) for e in live.evals if n in e.metrics], 3
                    )
                ],
                title=f"eval {n}",
            )
            for n in names[:4]
        ),
    ]
    return (
        line_chart(losses, title="loss", full=True) + f'<div class="grid2">{"".join(charts)}</div>'
    )


def _nodes(live: LiveRun) -> str:
    rows = []
    for host, records in sorted(live.nodes.items()):
        last = records[-1]
        rows.append(
            [
                host,
                cores_text(last),
                used_text(last.memory_used_bytes, last.memory_total_bytes),
                bytes_text(last.rss_bytes),
                pair_text(last.disk_read_bytes_per_s, last.disk_write_bytes_per_s),
                pair_text(last.net_sent_bytes_per_s, last.net_received_bytes_per_s),
                pair_text(last.fabric_sent_bytes_per_s, last.fabric_received_bytes_per_s),
            ]
        )
    if not rows:
        return ""
    heads = ["node", "CPU", "memory", "of the ranks", "disk read / write, B/s"]
    heads += ["network out / in, B/s", "fabric out / in, B/s"]
    gpus = [gpu_row(name, gpu) for name, gpu in newest_gpus(live)]
    return table(heads, rows) + (table(GPU_HEADS, gpus) if gpus else "")


def _events(live: LiveRun) -> str:
    rows = [
        [datetime.fromtimestamp(e.time).strftime("%Y-%m-%d %H:%M:%S"), tell_event(e)]
        for e in reversed(live.events[-_EVENT_ROWS:])
    ]
    return table(["time", "what happened"], rows, num_text=2) if rows else ""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for `/` and `/live` with the token, and nothing else."""

    server: Server
    server_version, sys_version = "ridgeline", ""
    timeout = 30

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        words = parse_qs(asked.query)
        token, wanted = (words.get(name, [""])[0] for name in ("token", "run"))
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, "The address lacks the token that `ridgeline watch` printed with it.")
            return
        pages = self.server.pages
        make = {"/": pages.page, "/live": pages.content}.get(asked.path)
        try:
            text = make(wanted, self.server.token) if make is not None else None
        except RunError:  # somebody has removed what was watched
            text = None
        if text is None:
            self._answer(404, "There is nothing here.")
        else:
            self._answer(200, text, "text/html")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Content-Security-Policy": _POLICY,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line a request."""


class Server(ThreadingHTTPServer):
    """Bound, not yet serving: `serve_forever` does."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without asking for the host's full name, which a name server can take its time over."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


def open_server(pages: Pages, host: str, port: int | None) -> Server:
    """On that port, or on the first that is free."""
    for candidate in [port] if port is not None else [*PORTS, 0]:
        try:
            return Server(pages, host, candidate)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                continue
            raise UsageError(
                f"cannot serve on {host}:{candidate} ({error}); name an address of this host with --host, "
                "or another port with --serve PORT"
            ) from error
    raise UsageError(
        f"port {port} is in use on this host; name another with --serve PORT, or none for one that is free"
    )


def tell_address(server: Server, node: str, login: str) -> list[str]:
    """What to open, and how to get there from elsewhere. `login` is the host the job came from."""
    host, port = str(server.server_address[0]), server.server_port
    lines = [f"http://localhost:{port}/?token={server.token}"]
    if host.startswith("127."):
        jump = f" -J {login}" if login and login != node else ""
        lines.append(f"from another machine first: ssh{jump} -L {port}:localhost:{port} {node}")
    else:
        at = node if host == "0.0.0.0" else host
        lines.append(f"from another machine first: ssh -L {port}:{at}:{port} {login or 'LOGIN'}")
    return lines
