"""Ray without Ray: what would be submitted, what is refused, what a Ctrl-C asks. The real thing: tests/cluster."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import WSServerHandshakeError

from nemo_runspec.errors import DONE, FAILED, INTERRUPTED, PREEMPTED, UserError
from nemo_runspec.execution import interrupts
from nemo_runspec.execution.interrupts import CancelQuestion, noted_signals
from nemo_runspec.execution.place import Place
from nemo_runspec.execution.ray import following
from nemo_runspec.execution.ray import jobs as ray
from nemo_runspec.execution.ray.allocation import run_in_allocation
from nemo_runspec.installation import install_line
from nemo_runspec.profile import Env, parse_env
from nemo_runspec.runspec import parse

GOLDEN = Path(__file__).parents[1] / "golden"
ENV = Env("far", "ray", ray="http://head:8265", output="/shared/output")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "project/src").mkdir(parents=True)
    (folder / "project/src/a.py").write_text("x = 1\n")
    (folder / "launch.sh").write_text("#!/usr/bin/env bash\nexec true\n")
    return folder


def script(folder: Path, launch: str) -> Path:
    path = folder / "train.py"
    lines = [
        "/// script",
        "[tool.runspec]",
        'schema = "1"',
        'name = "a/b"',
        "[tool.runspec.run]",
        f'launch = "{launch}"',
        "///",
    ]
    path.write_text("".join(f"# {line}\n" for line in lines))
    return path


def test_torchrun_is_refused_and_the_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.toml").write_text('[far]\nexecutor = "ray"\naddress = "http://head:8265"\n')
    for launch in ("ray", "direct"):
        assert parse_env("far", spec=parse(script(tmp_path, launch))).ray is not None
    with pytest.raises(UserError, match=r'a/b: launch = "torchrun" does not run on a Ray cluster, .* profile far is'):
        parse_env("far", spec=parse(script(tmp_path, "torchrun")))


def test_what_everybody_sees_holds_no_secret(bundle: Path) -> None:
    variables = {"HF_TOKEN": "canary", "AWS_SECRET_ACCESS_KEY": "canary", "HF_HOME": "/cache", "NUM_TOKENS": "5"}
    runtime_env = ray.ray_runtime_env(ENV, "a-b-1", bundle, ["project/src", "runspec"], variables)
    assert runtime_env == {
        "working_dir": str(bundle),
        "env_vars": {
            "HF_HOME": "/cache",
            "NUM_TOKENS": "5",
            "PYTHONPATH": "project/src:runspec",
            "RUNSPEC_JOB_DIR": "/shared/output/jobs/a-b-1",
        },
    }
    assert "canary" not in ray.submission_text(ENV, "a-b-1", runtime_env)


def test_the_golden_file(bundle: Path) -> None:
    variables = {"RUNSPEC_OUTPUT_ROOT": "/shared/output", "NOTE": "it's $HOME", "WANDB_API_KEY": "canary"}
    runtime_env = ray.ray_runtime_env(ENV, "nano3-sft-3f9c2a", bundle, ["project/src", "runspec"], variables)
    text = ray.submission_text(ENV, "nano3-sft-3f9c2a", runtime_env).replace(str(bundle), "<bundle>")
    assert text + "\n" == (GOLDEN / "ray.txt").read_text(encoding="utf-8")


def test_showing_a_submission_imports_no_ray() -> None:
    code = (
        "import sys; from nemo_runspec.execution.ray import jobs\n"
        "assert not {name for name in sys.modules if name == 'ray' or name.startswith('ray.')}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_say_what_they_are_and_differ() -> None:
    ids = {ray.new_job_id("nano3/data/prep/sft") for _ in range(50)}
    assert len(ids) == 50 and all(name.startswith("nano3-data-prep-sft-") for name in ids)


def test_what_batch_prints() -> None:
    assert ray.how_to_follow(ray.RayJob("a-b-1", "http://head:8265")).splitlines() == [
        "job a-b-1",
        "  follow   ray job logs --address http://head:8265 a-b-1 --follow",
        "  inspect  ray job status --address http://head:8265 a-b-1",
        "  cancel   ray job stop --address http://head:8265 a-b-1",
    ]


def test_a_password_in_the_address_is_not_printed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_installed", lambda: True)
    job = ray.RayJob("a-b-1", "http://me:canary@127.0.0.1:1")
    assert "http://***@127.0.0.1:1" in ray.how_to_follow(job) and "canary" not in ray.how_to_follow(job)
    env = replace(ENV, ray=job.address)
    assert "canary" not in ray.submission_text(env, "a-b-1", ray.ray_runtime_env(env, "a-b-1", bundle, [], {}))
    with pytest.raises(ConnectionError, match=r"^nothing answers at http://\*\*\*@127\.0\.0\.1:1: "):
        ray.connect(job.address)


def test_ray_that_is_not_installed_is_two_lines(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="profile far: executor ray needs Ray, which is not installed") as caught:
        ray.hand_over(ENV, "a-b-1", {"working_dir": str(bundle)})
    assert caught.value.hint == install_line("ray")
    monkeypatch.setenv("MASTER_ADDR", "x")
    with pytest.raises(UserError, match='launch = "ray" on 2 nodes needs Ray, which is not installed here'):
        run_in_allocation(["true"], {}, None, Place(1, 2))


@pytest.mark.parametrize(("variables", "nodes"), [({}, 1), ({"RAY_ADDRESS": "head:6379"}, 2)])
def test_no_ray_is_started_on_one_node_or_where_there_is_one(
    tmp_path: Path, variables: dict[str, str], nodes: int
) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, sys; open('seen', 'w').write(os.environ.get('RAY_ADDRESS', '')); sys.exit(2)",
    ]
    assert run_in_allocation(command, variables, tmp_path, Place(0, nodes)) == 2
    assert (tmp_path / "seen").read_text() == variables.get("RAY_ADDRESS", "")
    if variables:
        assert run_in_allocation(["false"], variables, tmp_path, Place(1, nodes)) == DONE


def test_without_the_address_of_the_first_node_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="2 nodes, but MASTER_ADDR, the address of the first one, is not set"):
        run_in_allocation(["true"], {}, None, Place(0, 2))


# --- Following, with a stand-in for Ray's client ----------------------------------------------------------------------


class Status(StrEnum):
    """Ray's JobStatus."""

    RUNNING, SUCCEEDED, FAILED, STOPPED = "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"

    def is_terminal(self) -> bool:
        return self is not Status.RUNNING


@dataclass
class Details:
    status: Status
    driver_exit_code: int | None = None
    message: str = ""


RUNNING = Details(Status.RUNNING)


class Client:
    """A cluster whose answers about the job are `answers`, the last one for ever; an error among them is raised.

    With `cancelled`, two Ctrl-C come with its second answer. `stop` is the error that it answers a cancellation with,
    `tail` the one that its log does.
    """

    def __init__(
        self,
        *answers: Details | Exception,
        stop: Exception | None = None,
        cancelled: bool = False,
        tail: Exception | None = None,
    ) -> None:
        self.answers, self.stop, self.cancelled, self.tail = list(answers), stop, cancelled, tail
        self.looks = 0

    def get_job_info(self, job: str) -> Details:
        self.looks += 1
        if self.looks == 2 and self.cancelled:
            for _ in range(2):  # without a terminal the second one cancels
                os.kill(os.getpid(), signal.SIGINT)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_job_logs(self, job: str) -> str:
        return "begun\n"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        if self.tail is not None:
            raise self.tail
        yield "begun\n"

    def stop_job(self, job: str) -> bool:
        if self.stop is not None:
            raise self.stop
        return True


REFUSED = ConnectionError("nothing answers at http://head:8265: Connection refused")
JOB = ray.RayJob("a-b-1", "http://head:8265")
TO_FOLLOW = ray.how_to_follow(JOB).splitlines()
Follow = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Follow:
    """Follow the job on a clock that a look at moves by 400 s; returns the exit code and the lines of stderr.

    `before` are the errors of the first attempts to reach the cluster.
    """

    def run(client: Client, before: tuple[Exception, ...] = ()) -> tuple[int, list[str]]:
        errors, clock = list(before), iter(range(0, 10**6, 400))

        def connect(address: str) -> Client:
            if errors:
                raise errors.pop(0)
            return client

        monkeypatch.setattr(following, "connect", connect)
        monkeypatch.setattr(following, "time", SimpleNamespace(sleep=lambda s: None))
        monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        return following.follow(JOB), capsys.readouterr().err.splitlines()

    return run


def test_a_cluster_that_is_away_after_the_submission_is_asked_again(follow: Follow) -> None:
    code, err = follow(Client(Details(Status.SUCCEEDED)), (REFUSED, REFUSED))
    assert code == DONE
    assert err == [f"no answer about job a-b-1: {REFUSED}; asking again", "answered again", "job a-b-1 succeeded"]


def test_a_proxy_that_does_not_let_the_log_s_websocket_through(
    follow: Follow,
) -> None:
    refused = WSServerHandshakeError(None, (), status=403, message="Invalid response status")
    code, err = follow(Client(RUNNING, RUNNING, Details(Status.SUCCEEDED), tail=refused))
    assert (code, err) == (DONE, ["job a-b-1 running", "job a-b-1 succeeded"])


@pytest.mark.parametrize("before", [(), (RUNNING,)])
def test_a_cluster_that_stays_away_is_a_failure_with_the_commands_to_go_on(
    follow: Follow, before: tuple[Details, ...]
) -> None:
    lost = RuntimeError("Request failed with status code 502")
    code, err = follow(Client(*before, lost))
    assert code == FAILED
    assert err[-5:] == [f"error: no answer about job a-b-1: {lost}; job a-b-1 not cancelled", *TO_FOLLOW]


def test_every_time_that_it_is_away_patience_begins_anew(follow: Follow) -> None:
    hiccup = OSError("hiccup")
    answers = [RUNNING, hiccup, hiccup, RUNNING, hiccup, hiccup, RUNNING, hiccup, Details(Status.SUCCEEDED)]
    assert follow(Client(*answers))[0] == DONE


@pytest.mark.parametrize("error", [RuntimeError("Request failed with status code 502"), REFUSED])
def test_cancelling_while_the_cluster_is_away_says_that_nothing_was_cancelled(follow: Follow, error: Exception) -> None:
    code, err = follow(Client(RUNNING, stop=error, cancelled=True))
    assert code == FAILED
    assert err[-5:] == [f"error: no answer about job a-b-1: {error}; job a-b-1 not cancelled", *TO_FOLLOW]


def test_a_cluster_that_goes_away_when_it_has_been_told_to_stop_the_job(follow: Follow) -> None:
    hiccup = OSError("hiccup")
    code, err = follow(Client(RUNNING, RUNNING, hiccup, Details(Status.STOPPED), cancelled=True))
    assert code == INTERRUPTED
    assert err[-2:] == ["job a-b-1 stopped", "error: job a-b-1 cancelled"]
    code, err = follow(Client(RUNNING, RUNNING, hiccup, cancelled=True))
    assert code == FAILED
    assert err[-5:] == ["error: no answer about job a-b-1: hiccup; job a-b-1 told to stop", *TO_FOLLOW]


@pytest.mark.parametrize(
    ("exit_code", "code", "said", "hint"),
    [
        (-9, FAILED, "was killed by SIGKILL", "out of memory, perhaps; "),
        (-15, FAILED, "was killed by SIGTERM", ""),
        (137, FAILED, "failed with exit code 137", ""),
        (2, 2, "failed with exit code 2", ""),
        (143, PREEMPTED, "failed with exit code 143", ""),
        (None, FAILED, "failed: no node left", ""),
    ],
)
def test_how_a_job_failed_is_said_once(follow: Follow, exit_code: int | None, code: int, said: str, hint: str) -> None:
    got, err = follow(Client(Details(Status.FAILED, exit_code, "no node left\nmore")))
    assert got == code
    log = f"{hint}log: ray job logs --address http://head:8265 a-b-1"
    assert err == ["job a-b-1 failed", f"error: job a-b-1 {said}", log]


def test_without_a_terminal_the_second_ctrl_c_cancels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    question = CancelQuestion()
    assert [question.ask("job 7"), question.ask("job 7")] == [False, True]
    assert capsys.readouterr().err == (
        "interrupted: job 7 not cancelled; once more cancels, SIGTERM stops following only\n"
    )


@pytest.mark.parametrize(
    ("answer", "meant"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch, answer: str, meant: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert CancelQuestion().ask("job 7") is meant
    assert sys.stderr.getvalue() == "\ncancel job 7? [y/N] "  # type: ignore[attr-defined]


def test_signals_are_noted_until_nobody_looks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert noted == [signal.SIGTERM]
        noted.clear()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    assert signal.getsignal(signal.SIGTERM) is before
