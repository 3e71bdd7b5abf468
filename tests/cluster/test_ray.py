"""Ray on this machine: a data preparation on two nodes of a Slurm job, and jobs for a cluster that exists."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemotron.recipes
from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.errors import UserError
from nemo_runspec.execution.launch_script import Launch, launch_json, launch_script
from nemo_runspec.execution.ray import jobs as ray_execution
from nemo_runspec.execution.ray.following import follow
from nemo_runspec.execution.ray.jobs import RayJob, hand_over, how_to_follow, new_job_id, ray_runtime_env
from nemo_runspec.profile import Env

from .ray_cluster import RayCluster
from .slurm import Slurm, wait_for

SOURCE_ROOT = Path(nemotron.recipes.__file__).parents[2]
DATA_PREP = SOURCE_ROOT / "nemotron/recipes/nano3/stage0_pretrain/data_prep.py"
# Some ten tasks for the engine: no standard library, a small vocabulary.
QUICK = ("stdlib.enabled=false", "tasks.num_tasks=60000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20")
ON_A_NODE = (
    "import os, sys\nfrom nemo_runspec.errors import run_main\n"
    "from nemo_runspec.execution.ray.allocation import run_in_allocation\n"
    "sys.exit(run_main(lambda: run_in_allocation(sys.argv[1:], dict(os.environ), None)))"
)


def published(root: Path) -> Version:
    return Registry(root / "artifacts").resolve("nano3-pretrain-data-tiny")


def variables(root: Path) -> dict[str, str]:
    return {"RUNSPEC_OUTPUT_ROOT": str(root), "PYTHONPATH": str(SOURCE_ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The same preparation without Ray."""
    root = tmp_path_factory.mktemp("here")
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RUNSPEC_ARTIFACTS_ROOT")}
    command = [sys.executable, str(DATA_PREP), "--config", "tiny", *QUICK]
    subprocess.run(command, env=environment | variables(root), cwd=root, check=True, capture_output=True)
    return published(root)


# --- In a Slurm job ---------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A TMPDIR for a job, with a short path, as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield Path(folder)


def on_two_nodes(slurm: Slurm, scratch: Path, words: list[str], **env: str) -> str:
    """The id of a job whose two nodes form a Ray cluster, on which the first runs `words`."""
    step = shlex.join(["srun", "-N2", "--ntasks-per-node=1", sys.executable, "-c", ON_A_NODE, *words])
    # As the batch script and launch.sh of a real job do.
    script = f"export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\ntrap '' USR1\n{step}"
    env["TMPDIR"] = str(scratch)
    return slurm.sbatch(script, "-N2", "--ntasks-per-node=1", "--cpus-per-task=2", env=env)


def remains(scratch: Path) -> list[str]:
    """Processes and folders that a job has left."""
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in processes if f"{scratch}/" in line] + [str(path) for path in scratch.iterdir()]


@pytest.mark.slow
def test_data_on_two_nodes_of_a_slurm_job_has_the_digest_of_one_process(
    slurm: Slurm, scratch: Path, here: Version, tmp_path: Path
) -> None:
    words = [sys.executable, str(DATA_PREP), "--config", "tiny", *QUICK]
    job = on_two_nodes(slurm, scratch, words, **variables(tmp_path))
    assert slurm.wait_state(job, ("COMPLETED", "FAILED"), timeout=240) == "COMPLETED", slurm.output(job)
    assert "4 CPUs on 2 nodes" in slurm.output(job)
    assert published(tmp_path).digest == here.digest
    assert remains(scratch) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokenize/tokenize_documents.py", "pack/pack.py"])
def test_shards_written_on_two_nodes_are_those_of_one_process(
    slurm: Slurm, scratch: Path, tmp_path: Path, kind: str
) -> None:
    from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer

    (tmp_path / "mine").mkdir()
    for name in "abc":
        with (tmp_path / "mine" / f"{name}.jsonl").open("w") as file:
            for i in range(1000):
                turns = [
                    {"role": "user", "content": f"What is {i} and {name}?"},
                    {"role": "assistant", "content": f"It is {name}{i}. " * (i % 20 + 1)},
                ]
                file.write(json.dumps({"text": turns[1]["content"], "messages": turns}) + "\n")
    save_tokenizer(
        train_tokenizer(["It is what it is."], 280), tmp_path / "tokenizer", model_max_length=1024, template="nano3"
    )
    words = [sys.executable, str(SOURCE_ROOT / "nemotron/recipes/data" / kind), "--config", "own"]
    words += [f"sources=[{tmp_path}/mine]", f"tokenizer={tmp_path}/tokenizer", "shard_bytes=65536"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RUNSPEC_ARTIFACTS_ROOT")}
    subprocess.run(words, env=environment | variables(tmp_path / "here"), cwd=tmp_path, check=True, capture_output=True)
    job = on_two_nodes(slurm, scratch, words, **variables(tmp_path / "there"))
    assert slurm.wait_state(job, ("COMPLETED", "FAILED"), timeout=240) == "COMPLETED", slurm.output(job)
    assert "4 CPUs on 2 nodes" in slurm.output(job)
    name = f"{Path(kind).parent}-data-own"
    here, there = (Registry(tmp_path / place / "artifacts").resolve(name) for place in ("here", "there"))
    assert there.digest == here.digest
    assert remains(scratch) == []


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 143])
def test_the_exit_code_of_the_script_is_that_of_the_step(slurm: Slurm, scratch: Path, code: int) -> None:
    program = f"import os, sys; print('at', os.environ['RAY_ADDRESS']); sys.exit({code})"
    job = on_two_nodes(slurm, scratch, [sys.executable, "-c", program], PYTHONPATH=str(SOURCE_ROOT))
    slurm.wait_state(job, "FAILED", timeout=180)
    assert slurm.scontrol(job)["ExitCode"] == f"{code}:0", slurm.output(job)
    assert "at " in slurm.output(job) and remains(scratch) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_reaches_the_script_and_nothing_survives(
    slurm: Slurm, scratch: Path, number: str, tmp_path: Path
) -> None:
    words = [sys.executable, str(DATA_PREP), "--config", "tiny"]
    job = on_two_nodes(slurm, scratch, words, **variables(tmp_path))
    wait_for("the work", lambda: "data/prep/pretrain: curate" in slurm.output(job), 180)
    time.sleep(1)
    slurm.run(f"scancel --signal={number} {job}")
    slurm.wait_state(job, "FAILED", timeout=90)
    assert slurm.scontrol(job)["ExitCode"] == "143:0", slurm.output(job)
    said = [line for line in slurm.output(job).splitlines() if line.startswith("error")]
    # SIGTERM ends Ray too, which may end the script before it can say anything; then the node says it.
    expected = [f"error: stopped by SIG{number}", "error: stopped by SIGTERM, and Ray with it"]
    assert said and said == [line for line in expected[: 1 + (number == "TERM")] if line in said]
    assert "Traceback" not in slurm.output(job)
    assert not list((tmp_path / "artifacts").glob("nano3-*/*")) and remains(scratch) == []


# --- On a cluster that exists -----------------------------------------------------------------------------------------


@pytest.fixture
def env(ray_cluster: RayCluster, tmp_path: Path) -> Env:
    return Env("cluster", "ray", ray=ray_cluster.address, output=str(tmp_path / "output"))


@pytest.fixture(autouse=True)
def without_ray_addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    # Of some other cluster: the profile's address goes before it.
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield


def bundle(folder: Path, script: str, *, secrets: tuple[str, ...] = (), packages: dict[str, str] | None = None) -> Path:
    """A bundle as it is packed, with a script of one file."""
    project = folder / "project"
    project.mkdir(parents=True)
    (project / "script.py").write_text(script)
    (folder / "train.yaml").write_text("{}\n")
    for name, text in (packages or {}).items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    # The toolkit comes from the checkout here, as if it travelled in runspec/.
    (folder / "launch.sh").write_text(
        launch_script({"PLAIN": "it's"}, python_path=["project/src"], secrets=secrets, inherits_job_dir=True,
                      startup_commands=[f"export PYTHONPATH=$PYTHONPATH:{SOURCE_ROOT}"])
    )  # fmt: skip
    launch = Launch("test/ray", "ray", "project/script.py", "train.yaml", executor="ray")
    (folder / "launch.json").write_text(launch_json(launch))
    return folder


def run(env: Env, folder: Path, **more: str) -> tuple[int, RayJob]:
    job_id = new_job_id("test/ray")
    job = hand_over(env, job_id, ray_runtime_env(env, job_id, folder, ["project/src"], {"PLAIN": "it's", **more}))
    return follow(job), job


TASKS = """
import os, socket, sys
import ray
from there import double

ray.init(log_to_driver=False)
remote = ray.remote(double)
print("results", sum(ray.get([remote.remote(i) for i in range(20)])), flush=True)
print("cluster has", ray.get(ray.remote(lambda: os.environ.get("CLUSTER_TEST_SECRET", "nothing")[:0] + "it").remote()))
print("folder", os.environ["RUNSPEC_JOB_DIR"])
"""


def test_a_job_runs_with_the_code_that_travelled_and_its_log_is_shown(
    ray_cluster: RayCluster,
    env: Env,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-of-mine")
    module = "import os\n\ndef double(i):\n    assert os.environ['PLAIN'] == \"it's\"\n    return 2 * i\n"
    # What git ignores is not git's to decide any more.
    packages = {"src/there.py": module, ".gitignore": "there.py\n"}
    folder = bundle(tmp_path / "bundle", TASKS, packages=packages, secrets=(ray_cluster.secret[0],))
    code, job = run(env, folder, HF_TOKEN="canary-of-mine")
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "results 380\n" in out and "cluster has it\n" in out
    assert f"folder {env.output}/jobs/{job.id}\n" in out
    assert err.splitlines()[-1] == f"job {job.id} succeeded"
    # What everybody sees who can see the dashboard: no secret of ours, none of the cluster's.
    shown = json.dumps(ray_cluster.get("/api/jobs/")) + json.dumps(ray_cluster.get(f"/api/jobs/{job.id}"))
    listed = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "list"],
        env=ray_cluster.env,
        capture_output=True,
        text=True,
    )
    assert job.id in shown and job.id in listed.stdout
    for value in ("canary-of-mine", ray_cluster.secret[1]):
        assert value not in shown + listed.stdout + out + err


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(2)", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sys.exit(143)", 143), ("sys.exit(7)", 1))),
        ("1 / 0", 1),
    ],
)
def test_the_exit_code_is_the_script_s_own(
    env: Env, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    got, job = run(env, bundle(tmp_path / "bundle", f"import sys\nprint('begun', flush=True)\n{how}\n"))
    out, err = capfd.readouterr()
    assert got == code, out + err
    assert "begun\n" in out and f"error: job {job.id} failed with exit code" in err


def test_a_secret_that_the_cluster_lacks_is_refused_by_name(
    env: Env, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(env, bundle(tmp_path / "bundle", "print('begun')\n", secrets=("ANOTHER_TOKEN",)))
    out, _ = capfd.readouterr()
    assert code == 2 and "error: ANOTHER_TOKEN, a secret of this job, is not set on" in out and "begun" not in out


@pytest.mark.slow
def test_the_command_runs_on_the_cluster_and_the_digest_is_that_of_one_process(
    ray_cluster: RayCluster, here: Version, tmp_path: Path
) -> None:
    name, value = ray_cluster.secret
    profile = f'[cluster]\nexecutor = "ray"\naddress = "{ray_cluster.address}"\nsecrets = ["{name}"]\n'
    (tmp_path / "env.toml").write_text(profile)
    environment = os.environ | variables(tmp_path / "output")
    environment = {key: text for key, text in environment.items() if key not in ("RUNSPEC_ARTIFACTS_ROOT", name)}
    words = ["nano3", "data", "prep", "pretrain", "-c", "tiny", "--run", "cluster", *QUICK]
    command = [sys.executable, "-c", "from nemotron.cli.main import main; main()", *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 CPUs on 1 node\n" in done.stdout
    assert value not in done.stdout + done.stderr
    version = published(tmp_path / "output")
    assert (version.digest, version.version) == (here.digest, 1)


_FOLLOW = """
import signal, sys
from nemo_runspec.errors import run_main
from nemo_runspec.execution.ray.following import follow
from nemo_runspec.execution.ray.jobs import RayJob
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run_main(lambda: follow(RayJob(*sys.argv[1:]))))
"""


@pytest.mark.slow
def test_ctrl_c_twice_cancels_and_sigterm_only_leaves(ray_cluster: RayCluster, env: Env, tmp_path: Path) -> None:
    script = "import time\nprint('begun', flush=True)\ntime.sleep(300)\n"
    folder = bundle(tmp_path / "bundle", script)
    job_id = new_job_id("test/ray")
    job = hand_over(env, job_id, ray_runtime_env(env, job_id, folder, ["project/src"], {}))
    assert how_to_follow(job).splitlines()[0] == f"job {job.id}"

    def follower() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", _FOLLOW, job.id, job.address], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT)},
        )  # fmt: skip
        assert child.stdout is not None
        while "begun" not in child.stdout.readline():
            assert child.poll() is None
        return child

    left = follower()
    left.send_signal(signal.SIGTERM)
    _, err = left.communicate(timeout=30)
    assert left.returncode == 143 and f"job {job.id} not cancelled" in err and "Traceback" not in err
    # The commands that it prints work from another shell.
    status = next(line for line in err.splitlines() if line.strip().startswith("inspect")).split()[1:]
    inspect = [sys.executable, "-m", "ray.scripts.scripts", *status[1:]]
    shown = subprocess.run(inspect, env=ray_cluster.env, capture_output=True, text=True)
    assert "RUNNING" in shown.stdout + shown.stderr

    attached = follower()
    attached.send_signal(signal.SIGINT)
    assert attached.stderr is not None
    while "not cancelled; once more cancels" not in attached.stderr.readline():
        assert attached.poll() is None
    attached.send_signal(signal.SIGINT)
    out, err = attached.communicate(timeout=60)
    assert attached.returncode == 130, err
    assert "begun" not in out and "Traceback" not in err
    assert f"error: job {job.id} cancelled" in err


def test_nothing_at_the_address_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Env("far", "ray", ray="http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"profile far: executor ray: nothing answers at http://127.0.0.1:1: Conn"):
        hand_over(env, "x", ray_runtime_env(env, "x", bundle(tmp_path / "bundle", ""), [], {}))
    monkeypatch.setattr(ray_execution, "CONNECT_SECONDS", 0.2)
    env = Env("far", "ray", ray="http://192.0.2.77:8265")
    with pytest.raises(UserError, match=r"nothing answers at http://192.0.2.77:8265"):
        hand_over(env, "x", ray_runtime_env(env, "x", tmp_path / "bundle", [], {}))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there: Connection refused"),
        ("http://127.0.0.1:8265", "jobs are submitted there, a script cannot join there"),
    ],
)
def test_a_ray_address_that_cannot_be_joined_is_refused_by_the_script(tmp_path: Path, address: str, said: str) -> None:
    environment = os.environ | variables(tmp_path) | {"RAY_ADDRESS": address}
    command = [sys.executable, str(DATA_PREP), "--config", "tiny", *QUICK]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"error: RAY_ADDRESS={address}: {said}"
    assert len(done.stderr.splitlines()) == 2
