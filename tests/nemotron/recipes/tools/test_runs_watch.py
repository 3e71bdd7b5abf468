"""`nemotron runs watch`: the page is that of the run at work, and is made anew when its records have changed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.recipes.tools.runs_watch import Options, WatchServer, main, seconds_left, watched

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    return tmp_path / "output"


def recorded(folder: Path, steps: int, **state: Any) -> Path:
    """A run with a record a step, ten seconds apart."""
    folder.mkdir(parents=True)
    state = {"state": "running", "started_at": 1000.0, "last_step": 60, "attempts": 1} | state
    (folder / "run.json").write_text(json.dumps(state))
    for step in range(1, steps + 1):
        log(folder, step=step, time=1000.0 + 10 * step, loss=7.0 - step)
    return folder


def log(folder: Path, **record: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of runs that a process is said to work on; a process's own locks do not show it its own."""
    names = set[str]()
    monkeypatch.setattr("nemotron.kit.runs.is_locked", lambda folder: folder.name in names)
    return names


@contextmanager
def serving(run: Path | None) -> Iterator[str]:
    with WatchServer(None if run is None else str(run)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, tag, page."""
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers["ETag"], answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.headers.get("ETag", ""), ""


def test_the_page_follows_the_records(output: Path, at_work: set[str]) -> None:
    run = recorded(output / "toy/train/tiny-01", 3)
    at_work.add("tiny-01")
    with serving(run) as url:
        status, tag, page = get(url)
        assert status == 200 and "<h1>toy/train/tiny-01</h1>" in page
        assert re.search(r"<b>3</b>\s*<span class=\"note\">of 60, 5 %", page)
        assert "<b>4</b>" in page and "<b>9:30</b>" in page  # 57 steps of ten seconds
        assert page.count("<figcaption>loss<") == 1
        assert get(url, If_None_Match=tag) == (304, tag, "")
        log(run, step=4, time=1040.0, loss=2.5, valid_loss={"web": 3.0, "code": 2.0}, grad_norm=1.0)
        status, later, page = get(url, If_None_Match=tag)
        assert status == 200 and later != tag and "<b>2.5</b>" in page
        assert page.count("<figcaption>valid_loss<") == 1 and "web</span>" in page and "1 more metrics" in page
        assert "step 4  loss 2.5  valid_loss.web 3" in page
        log(run, step=5, time=1050.0, reward=0.5, reward_math=0.25, reward_code=0.75)
        _, later, page = get(url)
        assert re.findall(r"<figcaption>(reward[^<]*)<", page) == ["reward", "reward_*"] and "math</span>" in page
        at_work.clear()  # killed: no file has changed
        (run / "launch.log").write_text("first line\n<oops>\n")
        status, _, page = get(url, If_None_Match=later)
        assert status == 200 and ">killed</span>" in page and "time left" not in page
        assert "End of launch.log" in page and "&lt;oops&gt;" in page
        (run / "metrics.jsonl").write_text("nonsense\n")
        assert "metrics.jsonl:1: not a JSON object" in get(url)[2]
        shutil.rmtree(run)
        assert "No run to show" in get(url)[2]


def test_before_the_first_metrics_the_page_says_what_is_known(output: Path, at_work: set[str]) -> None:
    run = recorded(output / "toy/train/tiny-01", 0, inputs={"data": f"toy-data:3@{'0' * 64}"})
    (run / "config.yaml").write_text("run: {config: tiny-phase1, model: null}\n")
    (run / "job.yaml").write_text("argv: [/a/b/nemotron, toy, train, -c, tiny-phase1, 'x=[1, 2]']\n")
    at_work.add("tiny-01")
    with serving(run) as url:
        page = get(url)[2]
        assert re.search(r"No metrics yet; 60 steps are to be done\.", page) and ">running</span>" in page
        assert '<time data-at="1000.0">' in page
        facts = dict(re.findall(r"<tr><td>(\w+)</td><td>(.*?)</td></tr>", page))
        assert facts["command"] == "nemotron toy train -c tiny-phase1 &#39;x=[1, 2]&#39;"
        assert (facts["config"], facts["steps"], facts["reads"]) == ("tiny-phase1", "60", "data = toy-data:3")
        log(run, step=10, time=1010.0, loss=7.0)
        assert "No metrics" not in get(url)[2]
    # Data preparation logs none, and of a script that was started by hand nobody wrote the command down.
    by_hand = recorded(output / "toy/data/tiny-02", 0, state="finished")
    with serving(by_hand) as url:
        assert "No metrics were logged; 60" in get(url)[2] and "<td>command</td>" not in get(url)[2]


def test_the_pause_of_a_resumed_run_is_no_time_of_its_steps(output: Path, at_work: set[str]) -> None:
    run = recorded(output / "toy/train/tiny-01", 3, started_at=90_000.0, attempts=2)
    at_work.add("tiny-01")
    assert seconds_left(watched(str(run)), watched(str(run)).metrics()) is None
    log(run, step=4, time=90_020.0, loss=3.0)
    log(run, step=5, time=90_030.0, loss=2.0)
    assert seconds_left(watched(str(run)), watched(str(run)).metrics()) == 550  # 55 steps of ten seconds


def test_nobody_else_reads_it(output: Path) -> None:
    recorded(output / "toy/train/tiny-01", 1)
    with serving(None) as url:
        assert get(url, Host="another.site")[0] == get(f"{url}run.json")[0] == 404
        assert get(url, Host=f"localhost:{url.rpartition(':')[2][:-1]}")[0] == 200


def test_without_a_name_it_is_the_run_at_work(output: Path, at_work: set[str]) -> None:
    with pytest.raises(UserError, match="there are no runs in"):
        watched(None)
    recorded(output / "toy/train/one", 1, state="finished")
    recorded(output / "toy/train/two", 1, started_at=1500.0)
    recorded(output / "toy/train/three", 1, started_at=1400.0)
    assert watched(None).directory.name == "three"  # none is: the newest
    at_work |= {"two", "three"}
    assert watched(None).directory.name == "two"
    at_work.remove("two")
    assert watched(None).directory.name == "three"


def test_the_time_left_is_known_from_two_steps_on(output: Path, at_work: set[str]) -> None:
    run = recorded(output / "toy/train/tiny", 0)
    at_work.add("tiny")
    records = [{"step": step, "time": 1000.0 + 3 * step} for step in range(1, 41)]
    assert seconds_left(watched(str(run)), []) is seconds_left(watched(str(run)), records[:1]) is None
    assert seconds_left(watched(str(run)), records) == 3.0 * 20
    assert seconds_left(watched(str(run)), [records[0], {**records[0], "time": 1200.0}]) is None
    assert (
        seconds_left(
            watched(str(run)), [{"step": 0, "time": 1000.0}, *({**r, "time": 1900.0 + r["step"]} for r in records)]
        )
        == 20
    )
    at_work.clear()
    assert seconds_left(watched(str(run)), records) is None


def test_a_port_that_is_taken(output: Path) -> None:
    recorded(output / "toy/train/tiny", 1)
    with serving(None) as url, pytest.raises(UserError, match="cannot listen on port"):
        main(Options(None, int(url.rpartition(":")[2][:-1])))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_what_comes_later(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page in a browser changes itself; when nobody answers any more, it says so and stays."""
    run = recorded(output / "toy/train/tiny", 1)
    answered = list[int]()
    page = WatchServer.page

    def one_step_later(server: WatchServer, known: str) -> tuple[int, str, bytes]:
        answered.append(1)
        if len(answered) > 3:
            raise ConnectionError
        log(run, step=10 * len(answered), time=1000.0, loss=float(len(answered)))
        return page(server, known)

    monkeypatch.setattr(WatchServer, "page", one_step_later)
    monkeypatch.setattr(WatchServer, "handle_error", lambda *_: None)
    with serving(run) as url:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom", url]
        shown = subprocess.run([str(CHROMIUM), *words], capture_output=True, text=True, check=True).stdout
    assert len(answered) > 3 and "<b>30</b>" in shown
    assert '<body class="gone">' in shown
