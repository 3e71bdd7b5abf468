"""Programs that evaluate models, unchanged, on `nemotron serve`: of each task, the verdict of our own evaluation.

NeMo Gym 0.4.0, verifiers 0.4.0, NeMo Evaluator 0.2.8 and its launcher 0.2.6, each in the environment that
`make test-ecosystem` makes of it. What they are told stands in examples/ecosystem.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from taught_model import LIMIT, TAUGHT, Taught, teach

from nemotron.stack.environments import load_environment
from nemotron.stack.environments.gym import text_of
from nemotron.stack.environments.own import read_tasks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/ecosystem"
STAND_INS = ROOT / "tests/stand_ins"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return teach(tmp_path_factory.mktemp("model") / "taught")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., str]]:
    """`start(WORD, …)` begins `nemotron WORD …` and returns the address that it prints."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*words: object) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "nemotron", *map(str, words)], env=os.environ, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"(http://127\.0\.0\.1:\d+)", line):
                # What it says later must not fill the pipe.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return found[1]
        raise AssertionError(said)

    yield begin
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        process.wait(60)


@pytest.fixture(scope="module")
def served(taught: Taught, start: Callable[..., str]) -> str:
    """Where the taught model is served."""
    return start("serve", taught.folder, "--port", 0)


def environment_of(name: str) -> Path:
    """The programs of an environment; the test is skipped where there is none."""
    path = ROOT / f".venv-{name}"
    if not path.is_dir():
        pytest.skip(f".venv-{name} is not here: `make test-ecosystem`")
    return path


def call(folder: Path, *words: object, **variables: str) -> str:
    result = subprocess.run(
        [str(word) for word in words], cwd=folder, env=os.environ | variables, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def known(taught: Taught, family: str) -> tuple[list[float], list[str]]:
    """What our own evaluation finds, which is what was taught."""
    verdicts, answers = taught.own_evaluation(taught.tasks[family])
    assert verdicts == TAUGHT
    return verdicts, answers


def known_of_server(taught: Taught, url: str, records: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The same with tools and verdicts of a resources server: what its tools answer is JSON, which the model reads."""
    monkeypatch.setenv("GYM_URL", url)
    monkeypatch.setenv("GYM_RECORDS", str(records))
    environment = load_environment(f"{ROOT}/examples/environments/gym_server.py:GymServer")
    verdicts, _ = taught.own_evaluation(list(read_tasks("theirs", environment)))
    assert verdicts == TAUGHT
    return verdicts


def once_more(config: dict[str, Any], family: str, server: dict[str, Any]) -> dict[str, Any]:
    """The agent of the example for another family, and the resources server that it asks."""
    agent = json.loads(json.dumps(config["nemotron_agent"]))
    simple = agent["responses_api_agents"]["simple_agent"]
    simple["resources_server"]["name"] = f"{family}_env"
    simple["datasets"] = [simple["datasets"][0] | {"name": family, "jsonl_fpath": f"{family}.jsonl"}]
    return {f"{family}_env": {"resources_servers": server}, f"{family}_agent": agent}


def test_gym_eval_run(
    taught: Taught, served: str, start: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = environment_of("gym")
    folder = tmp_path / "gym"
    shutil.copytree(EXAMPLES / "gym", folder)
    # The example's agent takes tasks with tools; one more takes mathematics, one multiple choice, on Gym's own server.
    taught.write_records("workplace_assistant", folder / "tasks.jsonl")
    taught.write_records("math", folder / "math.jsonl")
    choices = []
    for task in taught.tasks["multiple_choice"]:
        letters = [{chr(ord("A") + i): text} for i, text in enumerate(task.spec["options"])]
        params = {"input": [{"role": "user", "content": task.prompt}]}
        regex = {
            "output_regex": r"^\s*([A-Z])\s*$"
        }  # our tasks ask for a letter, those of this server for one in a box
        choices.append(
            {"responses_create_params": params, "options": letters, "expected_answer": task.spec["letter"],
             "template_metadata": regex}
        )  # fmt: skip
    (folder / "multiple_choice.jsonl").write_text("".join(json.dumps(choice) + "\n" for choice in choices))
    example = yaml.safe_load((folder / "nemotron.yaml").read_text())
    ours = example["nemotron_env"]["resources_servers"]["nemotron"] | {"family": "math"}
    mcqa = {"mcqa": {"entrypoint": "app.py", "domain": "knowledge"}}
    more = once_more(example, "math", {"nemotron": ours}) | once_more(example, "multiple_choice", mcqa)
    (folder / "more.yaml").write_text(yaml.safe_dump(more))
    for server in (
        "resources_servers/nemotron", "resources_servers/mcqa", "responses_api_agents/simple_agent",
        "responses_api_models/vllm_model",
    ):  # fmt: skip
        place = folder / "environments" / server / ".venv"
        place.parent.mkdir(parents=True)
        place.symlink_to(environment)
    call(
        folder, environment / "bin/gym", "eval", "run", "--config", "nemotron.yaml", "--config", "more.yaml",
        "--model-type", "vllm_model", "--model-url", f"{served}/v1", "--model", "taught", "--model-api-key", "none",
        "--split", "validation", "--temperature", 0, "--max-output-tokens", LIMIT, "--output", "rollouts.jsonl",
        "++family=workplace_assistant", f"++program={ROOT}/.venv/bin/nemotron",
        "+skip_venv_if_present=true", f"+uv_venv_dir={folder}/environments",
        "+head_server.host=127.0.0.1", f"+head_server.port={free_port()}",
    )  # fmt: skip

    rollouts: dict[str, list[dict[str, Any]]] = {}
    for rollout in sorted(json_lines(folder / "rollouts.jsonl"), key=lambda rollout: rollout["_ng_task_index"]):
        rollouts.setdefault(rollout["agent_ref"]["name"], []).append(rollout)
    for family in ("math", "multiple_choice"):
        verdicts, answers = known(taught, family)
        assert [rollout["reward"] for rollout in rollouts[f"{family}_agent"]] == verdicts
        assert [text_of(rollout["response"]["output"]) for rollout in rollouts[f"{family}_agent"]] == answers
    url = start("env", "serve", "workplace_assistant", "--port", 0)
    verdicts = known_of_server(taught, url, folder / "tasks.jsonl", monkeypatch)
    assert [rollout["reward"] for rollout in rollouts["nemotron_agent"]] == verdicts


@pytest.mark.parametrize("family", ["math", "workplace_assistant"])
def test_vf_eval(
    family: str, taught: Taught, served: str, start: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = environment_of("verifiers") / "bin"
    url = start("env", "serve", family, "--port", 0)
    taught.write_records(family, tmp_path / "tasks.jsonl")
    call(
        tmp_path, programs / "vf-eval", "@", EXAMPLES / "verifiers.toml", "--model", "taught", "--client.base-url",
        f"{served}/v1", "--sampling.max-tokens", LIMIT, "--env.taskset.task.resources-url", url, "--no-rich",
        "--run.name", "mine", PATH=f"{programs}:{os.environ['PATH']}",
    )  # fmt: skip
    traces = [trace for episode in json_lines(tmp_path / "outputs/mine/traces.jsonl") for trace in episode["traces"]]
    traces.sort(key=lambda trace: trace["task"]["data"]["idx"])
    rewards = [trace["rewards"]["nemo_gym"]["score"] for trace in traces]
    if family == "workplace_assistant":
        assert rewards == known_of_server(taught, url, tmp_path / "tasks.jsonl", monkeypatch)
        return
    verdicts, answers = known(taught, family)
    assert rewards == verdicts
    assert [trace["nodes"][-1]["message"].get("content", "") for trace in traces] == answers


def check_evaluator(taught: Taught, results: Path) -> None:
    """What NeMo Evaluator left of mathematics, against our own evaluation."""
    verdicts, answers = known(taught, "math")
    (file,) = results.rglob("samples_nemotron_math_*.jsonl")
    samples = sorted(json_lines(file), key=lambda sample: sample["doc_id"])
    assert [sample["acc"] for sample in samples] == verdicts
    assert [sample["resps"][0][0] for sample in samples] == answers
    reported = yaml.safe_load((results / "results.yml").read_text())["results"]["tasks"]["nemotron_math"]
    assert reported["metrics"]["acc"]["scores"]["acc"]["value"] == sum(verdicts) / len(verdicts)


SETTINGS = {"task": "nemotron_math", "limit_samples": len(TAUGHT), "max_new_tokens": LIMIT}


def test_nemo_evaluator(taught: Taught, served: str, tmp_path: Path) -> None:
    programs = environment_of("evaluator") / "bin"
    call(
        tmp_path, programs / "nemo-evaluator", "run_eval", "--eval_type", "nemotron", "--model_type", "chat",
        "--model_url", f"{served}/v1/chat/completions", "--model_id", "taught", "--output_dir", tmp_path / "results",
        "--overrides", ",".join(f"config.params.{key}={value}" for key, value in SETTINGS.items()),
        PATH=f"{programs}:{os.environ['PATH']}", PYTHONPATH=f"{ROOT}/src:{EXAMPLES}/evaluator",
        NEMO_EVALUATOR_TELEMETRY_LEVEL="0",
    )  # fmt: skip
    check_evaluator(taught, tmp_path / "results")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here, which stands in for Docker")
def test_the_launcher_of_nemo_evaluator(taught: Taught, served: str, tmp_path: Path) -> None:
    programs = environment_of("evaluator") / "bin"
    config = yaml.safe_load((EXAMPLES / "evaluator/launcher.yaml").read_text())
    config["execution"]["output_dir"] = str(tmp_path / "runs")
    config["target"]["api_endpoint"] |= {"url": f"{served}/v1/chat/completions", "model_id": "taught"}
    config["evaluation"]["nemo_evaluator_config"]["config"]["params"] |= SETTINGS
    (tmp_path / "launcher.yaml").write_text(yaml.safe_dump(config))
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.symlink_to(STAND_INS / "docker.py")
    variables = {
        "PATH": f"{docker.parent}:{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}/src:{EXAMPLES}/evaluator",
        "HOME": str(tmp_path), "NEMO_EVALUATOR_TRUST_UNLISTED_TASKS": "1", "NEMO_EVALUATOR_TELEMETRY_LEVEL": "0",
    }  # fmt: skip
    launcher = programs / "nemo-evaluator-launcher"
    said = call(tmp_path, launcher, "run", "--config", "launcher.yaml", **variables)
    (job,) = (tmp_path / "runs").glob("*/*/run.sh")
    while not (job.parent / "logs/stage.exit").exists():
        time.sleep(1)
    log = (job.parent / "logs/client_stdout.log").read_text()
    assert (job.parent / "logs/stage.exit").read_text().split()[-1] == "0", (said + log)[-4000:]
    check_evaluator(taught, job.parent / "artifacts")
    invocation = job.parents[1].name.rpartition("-")[2]
    (status,) = json.loads(call(tmp_path, launcher, "status", invocation, "--json", **variables))
    assert status["status"] == "success"
