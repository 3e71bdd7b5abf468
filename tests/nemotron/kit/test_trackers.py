"""Metrics reach each tracker as they were logged; a resumed run goes on there; a tracker that fails costs a line.

Where a tracker's library is installed it is the real one, offline or on a database file.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from wandb_server import running_wandb

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemotron.kit import Dataset, Run, metrics, open_run
from nemotron.kit.schemas.training import TrackersConfig
from nemotron.kit.trackers import Mirror, open_mirrors


@pytest.fixture
def raw(out: Path) -> Dataset:
    return Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", sources=["a book"]).save("raw")


def train(script: Path, logger: dict[str, Any], first: int = 1, last: int = 3, finished: bool = True) -> Run:
    """A run that logs steps `first` to `last`, resumed where the one before did not finish."""
    run = open_run(load_script_config(script, ["--config", "tiny"]), script=script)
    run.config["logger"] = logger
    run.metrics.mirrors = open_mirrors(run, first - 1)
    for step in range(first, last + 1):
        run.metrics.log(step, loss=4.0 / step, phase="a", valid_loss={"web c++": float(step)})
    run.close(finished=finished)
    return run


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A library of that name, in the place of what may be installed."""
    fake = ModuleType(name)
    vars(fake).update(content)
    monkeypatch.setitem(sys.modules, name, fake)
    fake.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]


@pytest.mark.parametrize("finished", [True, False])
def test_wandb_gets_run_config_and_metrics(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[int] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        last = logged[-1][0] if logged else 0
        return SimpleNamespace(
            step=last,
            log=lambda values, step: logged.append((step, values)),
            finish=lambda exit_code: ended.append(exit_code),
        )

    module(monkeypatch, "wandb", init=init)
    run = train(script, {"wandb_project": "ours", "wandb_entity": "team"}, finished=finished)
    assert (begun[0]["project"], begun[0]["entity"], begun[0]["resume"]) == ("ours", "team", "allow")
    assert begun[0]["name"] == f"toy/train/{run.dir.name}" and begun[0]["config"]["lr"] == 0.1
    assert logged[0] == (1, {"loss": 4.0, "valid_loss/web c++": 1.0}) and [step for step, _ in logged] == [1, 2, 3]
    assert ended == [0 if finished else 1]
    train(script, {"wandb_project": "ours"}, first=2, last=4)
    assert (begun[1]["id"] == begun[0]["id"]) == (not finished)  # a finished run starts afresh
    if not finished:
        assert [step for step, _ in logged] == [1, 2, 3, 3, 4]  # never a step that W&B would refuse


def test_the_table_of_env_toml_is_enough_for_wandb(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "env.toml").write_text('[tool.wandb]\nproject = "toy"\nmode = "offline"\n')
    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        return SimpleNamespace(step=0, log=lambda values, step: None, finish=lambda exit_code: None)

    module(monkeypatch, "wandb", init=init)
    train(script, {})
    assert (begun[0]["project"], begun[0]["mode"]) == ("toy", "offline")
    train(script, {"wandb_project": "other"})
    assert (begun[1]["project"], begun[1]["mode"]) == ("other", "offline")


def test_trackio_gets_metrics_and_goes_on(script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    steps: list[int] = []

    def init(project: str, name: str, resume: str, config: dict[str, Any]) -> SimpleNamespace:
        assert (project, resume, config["lr"]) == ("ours", "allow", 0.1)
        names.append(name)
        return SimpleNamespace(log=lambda values, step: steps.append(step), finish=lambda: None)

    module(monkeypatch, "trackio", init=init)
    train(script, {"trackio_project": "ours"}, finished=False)
    train(script, {"trackio_project": "ours"}, first=3, last=4)
    assert names[0] == names[1] and steps == [1, 2, 3, 3, 4]


def test_a_tracker_that_fails_is_said_once_and_the_log_is_whole(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: Any) -> None:
        raise SystemExit("no API key\nlog in")

    module(monkeypatch, "wandb", init=init)
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = train(script, {"wandb_project": "ours", "trackio_project": "ours"})
    warnings = sorted(line for line in capsys.readouterr().err.splitlines() if "takes no metrics" in line)
    assert warnings[0] == "warning: W&B takes no metrics: no API key; metrics.jsonl has them"
    assert len(warnings) == 2 and "trackio is not installed: pip install" in warnings[1]
    assert [line["step"] for line in run.metrics.read()] == [1, 2, 3]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What a hanging tracker waits for; set at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_a_tracker_that_hangs_is_left_behind(release: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    def hang() -> Any:
        release.wait(60)

    mirror = Mirror("MLflow", hang)
    mirror.log({"step": 1, "time": 1.0})
    mirror.close(True)
    mirror.wait(0.05)
    assert "MLflow did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(("finished", "longest"), [(True, 30), (False, 10)])
def test_trackers_that_hang_share_one_deadline(monkeypatch: pytest.MonkeyPatch, finished: bool, longest: float) -> None:
    clock = [100.0]
    calls: list[str] = []
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Hanging:
        def log(self, record: dict[str, Any]) -> None: ...

        def close(self, finished: bool) -> None:
            calls.append("close")

        def wait(self, seconds: float) -> None:
            calls.append("wait")
            clock[0] += seconds

    metrics.close_mirrors([Hanging(), Hanging()], finished)
    assert calls == ["close", "close", "wait", "wait"] and clock[0] == 100 + longest


def test_mlflow_gets_parameters_and_metrics_and_goes_on(
    script: Path, raw: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    settings = {"mlflow_experiment": "ours", "mlflow_tracking_uri": uri}
    train(script, settings, finished=False)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert found.info.status == "KILLED" and found.data.params["lr"] == "0.1"
    run = train(script, settings, first=3, last=4)
    (found,) = client.search_runs([found.info.experiment_id])
    assert (found.info.run_name, found.info.status) == (f"toy/train/{run.dir.name}", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "loss")
    assert {(metric.step, metric.value) for metric in history} == {(step, 4.0 / step) for step in (1, 2, 3, 4)}
    assert client.get_metric_history(found.info.run_id, "valid_loss/web c__")[0].value == 1.0
    assert "takes no metrics" not in capsys.readouterr().err


def test_tensorboard_reads_the_events_and_drops_what_is_logged_again(
    script: Path, raw: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(script, {"tensorboard_dir": "events"}, finished=False)
    run = train(script, {"tensorboard_dir": "events"}, first=3, last=4)
    events = accumulator.EventAccumulator(str(tmp_path / "output" / "events" / "toy" / "train" / run.dir.name))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "valid_loss/web c++"]
    points = events.Scalars("loss")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert all(math.isclose(point.value, 4.0 / point.step, rel_tol=1e-6) for point in points)
    logged = {line["step"]: line["time"] for line in run.metrics.read()}
    assert points[-1].wall_time == pytest.approx(logged[4])
    assert "takes no metrics" not in capsys.readouterr().err


def test_wandb_offline_writes_a_run(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train(script, {"wandb_project": "ours"})
    assert list(run.dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert "takes no metrics" not in capfd.readouterr().err


def test_trackio_keeps_a_run_on_this_machine(
    script: Path, raw: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    train(script, {"trackio_project": "ours"})
    assert list((tmp_path / "trackio").glob("ours*"))
    assert "takes no metrics" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_real_wandb_client_sends_metrics_and_goes_on(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # another test's connection
    with running_wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.endpoint)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        for place in ("CONFIG", "CACHE", "DATA"):
            monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))
        chosen = {"wandb_project": "ours", "wandb_entity": "team"}
        train(script, chosen, finished=False)
        train(script, chosen, first=2, last=4)
        wandb.teardown()
    assert len(server.runs) == 1 and server.unknown == set()
    losses = {line["_step"]: line["loss"] for line in server.history}
    assert losses == {1: 4.0, 2: 2.0, 3: 4 / 3, 4: 1.0}


TRACKED = """
from dataclasses import dataclass
from pathlib import Path

from nemotron.kit import Dataset, MlflowTracker, WandbTracker, set_lineage_tracker
from nemotron.kit.dataclass_script import output_folder, run_step, step


@dataclass
class Config:
    wandb: bool = True


@step
def main(config: Config) -> Dataset:
    set_lineage_tracker(*([WandbTracker()] if config.wandb else []), MlflowTracker())
    with output_folder(None) as folder:
        (folder / "train.jsonl").write_text("{}")
        return Dataset(path=folder, num_examples=1, metrics={"kept": 0.5}).save("corpus")


if __name__ == "__main__":
    run_step(main, Config)
"""


def tracked(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script that a shell has started, whose saves go to W&B and MLflow."""
    (folder / "curation.py").write_text(TRACKED)
    environment = {**os.environ, "WANDB_MODE": "offline", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", **env}
    command = [sys.executable, "curation.py", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_lineage_goes_to_wandb_offline_and_a_store_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = tracked(tmp_path, MLFLOW_TRACKING_URI=uri)
    assert done.stdout == '{"data": "art://corpus:1"}\n', done.stderr  # both print, W&B after everybody else
    assert "Tracker failed" not in done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"corpus" in log.read_bytes() and b"registry-1" in log.read_bytes()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("nemotron").experiment_id])
    assert (run.info.run_name, run.data.metrics) == ("corpus:1", {"kept": 0.5})


SERVER = Path(__file__).resolve().parents[3] / ".venv-mlflow/bin/mlflow"  # needs another pyarrow than the recipes


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(not SERVER.exists(), reason="no MLflow server in .venv-mlflow: python -m venv, pip install mlflow")
def test_a_real_mlflow_server_gets_the_record_and_its_end_costs_a_warning(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    words = ["server", "--port", uri.rpartition(":")[2], "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", f"{tmp_path}/files"]
    environment = {**os.environ, "PATH": f"{SERVER.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [str(SERVER), *words], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(f"{uri}/health", seconds=180)
        done = tracked(tmp_path, "--wandb", "False", MLFLOW_TRACKING_URI=uri)
        assert (done.stdout, done.returncode) == ('{"data": "art://corpus:1"}\n', 0), done.stderr
        version = Registry(tmp_path / "output" / "artifacts").resolve("corpus:1")
        client = mlflow.MlflowClient(tracking_uri=uri)
        (run,) = client.search_runs([client.get_experiment_by_name("nemotron").experiment_id])
        assert (run.data.tags["artifact"], run.data.metrics) == (version.pinned, {"kept": 0.5})
        address = f"{uri}/get-artifact?run_id={run.info.run_id}&path=artifact.json"
        with urllib.request.urlopen(address) as answer:
            assert json.load(answer)["digest"] == version.digest
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    alone = tracked(tmp_path, "--wandb", "False", MLFLOW_TRACKING_URI=uri)
    assert (alone.stdout, alone.returncode) == ('{"data": "art://corpus:2"}\n', 0), alone.stderr
    assert "warning: MlflowTracker failed: " in alone.stderr and "Traceback" not in alone.stderr
    journal = (tmp_path / "output" / "artifacts" / "lineage.jsonl").read_text().splitlines()
    assert [json.loads(line)["saved"].partition("@")[0] for line in journal] == ["corpus:1", "corpus:2"]


def wait_for(address: str, seconds: float) -> None:
    """Until something answers there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody answers at {address}"
            time.sleep(0.2)


def test_a_password_in_an_address_is_refused() -> None:
    TrackersConfig(mlflow_tracking_uri="https://me@mlflow.example.com")
    with pytest.raises(ValidationError, match="no password in it"):
        TrackersConfig(mlflow_tracking_uri="https://me:hunter2@mlflow.example.com")
