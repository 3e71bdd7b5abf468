"""One answer for all processes of a job, though `latest` moves while they start."""

import json
import os
import subprocess
import sys
import time

import pytest

from nemo_runspec.artifacts import Registry, pins
from nemo_runspec.errors import RunFailed, UserError

NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "RUNSPEC_JOB_DIR", "RUNSPEC_PUBLISHED_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))


def number(n):
    return lambda name: f"{name}:{n}@{n:064x}"


def never(name):
    raise AssertionError(f"{name} was looked up")


def test_a_single_process_agrees_with_nobody(tmp_path):
    assert pins.agree(["a"], never) == {}
    assert not (tmp_path / "output").exists()


def test_rank_0_decides_for_the_others_and_for_the_attempts_after_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pins.agree(["a"], number(3)) == {"a": f"a:3@{3:064x}"}
    monkeypatch.setenv("RANK", "1")
    assert pins.agree(["a"], never) == {"a": f"a:3@{3:064x}"}
    monkeypatch.setenv("RANK", "0")  # requeued: latest is 4 by now
    assert pins.agree(["a"], never) == {"a": f"a:3@{3:064x}"}
    assert pins.agree(["a", "b"], number(4)) == {"a": f"a:3@{3:064x}", "b": f"b:4@{4:064x}"}
    assert sorted(json.loads((tmp_path / "job" / "pins.json").read_text())) == ["a", "b"]
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["pins.json"]


def test_the_quicker_of_two_that_take_themselves_for_rank_0_decides(monkeypatch, tmp_path):
    """srun without torchrun sets no RANK: every node believes that it is the first."""
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path))

    def slow(name):
        pins.agree([name], number(1))  # the other one, meanwhile
        return number(2)(name)

    assert pins.agree(["a"], slow) == {"a": f"a:1@{1:064x}"}


def test_two_scripts_of_one_job_that_start_at_once_have_inputs_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path))

    def slow(name):
        pins.agree(["b"], number(1))  # the other script, meanwhile
        return number(2)(name)

    assert pins.agree(["a"], slow) == {"a": f"a:2@{2:064x}"}
    assert pins.agree(["a", "b"], never) == {"a": f"a:2@{2:064x}", "b": f"b:1@{1:064x}"}


def test_another_rank_waits_and_says_so_when_nothing_comes(monkeypatch, tmp_path):
    monkeypatch.setattr(pins, "_SECONDS", 0.2)
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunFailed, match="rank 0 did not write"):
        pins.agree(["a"], never)
    (tmp_path / "pins.json").write_text("[")
    with pytest.raises(RunFailed, match=r"pins\.json: cannot be read"):
        pins.agree(["a"], never)


def test_what_the_pipeline_published_goes_before_latest(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNSPEC_PUBLISHED_DIR", str(tmp_path))
    assert pins.agree(["a"], never) == {}
    pins.leave_published("a", "a:2@" + "f" * 64)
    assert pins.agree(["a", "b"], never) == {"a": "a:2@" + "f" * 64}
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path / "job"))
    assert pins.agree(["a", "b"], number(7)) == {"a": "a:2@" + "f" * 64, "b": f"b:7@{7:064x}"}


def test_launches_by_hand_do_not_read_each_others_pins(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert pins.agree(["a"], number(1)) == {"a": f"a:1@{1:064x}"}
    assert pins.agree(["a"], never) == {"a": f"a:1@{1:064x}"}  # the same launcher started again
    monkeypatch.setattr(pins, "_started_at", lambda pid: "another process with the same id")
    assert pins.agree(["a"], number(2)) == {"a": f"a:2@{2:064x}"}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two nodes, and nothing that names this launch
    with pytest.raises(UserError, match="several nodes must agree") as refused:
        pins.agree(["a"], never)
    assert "--rdzv-id" in refused.value.hint
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "monday")
    assert pins.agree(["a"], number(3)) == {"a": f"a:3@{3:064x}"}
    files = list((tmp_path / "output" / ".launches").iterdir())
    assert len(files) == 3
    os.utime(files[0], (0, 0))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    pins.agree(["a"], number(4))
    assert not files[0].exists() and len(list(files[0].parent.iterdir())) == 3


def test_a_process_began_once(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert pins._started_at(child.pid) == pins._started_at(child.pid) != ""
    assert int(pins._started_at(child.pid)) >= int(pins._started_at(os.getpid()))
    child.communicate()
    assert pins._started_at(2**22 + 1) == ""


SCRIPT = '''
"""Read."""
# /// script
# [tool.runspec]
# schema = "1"
# name = "toy/read"
# docs = "Read."
# ///
from nemo_runspec.config import load_script_config
print(load_script_config(__file__).run.data, flush=True)
'''


def test_ranks_that_start_while_others_publish_read_one_version(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "default.yaml").write_text("run: {data: corpus}\n")
    (tmp_path / "read.py").write_text(SCRIPT.lstrip())
    (tmp_path / "payload").write_text("x")
    registry = Registry(tmp_path / "registry")
    registry.publish("corpus", tmp_path / "payload", {})
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    env |= {"RUNSPEC_ARTIFACTS_ROOT": str(registry.root), "RUNSPEC_JOB_DIR": str(tmp_path / "job"), "WORLD_SIZE": "3"}
    ranks = []
    for rank in ("2", "0", "1"):
        command = [sys.executable, str(tmp_path / "read.py")]
        ranks.append(subprocess.Popen(command, env={**env, "RANK": rank}, stdout=subprocess.PIPE, text=True))
        registry.publish("corpus", tmp_path / "payload", {})
    while any(process.poll() is None for process in ranks):
        registry.publish("corpus", tmp_path / "payload", {})
        time.sleep(0.02)
    said = {process.communicate()[0] for process in ranks}
    assert len(said) == 1 and said.pop().startswith("corpus:")
    again = subprocess.run([sys.executable, str(tmp_path / "read.py")], env=env, capture_output=True, text=True)
    assert again.stdout.strip() == json.loads((tmp_path / "job" / "pins.json").read_text())["corpus"].partition("@")[0]
