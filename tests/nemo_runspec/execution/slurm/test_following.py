"""Following jobs, with a pretended cluster whose answers are those of a real one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nemo_runspec.errors import RunFailed
from nemo_runspec.execution.interrupts import Unreachable
from nemo_runspec.execution.slurm import following as module
from nemo_runspec.execution.slurm.following import follow
from nemo_runspec.execution.slurm.remote import Completed
from nemo_runspec.execution.slurm.submit import SlurmJob

# As Slurm 22.05 prints it, shortened.
LINE = (
    "JobId=18 JobName=toy UserId=root(0) GroupId=root(0) Priority=1 Account=test JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=0 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:14 "
    "Partition=batch AllocNode:Sid=vm:24011 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=node1 \n"
)


def said(state: str, *, reason: str = "None", restarts: int = 0, code: str = "0:0", nodes: str = "(null)") -> str:
    return LINE.format(state=state, reason=reason, restarts=restarts, code=code, nodes=nodes)


RUNNING = said("RUNNING", nodes="node[1-2]")
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified\n"


@dataclass
class Cluster:
    """Answers the looks at the state one after the other, the last one for ever; `logs` by attempt."""

    states: list[str | Exception]
    logs: dict[int, bytes] = field(default_factory=dict)
    accounting: list[str] = field(default_factory=list)
    batch_log: str = ""
    cancelled: list[str] = field(default_factory=list)
    scancel_says: str = ""
    prefix = ""

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60) -> Completed:
        if command.startswith("sacct"):
            return done(self.accounting.pop(0) if len(self.accounting) > 1 else self.accounting[0])
        if command.startswith("scancel"):
            _, quiet, *ids = command.split()
            assert quiet == "--quiet"
            self.cancelled += ids
            return Completed(1 if self.scancel_says else 0, b"", self.scancel_says)
        if command.startswith("grep"):
            pattern = re.findall(r"'(\^.*?)'", command)[0]
            return done("\n".join(line for line in self.batch_log.splitlines() if re.match(pattern, line)))
        answer = "\n"
        if command.startswith("scontrol"):
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            if isinstance(state, Exception):
                raise state
            answer = state
        attempt, offset = re.findall(r"_(\d+)\.out", command)[0], re.findall(r"tail -c \+(\d+)", command)[0]
        log = self.logs.get(int(attempt), b"")[int(offset) - 1 :]
        return Completed(0, answer.encode() + b"\n--runspec--\n" + log, "")


def done(text: str) -> Completed:
    return Completed(0, text.encode(), "")


def job(cluster: Cluster, number: int = 18) -> SlurmJob:
    return SlurmJob(str(number), f"job{number}", "/jobs/x", 3, cluster)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only by waiting."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])


def test_the_log_of_every_attempt_and_each_state_once(capsys: pytest.CaptureFixture[str]) -> None:
    states = [
        said("PENDING", reason="Resources"),
        said("PENDING", reason="Resources"),
        RUNNING,
        RUNNING,
        said("PENDING", reason="BeginTime", restarts=1),
        said("RUNNING", nodes="node[1-2]", restarts=1),
        said("COMPLETED", nodes="node[1-2]", restarts=1),
    ]
    assert follow([job(Cluster(states, {0: b"step 1\nsaved\n", 1: b"step 2\n"}))]) == 0
    printed = capsys.readouterr()
    assert printed.out == "step 1\nsaved\nstep 2\n"
    assert printed.err.splitlines() == [
        "job 18 (job18) pending: Resources",
        "job 18 (job18) running on node[1-2]",
        "job 18 (job18) requeued: restart 1 of 3",
        "job 18 (job18) pending: BeginTime",
        "job 18 (job18) running on node[1-2]",
        "job 18 (job18) completed",
    ]


@pytest.mark.parametrize("state", ["SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "COMPLETING", "REQUEUE_HOLD"])
def test_a_job_goes_on_in_every_state_that_is_no_end(state: str) -> None:
    assert follow([job(Cluster([RUNNING, said(state), RUNNING, said("COMPLETED")]))]) == 0


@pytest.mark.parametrize(
    ("state", "code", "expected", "words"),
    [
        ("FAILED", "1:0", 1, "failed with exit code 1"),
        ("FAILED", "2:0", 2, "failed with exit code 2"),
        ("FAILED", "130:0", 130, "failed with exit code 130"),
        ("FAILED", "143:0", 143, "saved its checkpoint and left, after 0 of 3 restarts"),
        ("FAILED", "9:0", 1, "ended FAILED"),
        ("FAILED", "0:9", 1, "ended FAILED"),
        ("TIMEOUT", "0:0", 1, "ended TIMEOUT: its time limit"),
        ("NODE_FAIL", "0:0", 1, "ended NODE_FAIL: a node failed"),
        ("OUT_OF_MEMORY", "0:125", 1, "ended OUT_OF_MEMORY: out of memory"),
        ("CANCELLED", "0:15", 1, "ended CANCELLED"),
        ("BOOT_FAIL", "0:0", 1, "ended BOOT_FAIL"),
    ],
)
def test_how_a_job_ended(state: str, code: str, expected: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([said(state, code=code)], batch_log="+ srun\nsrun: error: node2: task 1: Killed\n")
    assert follow([job(cluster)]) == expected
    assert capsys.readouterr().err.splitlines() == [
        "srun: error: node2: task 1: Killed",
        f"error: job 18 (job18) {words}",
        "log: /jobs/x/log-job18_18_0.out",
    ]


@pytest.mark.parametrize(
    ("records", "wrote", "expected"),
    [
        (["", "PENDING|0:0", "COMPLETED|0:0"], "", 0),
        # The accounting takes 128 from what is above it; the batch script knows better.
        (["FAILED|2:0"], "job exited with code 130", 130),
        (["FAILED|2:0"], "job exited with code 2", 2),
        (["CANCELLED by 0|0:15"], "", 1),
    ],
)
def test_a_job_that_the_controller_has_forgotten(records: list[str], wrote: str, expected: int) -> None:
    assert follow([job(Cluster([RUNNING, FORGOTTEN], accounting=records, batch_log=wrote))]) == expected


def test_the_first_failure_ends_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    clusters = [Cluster([said("COMPLETED")]), Cluster([said("FAILED", code="2:0")]), Cluster([RUNNING])]
    assert follow([job(cluster, 18 + index) for index, cluster in enumerate(clusters)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "job 18 (job18) completed",
        "error: job 19 (job19) failed with exit code 2",
        "cancelled behind it: job20; log: /jobs/x/log-job19_19_0.out",
    ]


def test_a_connection_may_be_away_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    lost = Unreachable("the connection to login was lost: Broken pipe")
    states: list[str | Exception] = [RUNNING, *[lost] * 30, RUNNING, said("COMPLETED")]
    assert follow([job(Cluster(states))]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [
        "the connection to login was lost: Broken pipe; job 18 goes on, trying to reach it again",
        "connected again",
        "job 18 (job18) completed",
    ]
    assert follow([job(Cluster([RUNNING, lost]))]) == 1
    assert "error: the connection to login was lost: Broken pipe; job 18 not cancelled" in capsys.readouterr().err


def test_a_controller_that_does_not_answer_is_like_a_lost_connection(capsys: pytest.CaptureFixture[str]) -> None:
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    assert follow([job(Cluster([RUNNING, down, down, said("COMPLETED")]))]) == 0
    assert "does not say how job 18 is: slurm_load_jobs error: Unable to contact" in capsys.readouterr().err


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_without_a_terminal(
    signals: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one asks for a second; the second cancels what has not ended, the last job first."""
    cluster = Cluster([said("COMPLETED")])
    running = Cluster([RUNNING, RUNNING, said("CANCELLED" if signals == 2 else "COMPLETED")])
    pending = [*range(signals)]

    def heed(original: Callable[[module._Follower], None]) -> Callable[[module._Follower], None]:
        def heeds(follower: module._Follower) -> None:
            if follower.current == 1 and pending:
                pending.pop()
                follower.signals.append(2)
            original(follower)

        return heeds

    monkeypatch.setattr(module._Follower, "_heed_signals", heed(module._Follower._heed_signals))
    behind = Cluster([said("COMPLETED")])
    code = follow([job(cluster, 18), job(running, 19), job(behind, 20)])
    err = capsys.readouterr().err
    assert "interrupted: jobs 19, 20 not cancelled; once more cancels" in err
    if signals == 1:
        assert (code, running.cancelled) == (0, [])
    else:
        assert (code, running.cancelled) == (130, ["20", "19"])
        assert "error: jobs 19, 20 cancelled" in err


@pytest.mark.parametrize(
    ("states", "code", "last_line"),
    [
        ([said("COMPLETED")], 0, "job 18 (job18) completed"),
        ([said("FAILED", code="2:0")], 2, "log: /jobs/x/log-job18_18_0.out"),
        ([FORGOTTEN], 0, "job 18 (job18) completed"),
    ],
)
def test_where_scancel_fails_and_the_job_is_over_its_end_counts(
    states: list[str | Exception], code: int, last_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(states, {0: b"step 9\n"}, ["COMPLETED|0:0\n"], scancel_says="scancel: error: Invalid job id\n")
    assert module._Follower([job(cluster)]).cancel() == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[-1]) == ("step 9\n", last_line)


def test_where_scancel_fails_and_a_job_goes_on_that_is_the_error() -> None:
    over, running = Cluster([said("COMPLETED")], scancel_says="scancel: error: Access denied\n"), Cluster([RUNNING])
    with pytest.raises(RunFailed, match=r"^scancel failed: scancel: error: Access denied$"):
        module._Follower([job(over), job(running, 19)]).cancel()


def test_a_job_that_ends_well_while_it_is_cancelled_has_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    follower = module._Follower([job(Cluster([said("COMPLETED")]))])
    assert follower.cancel() == 0
    assert "job 18 (job18) completed" in capsys.readouterr().err
