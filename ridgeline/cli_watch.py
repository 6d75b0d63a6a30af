"""`ridgeline watch`: runs as they go on, in the terminal or as a page. Added to the app by `cli.py`.

Reads run directories and nothing of a live trainer, so it works on any node that sees the file system, and
needs no torch.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli_shared import ended_in_order
from ridgeline.errors import UsageError, say

if TYPE_CHECKING:
    from ridgeline.report.live import LiveRun, Watched

RUNS = Path("runs")
"""Where `ridgeline train` makes runs when nothing else is said."""


def watch(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN|FOLDER]...", help="Run directories; default: those in runs."),
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as text; so where there is no terminal.")
    ] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Go on when all runs have ended, until Ctrl-C.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="A page for the browser; a number after it is the port (else a free one).",
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="With --serve: the address to serve on; default: 127.0.0.1, this host."),
    ] = None,
) -> None:
    """Watch runs as they go on: progress, loss, speed, and what their nodes do."""
    from ridgeline.report.live import Watched

    words, port = _split_port(places or [], serve)
    _refuse(once, stay, serve, host)
    if not words and not RUNS.is_dir():
        raise UsageError(
            f"there is no folder {RUNS} here; name a run directory, or a folder of them"
        )
    watched = Watched([Path(word) for word in words] or [RUNS])
    with suppress(KeyboardInterrupt), ended_in_order():
        if serve:
            _serve(watched, every, host or "127.0.0.1", port)
        elif once or not sys.stdout.isatty():
            _print_once(watched.refresh())
        else:
            _follow(watched, every, stay)


def _split_port(words: list[str], serve: bool) -> tuple[list[str], int | None]:
    """A plain number beside --serve is its port, where no run is called so."""
    numbers = [word for word in words if word.isdecimal() and not Path(word).exists()]
    if not serve or not numbers:
        return words, None
    if len(numbers) > 1 or not 0 < int(numbers[0]) < 65536:
        raise UsageError(
            f"--serve takes one port from 1 to 65535, and was given {' '.join(numbers)}"
        )
    return [word for word in words if word not in numbers], int(numbers[0])


def _refuse(once: bool, stay: bool, serve: bool, host: str | None) -> None:
    """Options that say opposite things."""
    if once and (stay or serve):
        raise UsageError(
            f"--once ends at once, and --{'stay' if stay else 'serve'} does not; leave one out"
        )
    if stay and serve:
        raise UsageError("--serve goes on until Ctrl-C by itself; leave --stay out")
    if host is not None and not serve:
        raise UsageError(f"--host {host} is for --serve; add that, or leave it out")


def _print_once(runs: list[LiveRun]) -> None:
    from ridgeline.report.terminal import as_text

    if hasattr(sys.stdout, "reconfigure"):  # bars and sparklines, into whatever a log is written in
        sys.stdout.reconfigure(errors="replace")
    say(as_text(runs).rstrip("\n"))


def _follow(watched: Watched, every: float, stay: bool) -> None:
    """On the terminal's other screen, until all runs have ended; then what is left of it to keep."""
    from rich.console import Console
    from rich.live import Live

    from ridgeline.report.terminal import draw

    console, runs = Console(), watched.refresh()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(
                    draw(runs, None, max(1, console.height - 4), console.width), refresh=True
                )
                if not stay and all(live.state().has_ended for live in runs):
                    break
                time.sleep(every)
                runs = watched.refresh()
    finally:
        console.print(draw(runs, width=console.width))
        ended = [live for live in runs if live.state().has_ended]
        if len(runs) > 1 and len(ended) == len(runs):
            for live in ended:
                console.print(f"{live.name}: {live.state().sentence}", highlight=False)


def _serve(watched: Watched, every: float, host: str, port: int | None) -> None:
    from ridgeline.launch.env import submit_host
    from ridgeline.report.served import Pages, open_server, tell_address

    server = open_server(Pages(watched, every), host, port)
    with server:
        for line in tell_address(server, socket.gethostname(), submit_host()):
            say(line)
        say("Ctrl-C ends it; the runs do not notice")
        server.serve_forever(poll_interval=0.2)
