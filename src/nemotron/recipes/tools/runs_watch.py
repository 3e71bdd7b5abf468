"""A run as a page that follows its records: `nemotron runs watch [RUN]`.

The page is made anew when the records have changed: a browser asks every two seconds with the tag of what it shows. It
has the style and the figures of the report and of `runs plot --html`. The server is the standard library's and
listens on this machine alone.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import contextlib
import hashlib
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.env import output_root
from nemo_runspec.errors import RunspecError, UserError
from nemotron.kit.metrics import format_seconds, numbers_in
from nemotron.kit.run import CONFIG_FILE, METRICS_FILE, PHASES_FILE, PUBLISHED_FILE, STATE_FILE
from nemotron.kit.runs import HEADLINES, RecordedRun, find_run, headline, recorded_runs, time_since
from nemotron.recipes.tools.options import run_tool
from nemotron.recipes.tools.runs_plot import curves_of, drawn
from nemotron.recipes.tools.svg import Series, line_chart

RECORDS = (STATE_FILE, METRICS_FILE, PHASES_FILE, PUBLISHED_FILE)
JOB_FILE = "job.yaml"  # a launcher's, with the command line that the user typed
TAIL = 12  # lines at the end of the log that are shown
SPEED_RECORDS = 20  # of training, over which the time left is estimated


@dataclass(frozen=True)
class Options:
    """Of `nemotron runs watch`. `run`: a run's directory, or None for the one at work."""

    run: str | None
    port: int


def watched(run: str | None) -> RecordedRun:
    """The run of this directory; without one that which began last of those at work, else the newest.

    UserError: it is gone; there is none.
    """
    if run is not None:
        return find_run(run)
    runs = recorded_runs()
    if not runs:
        raise UserError(f"there are no runs in {output_root()}", "nemotron nano3 pipe -c tiny makes some")
    at_work = [each for each in runs if each.condition == "running"]
    return max(at_work, key=lambda each: float(each.state.get("started_at", 0)), default=runs[-1])


def tag_of(run: RecordedRun) -> str:
    """What tells two states of a run's records apart: which run, whether it is at work, its files' sizes and times."""
    text = [run.name, run.condition]
    for path in [*(run.directory / name for name in RECORDS), *_logs(run)]:
        with contextlib.suppress(OSError):
            status = path.stat()
            text.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _logs(run: RecordedRun) -> list[Path]:
    return sorted(run.directory.glob("*.log"), key=lambda path: path.stat().st_mtime)


def seconds_left(run: RecordedRun, records: Sequence[dict[str, Any]]) -> float | None:
    """How long the steps that are left take at the speed of the last ones; None where that is not known.

    Only records of the newest attempt count: before it the run may have lain still.
    The time of a record is when its step had ended. Records of validation, at a step that is there already, count as
    time of the steps around them.
    """
    last = run.state.get("last_step")
    started = run.state.get("started_at", 0)
    recent = [(line["step"], line["time"]) for line in records[-SPEED_RECORDS:] if line["time"] >= started]
    if run.condition != "running" or last is None or not recent or recent[-1][0] <= recent[0][0]:
        return None
    (first_step, first_time), (step, newest_time) = recent[0], recent[-1]
    return float(last - step) * (newest_time - first_time) / (step - first_step)


def figures(records: Sequence[dict[str, Any]]) -> tuple[list[Markup], list[Markup]]:
    """The charts of losses and rewards, the headline first, and those of everything else.

    Parts share a chart: `valid_loss.web` and `valid_loss.code`, `reward_math` and the rewards of other environments.
    """
    charts: dict[str, list[Series]] = {}
    for name, points in curves_of(records).items():
        chart, _, part = name.partition(".")
        if name.startswith("reward_"):
            chart, part = "reward_*", name.removeprefix("reward_")
        charts.setdefault(chart, []).extend(drawn(part or name, points))
    main: list[Markup] = []
    others: list[Markup] = []
    for chart, lines in sorted(charts.items(), key=lambda item: item[0] not in HEADLINES):
        place = main if any(word in chart for word in HEADLINES) else others
        place.append(line_chart(chart, "step", "", lines))
    return [figure for figure in main if figure], [figure for figure in others if figure]


def log_tail(run: RecordedRun, records: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Name and last lines of the newest `*.log` in the run's directory, or else of its metrics."""
    if logs := _logs(run):
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()
        return logs[-1].name, lines[-TAIL:]
    shown = []
    for line in records[-TAIL:]:
        values = numbers_in(line)
        clock = time.strftime("%H:%M:%S", time.localtime(values.pop("time", 0)))
        step = f"{values.pop('step'):.0f}"
        shown.append(f"{clock}  step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
    return METRICS_FILE, shown


def _facts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    state = run.state
    yield "folder", str(run.directory)
    if argv := _read_yaml(run.directory / JOB_FILE).get("argv"):  # of a launched script
        yield "command", shlex.join([Path(argv[0]).name, *argv[1:]])
    if config := (_read_yaml(run.directory / CONFIG_FILE).get("run") or {}).get("config"):
        yield "config", str(config)
    if "last_step" in state:
        yield "steps", str(state["last_step"])
    yield from (("reads", f"{role} = {pinned.partition('@')[0]}") for role, pinned in state.get("inputs", {}).items())
    yield from (("published", version) for version in run.published())
    yield from (("phase", f"{name} {format_seconds(seconds)}") for name, seconds in run.seconds_by_phase().items())
    yield from (("checkpoint", path.name) for path in sorted(run.directory.glob("checkpoints/step-*")))


def _read_yaml(path: Path) -> dict[str, Any]:
    """A file that a run has left, or nothing where it has not, or not yet."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), str(path))[0] or {}
    except OSError:
        return {}


def render(**values: Any) -> str:
    """The page, of a run or of a problem."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("watch.html.jinja").render(values)


def page_of(run: RecordedRun, tag: str) -> str:
    """The page of a run as its records are now.

    UserError: a line of its metrics is no record.
    """
    records = run.metrics()
    values: dict[str, float] = {}
    for line in records:
        values |= numbers_in(line)
    name, left = headline(values), seconds_left(run, records)
    main, others = figures(records)
    return render(
        problem=None,
        tag=tag,
        name=run.name,
        condition=run.condition,
        why=run.state.get("why") if run.condition in ("failed", "stopped") else None,
        attempts=int(run.state.get("attempts", 1)),
        started=run.state.get("started_at"),
        logged=values.get("time"),
        step=values.get("step"),
        last_step=run.state.get("last_step"),
        left=None if left is None else format_seconds(left),
        headline=(name, f"{values[name]:.4g}") if name else None,
        figures=main,
        others=others,
        log=log_tail(run, records),
        facts=list(_facts(run)),
        ago=time_since,
    )


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        """The page, or 304 where the browser shows it already."""
        # A page of another site may not read this one under a name of its own.
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost") or self.path != "/":
            self.send_error(404)
            return
        status, tag, page = self.server.page(self.headers.get("If-None-Match", "").strip('"'))
        self.send_response(status)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Nothing: a browser asks every two seconds."""


class WatchServer(ThreadingHTTPServer):
    """The page of `run`, a directory, or of the run at work, at http://127.0.0.1:PORT/."""

    daemon_threads = True

    def __init__(self, run: str | None, port: int = 0) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._made = ("", b"")  # tag and page of the newest state that somebody asked for
        super().__init__(("127.0.0.1", port), _Handler)

    def page(self, known: str) -> tuple[int, str, bytes]:
        """Status, tag and content for somebody who has the page of the tag `known`: nothing where it is the newest."""
        try:
            run = watched(self.run)
            tag = tag_of(run)
            if tag == known:
                return 304, tag, b""
            with self._lock:
                if self._made[0] != tag:
                    self._made = tag, page_of(run, tag).encode()
                return 200, *self._made
        except RunspecError as error:  # the run was removed, or a record is damaged: perhaps not for long
            return 200, "", render(problem=error.message, tag="", name="no run").encode()


def main(options: Options) -> None:
    """Serve until interrupted."""
    watched(options.run)
    try:
        server = WatchServer(options.run, options.port)
    except OSError as failure:
        message = f"cannot listen on port {options.port} of this machine: {failure.strerror}"
        raise UserError(message, "--port 0 takes any that is free") from failure
    with server:
        what = options.run or "the run at work"
        print(f"{what} at http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", file=sys.stderr, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
