"""Prompts as they go through `train_nemo_rl.py`, and rollouts of a model of ours as NeMo-RL gets them back from Gym.

Which keys NeMo-RL reads, and which paths Gym's simple agent asks, was recorded of their sources
(`tests/contracts/record_nemo_rl.py`). The resources server is `nemotron env serve`, over HTTP; agent and model server
are written down here as their sources have them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl_rollouts import READ, as_nemo_rl_reads, message_log

from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit import RLPrompts
from nemotron.kit.nemo_rl import check_gym_prompts
from nemotron.stack.environments import Task, iter_tasks
from nemotron.stack.environments.gym import response_of
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer, record_of
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate

FAMILIES = ["math", "multiple_choice", "instruction_following", "structured_output"]


@contextlib.contextmanager
def serving(family: str) -> Iterator[str]:
    with GymHTTPServer(ResourcesServer(family)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def post(url: str, path: str, body: Any) -> dict[str, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, path
    result: dict[str, Any] = json.loads(answer.read())
    return result


def run_agent(url: str, row: dict[str, Any], respond: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Gym's simple agent without tools: seed, respond, verify."""
    assert READ["agent_paths"] == ["/aggregate_metrics", "/seed_session", "/v1/responses", "/verify"]
    post(url, "/seed_session", row)
    return post(url, "/verify", row | {"response": respond(row["responses_create_params"])})


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_of_our_model_come_back_with_their_tokens_and_rewards(
    family: str, tmp_path: Path, small_model: Callable[..., NemotronH]
) -> None:
    tasks: list[Task] = [task for task, _ in zip(iter_tasks(family, "train", 0), range(3), strict=False)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record_of(task)) + "\n" for task in tasks), encoding="utf-8")
    check_gym_prompts(RLPrompts.model_construct(path=tmp_path, train_path=path, valid_path=path))
    rows = as_nemo_rl_reads(path, max_new_tokens=8)
    for group in ("row", "nemo_gym_row", "responses_create_params"):
        holder = [row["responses_create_params"] if group == "responses_create_params" else row for row in rows]
        assert all(set(READ[group]) <= set(one) for one in holder)

    tokenizer = train_tokenizer([task.prompt for task in tasks] * 20, vocab_size=400)
    model = small_model("M*", seed=1, vocab_size=tokenizer.get_vocab_size()).eval()

    def sampled(params: dict[str, Any]) -> dict[str, Any]:
        """vLLM's server as Gym's model server hands it on: the response, and the tokens of it."""
        prompt = tokenizer.encode(json.dumps(params["input"])).ids
        drawn = generate(
            model, [prompt], max_new_tokens=params["max_output_tokens"], temperature=params["temperature"],
            stop_token_ids=(), generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        response = response_of(tokenizer.decode(drawn.tokens[0], skip_special_tokens=False))
        response["output"][0] |= {
            "prompt_token_ids": prompt, "generation_token_ids": drawn.tokens[0],
            "generation_log_probs": drawn.logprobs[0],
        }  # fmt: skip
        return response

    with serving(family) as url:
        results = [run_agent(url, row, sampled) for row in rows]
        right = [run_agent(url, row, lambda _, task=task: response_of(task.solution.answer))
                 for row, task in zip(rows, tasks, strict=True)]  # fmt: skip
    for result in results:
        assert set(READ["nemo_gym_result"] + READ["full_result"]) <= set(result)
        assert 0.0 <= result["reward"] <= 1.0
        user, assistant = message_log(result)
        assert len(assistant["token_ids"]) == len(assistant["generation_logprobs"]) == 8
        assert user["token_ids"] and all(logprob <= 0 for logprob in assistant["generation_logprobs"])
    assert [result["_rowidx"] for result in results] == [0, 1, 2]
    assert [result["reward"] for result in right] == [1.0, 1.0, 1.0]
