"""NeMo Gym 0.4.0, the real package: its servers verify rollouts of a model of ours, on the data path to NeMo-RL.

`make test-ecosystem` makes the environment, where there is a Python that the package takes. The model server, the
simple agent, one resources server (mcqa) and the collection of rollouts are Gym's; the other resources server is
`nemotron env serve`, and `nemotron serve` stands behind Gym's model server, in vLLM's place. Its model has learnt by
heart what to answer, right or wrong.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from nemo_rl_rollouts import READ, as_nemo_rl_reads, message_log
from taught_model import LIMIT, TAUGHT, teach

from nemotron.kit import RLPrompts
from nemotron.kit.nemo_rl import check_gym_prompts
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer, record_of

PYTHON = Path(__file__).parents[2] / ".venv-gym/bin/python"
SERVERS = Path(__file__).with_name("gym_servers.py")
HOST = "127.0.0.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="NeMo Gym is not here: `make test-ecosystem`"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def gym_config(vllm: str, ours: str) -> dict[str, Any]:
    """Gym's global config: instances as its config files have them, with addresses."""

    def at(port: int | None = None, **more: Any) -> dict[str, Any]:
        return {"entrypoint": "app.py", "host": HOST, "port": port or free_port(), **more}

    def agent(server: str) -> dict[str, Any]:
        return {
            "responses_api_agents": {
                "simple_agent": at(
                    resources_server={"type": "resources_servers", "name": server},
                    model_server={"type": "responses_api_models", "name": "policy_model"},
                )
            }
        }

    model = at(base_url=f"{vllm}/v1", api_key="none", model="taught", return_token_id_information=True,
               uses_reasoning_parser=True)  # fmt: skip
    return {
        "head_server": {"host": HOST, "port": free_port()},
        "policy_model": {"responses_api_models": {"vllm_model": model}},
        "mcqa": {"resources_servers": {"mcqa": at(domain="knowledge")}},
        "mcqa_simple_agent": agent("mcqa"),
        "math": {"resources_servers": {"ours": at(int(ours.rpartition(":")[2]), domain="math")}},
        "math_simple_agent": agent("math"),
        "default_host": HOST,
        "dry_run": False,
    }


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str | Path], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(command, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(f"http://{HOST}:{port}/", timeout=2) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server at port {port}")


def conversation(question: str, letter: str) -> list[dict[str, str]]:
    """A question of mcqa, and the letter that the model learns to answer."""
    answer = {"role": "assistant", "reasoning_content": "One of three.", "content": f"\\boxed{{{letter}}}"}
    return [{"role": "user", "content": question}, answer]


def test_gym_s_own_servers_and_ours_verify_rollouts_of_our_model(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    options = [{"A": "3"}, {"B": "8"}, {"C": "5"}]
    questions = [
        f"Which number is the {which}? A: 3, B: 8, C: 5. Put the letter in a box." for which in ("largest", "smallest")
    ]
    taught = teach(tmp_path / "taught", [conversation(question, "B") for question in questions])
    choices = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
            "options": options, "expected_answer": answer,
        }
        for question, answer in zip(questions, "BA", strict=True)
    ]  # fmt: skip
    path = tmp_path / "train.jsonl"
    records = [*map(record_of, taught.tasks["math"]), *choices]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    check_gym_prompts(RLPrompts.model_construct(path=tmp_path, train_path=path, valid_path=path))
    rows = as_nemo_rl_reads(path, max_new_tokens=LIMIT, temperature=0.01)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    port = free_port()
    command = [sys.executable, "-m", "nemotron", "serve", taught.folder, "--port", str(port)]
    wait_for(port, started(command, os.environ))
    with GymHTTPServer(ResourcesServer("math")) as ours:
        thread = threading.Thread(target=ours.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        config = gym_config(f"http://{HOST}:{port}", ours.url)
        environment = {**os.environ, "NEMO_GYM_CONFIG_DICT": json.dumps(config)}
        names = ["policy_model", "mcqa", "mcqa_simple_agent", "math_simple_agent"]
        processes = {name: started([PYTHON, SERVERS, "serve", name], environment) for name in names}
        for name, process in processes.items():
            ((app,),) = (tuple(kind.values()) for kind in config[name].values())
            wait_for(app["port"], process)
        collected = subprocess.run(
            [PYTHON, SERVERS, "collect", path], env=environment, capture_output=True, text=True, check=False
        )
        assert collected.returncode == 0, collected.stderr[-4000:]
        ours.shutdown()
        thread.join()
    results = [json.loads(line) for line in collected.stdout.splitlines() if line.startswith("{")]
    assert [result["reward"] for result in results] == [*TAUGHT, 1.0, 0.0]
    for result in results:
        assert set(READ["nemo_gym_result"] + READ["full_result"]) <= set(result)
        user, assistant = message_log(result)
        assert user["token_ids"] and len(assistant["token_ids"]) == len(assistant["generation_logprobs"]) > 0
