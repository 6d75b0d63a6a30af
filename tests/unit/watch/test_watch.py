"""`ridgeline watch` as a command: on a real run, in a terminal, and as a page in a browser."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ridgeline import rundir
from ridgeline.errors import UsageError
from ridgeline.launch.env import submit_host
from ridgeline.report.build import build_report
from ridgeline.report.live import Watched
from ridgeline.report.served import Pages, Server, open_server, tell_address
from ridgeline.rundir import GpuUse, ResourceRecord, RunDir, StepRecord

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
NO_TORCH = """
import sys
class _NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, _NoTorch())
"""


def ridgeline(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", *words],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env={**ENVIRONMENT, **changes},
    )


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo, on two processes; for every test here."""
    path = tmp_path_factory.mktemp("runs") / "digits-real"
    done = ridgeline(
        "train", "digits", "-n", "2", "device=cpu", "train.steps=80", "train.target={}",
        "train.eval_every=40", "log.resources_s=0.1", "log.tensorboard=no", "--run", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def going(tmp_path: Path) -> RunDir:
    """One that goes on, by its records."""
    run = RunDir(tmp_path / "runs" / "going")
    run.path.mkdir(parents=True)
    run.write_text(rundir.CONFIG, "")
    run.add_event("start", num_ranks=1, num_steps=10)
    run.append(StepRecord(1, 0, time.time(), 2.5, 1e-3, 8, 0.1))
    return run


# Text.


def test_a_real_run_once(real_run: Path) -> None:
    done = ridgeline("watch", str(real_run), "--once")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "digits-real  finished  cifar_cnn  2 x" in text
    assert "finished after 80 steps" in text
    assert "step 80 of 80 (100%)" in text
    assert re.search(r"last evaluation +loss 0\.\d+  accuracy 0\.\d+  \(step 80\)", text)
    assert re.search(r"[\d,.]+ samples/s", text)
    assert re.search(rf"{re.escape(socket.gethostname())} +\S+ \d+ % of \d+", text)
    assert "started on 2 ranks" in text
    assert "\x1b" not in text


def test_both_ranks_of_the_node_are_in_its_memory(real_run: Path) -> None:
    (records,) = RunDir(real_run).resources().values()
    one = max(r.peak_memory_bytes or 0 for r in RunDir(real_run).ranks())
    assert max(r.rss_bytes or 0 for r in records) > 1.5 * one
    assert any((r.cpu_percent or 0) > 20 for r in records)


def test_text_where_there_is_no_terminal_and_no_torch(real_run: Path) -> None:
    code = f"{NO_TORCH}\nsys.argv = ['ridgeline', 'watch', {str(real_run)!r}]\n"
    code += "from ridgeline.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert "step 80 of 80" in done.stdout


def test_a_log_in_ascii_gets_what_it_can_take(real_run: Path) -> None:
    done = ridgeline("watch", str(real_run), PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "step 80 of 80" in done.stdout


def test_a_folder_with_several_runs(going: RunDir, real_run: Path) -> None:
    done = ridgeline("watch", str(going.path.parent), str(real_run))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^going +running +1 of 10 +2\.5", done.stdout, re.MULTILINE)
    assert re.search(r"^digits-real +finished +80 of 80", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no run directory at nowhere"),
        ([".", "--once", "--stay"], "leave one out"),
        ([".", "--once", "--serve"], "leave one out"),
        ([".", "--stay", "--serve"], "leave --stay out"),
        ([".", "--host", "0.0.0.0"], "--host 0.0.0.0 is for --serve"),
        ([".", "--serve", "70000"], "from 1 to 65535"),
    ],
)
def test_slips_are_one_sentence(words: list[str], said: str) -> None:
    done = ridgeline("watch", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# The terminal.


class Terminal:
    """The command with a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._read, write = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", "watch", *words],
            stdin=write,
            stdout=write,
            stderr=write,
            env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
        )
        os.close(write)
        self.text = ""

    def until(self, words: str, seconds: float = 30.0) -> bool:
        """Whether it shows that, before it ends and in time."""
        end = time.monotonic() + seconds
        while words not in self.text and time.monotonic() < end:
            if not self._take():
                break
        return words in self.text

    def _take(self) -> bool:
        if not select.select([self._read], [], [], 0.2)[0]:
            return True
        try:
            taken = os.read(self._read, 65536)
        except OSError:  # it has ended
            return False
        self.text += taken.decode(errors="replace")
        return bool(taken)

    def end(self) -> int:
        while self._take():
            if self.process.poll() is not None and not select.select([self._read], [], [], 0.2)[0]:
                break
        os.close(self._read)
        return self.process.wait(30)


def test_it_goes_on_until_the_run_has_ended_and_says_how(going: RunDir) -> None:
    terminal = Terminal(str(going.path), "--every", "0.2")
    assert terminal.until("step 1 of 10")
    going.append(StepRecord(7, 0, time.time(), 1.5, 1e-3, 8, 0.1))
    assert terminal.until("step 7 of 10")
    assert terminal.process.poll() is None
    going.add_event("failed", message="rank 0: no more")
    assert terminal.end() == 0
    left = terminal.text.rpartition("\x1b[?1049l")[2]  # after the other screen
    assert "failed: rank 0: no more" in left


def test_with_stay_it_goes_on_and_ctrl_c_is_an_end_like_any_other(real_run: Path) -> None:
    terminal = Terminal(str(real_run), "--every", "0.2", "--stay")
    assert terminal.until("finished after 80 steps")
    time.sleep(0.6)
    assert terminal.process.poll() is None
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert "\x1b[?25h" in terminal.text  # the cursor is back


# The page.


@pytest.fixture
def served(real_run: Path) -> Iterator[Server]:
    server = open_server(Pages(Watched([real_run]), 0.2), "127.0.0.1", None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def fetch(server: Server, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    url = f"http://127.0.0.1:{server.server_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20) as got:
            return got.status, got.read().decode(), dict(got.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


class _Tags(HTMLParser):
    """Every tag that is opened is closed, in order; and what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "srcset", "data")]
        self.fetched += [tag] if tag in ("link", "img", "iframe") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_it_all_in_one_piece(served: Server) -> None:
    status, text, headers = fetch(served, f"/?token={served.token}")
    assert status == 200
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.fetched == []
    assert "@import" not in text
    for words in ("step 80 of 80", "CPU busy, %", "memory, GiB", "samples per second",
                  "eval accuracy", "finished after 80 steps", socket.gethostname()):  # fmt: skip
        assert words in text, words
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "No answer from `ridgeline watch`" in text  # what the page says when it is alone


# A page without a browser around it: what it fetches, and what it then shows.
BROWSER = """
function part(){return {hidden:true,textContent:'',innerHTML:'',style:{},appendChild(){},
querySelector(){return part()},querySelectorAll(){return []},addEventListener(){},setAttribute(){}}}
var parts={live:part(),gone:part()},answers=[],window=globalThis,location={search:'?token=tok'};
var document={body:part(),getElementById:function(id){return parts[id]},createElement:part,
querySelectorAll:function(){return []}};
var turns=[['new',200],[null,0],['x',403],['back',200]];
globalThis.fetch=function(url){
if(answers.length)answers[answers.length-1].push(parts.live.innerHTML,parts.gone.hidden);
if(!turns.length){console.log(JSON.stringify(answers));process.exit(0)}
var turn=turns.shift();answers.push([url]);if(turn[0]===null)return Promise.reject(new Error('gone'));
return Promise.resolve({ok:turn[1]===200,status:turn[1],text:function(){return Promise.resolve(turn[0])}})};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_lives_through_the_end_of_its_server(going: RunDir, tmp_path: Path) -> None:
    text = Pages(Watched([going.path]), 0.02).page("", "tok") or ""
    script = tmp_path / "page.js"
    script.write_text(BROWSER + "\n".join(re.findall(r"<script>(.*?)</script>", text, re.DOTALL)))
    done = subprocess.run(["node", str(script)], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    live = "/live?token=tok"
    assert json.loads(done.stdout) == [
        [live, "new", True], [live, "new", False], [live, "new", False], [live, "back", True]
    ]  # fmt: skip


def test_nothing_is_answered_without_the_token(served: Server) -> None:
    wrong = "x" * len(served.token)
    for path in ("/", "/live", "/?token=", f"/live?token={wrong}", "/?token=%C3%BC", "/none"):
        status, text, _ = fetch(served, path)
        assert status == 403, path
        assert "digits" not in text
        assert served.token not in text


def test_only_the_page_and_its_content_are_served(served: Server, real_run: Path) -> None:
    for path in (rundir.CONFIG, "../digits-real/config.yaml", "etc/passwd", str(real_run)):
        assert fetch(served, f"/{path}?token={served.token}")[0] == 404
    for run in ("/etc", str(real_run.parent), f"{real_run}/logs"):
        assert fetch(served, f"/live?token={served.token}&run={run}")[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert fetch(served, f"/?token={served.token}", method)[0] == 501


def test_the_content_follows_the_run(going: RunDir) -> None:
    pages = Pages(Watched([going.path]), 0.0)
    assert "step 1 of 10" in (pages.content("", "t") or "")
    going.append(StepRecord(2, 0, time.time(), 1.5, 1e-3, 8, 0.1))
    going.append_resources(
        ResourceRecord(time.time(), "n<1>", 8, gpus=(GpuUse(0, 88.0, watts=301.0),))
    )
    text = pages.content("", "t") or ""
    assert "step 2 of 10" in text
    assert "GPU busy, %" in text
    assert "GPU power, W" in text
    assert "301 W" in text
    assert "n&lt;1&gt;" in text
    assert "n<1>" not in text


def test_several_runs_are_a_table_with_a_page_each(going: RunDir, real_run: Path) -> None:
    pages = Pages(Watched([going.path.parent, real_run]), 0.0)
    text = pages.page("", "t0ken") or ""
    links = re.findall(r'href="([^"]+)"', text)
    assert len(links) == 2
    assert all("token=t0ken&amp;run=" in link for link in links)
    assert "step 80 of 80" in (pages.content(str(real_run), "t0ken") or "")


def test_the_command_serves_until_ctrl_c(real_run: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", "watch", str(real_run), "--serve", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**ENVIRONMENT, "SLURM_SUBMIT_HOST": "login3"},
    )
    assert process.stdout is not None
    try:
        address, tunnel = process.stdout.readline().strip(), process.stdout.readline()
        assert re.fullmatch(rf"http://localhost:{port}/\?token=[\w-]{{32}}", address)
        host = socket.gethostname()
        assert f"ssh -J login3 -L {port}:localhost:{port} {host}" in tunnel
        with urllib.request.urlopen(address, timeout=20) as got:
            assert "step 80 of 80" in got.read().decode()
        taken = ridgeline("watch", str(real_run), "--serve", str(port))
        assert taken.returncode == 2
        assert f"port {port} is in use" in taken.stderr
        assert "--serve PORT" in taken.stderr
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


def test_the_way_there_from_elsewhere(going: RunDir) -> None:
    pages = Pages(Watched([going.path]), 1.0)
    with open_server(pages, "127.0.0.1", None) as local:
        port = local.server_port
        assert tell_address(local, "login1", "")[1].endswith(
            f"ssh -L {port}:localhost:{port} login1"
        )
    with open_server(pages, "0.0.0.0", None) as wide:
        port = wide.server_port
        assert tell_address(wide, "nid7", "login1")[1].endswith(f"ssh -L {port}:nid7:{port} login1")
        assert tell_address(wide, "nid7", "")[1].endswith(f"ssh -L {port}:nid7:{port} LOGIN")
    assert submit_host({"PBS_O_HOST": "login2"}) == "login2"
    assert submit_host({}) == ""


def test_an_address_that_is_not_this_hosts_is_one_sentence(going: RunDir) -> None:
    with pytest.raises(UsageError, match=r"cannot serve on 192\.0\.2\.1:\d+ .* --host"):
        open_server(Pages(Watched([going.path]), 1.0), "192.0.2.1", None)


def test_two_servers_have_two_ports_and_two_tokens(going: RunDir) -> None:
    pages = Pages(Watched([going.path]), 1.0)
    with open_server(pages, "127.0.0.1", None) as one, open_server(pages, "127.0.0.1", None) as two:
        assert one.server_port != two.server_port
        assert one.token != two.token
        assert one.server_address[0] == "127.0.0.1"


# The report.


def test_the_report_has_the_nodes_of_a_real_run(real_run: Path) -> None:
    text = (real_run / rundir.REPORT).read_text()
    section = text.partition("<h2>Resources</h2>")[2].partition("</section>")[0]
    assert "CPU busy, %" in section
    assert "memory, GiB" in section
    assert "GPU" not in section.partition("<table>")[0]
    assert socket.gethostname() in section


def test_the_report_has_no_resources_where_none_were_recorded(going: RunDir) -> None:
    assert "<h2>Resources</h2>" not in build_report(going).read_text()


@pytest.mark.parametrize(("num_hosts", "num_gpus"), [(1, 2), (4, 4)])
def test_the_report_has_each_gpu_or_their_range(
    going: RunDir, num_hosts: int, num_gpus: int
) -> None:
    for number in range(20):
        for host in range(num_hosts):
            gpus = tuple(
                GpuUse(index, 50.0 + index, 2**30, 2**33, 300.0 + 10 * host)
                for index in range(num_gpus)
            )
            record = ResourceRecord(1000.0 + 5 * number + host, f"n{host}", 8, 10.0 * (host + 1),
                                    net_sent_bytes_per_s=1e6, gpus=gpus)  # fmt: skip
            going.append_resources(record)
    text = build_report(going).read_text()
    if num_hosts == 1:
        assert 'data-n="gpu 0"' in text
        assert 'data-n="gpu 1"' in text
    else:
        assert "GPU busy, %, of 16 GPUs" in text
        values = {
            name: re.search(rf'data-n="{name}" data-v="([^"]*)"', text.partition("GPU power")[2])
            for name in ("mean", "lowest", "highest")
        }
        shown = {n: {v.split(":")[1] for v in m[1].split()} for n, m in values.items() if m}
        assert shown == {"mean": {"315"}, "lowest": {"300"}, "highest": {"330"}}
        assert "CPU busy, %, mean of 4 nodes" in text
        sent = re.search(r'data-n="sent" data-v="([^"]*)"', text)
        assert sent is not None
        assert {v.split(":")[1] for v in sent[1].split()} == {"4"}  # MB/s of four nodes
