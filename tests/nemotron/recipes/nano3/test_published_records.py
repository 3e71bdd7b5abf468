"""Records as published for NeMo Gym become prompts of RL."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import run_main
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import verify
from nemotron.stack.rl.prompts import PromptSource


def record(number: int, agent: str = "math_with_judge_simple_agent", **fields: Any) -> dict[str, Any]:
    prompt = f"What is half of {number}? Put the answer in a box."
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "question": f"What is half of {number}?",
        "expected_answer": f"\\frac{{{number}}}{{2}}",
        **fields,
    }


def choice(number: int) -> dict[str, Any]:
    options = [{"A": "nought"}, {"B": f"{number}"}]
    return record(number, "mcqa_simple_agent", options=options, expected_answer="B")


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


def prepare(tmp_path: Path, *words: str) -> int:
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")
    sys.argv = [str(script.__file__), "--config", "tiny", "tasks.families=[]", "evaluation_tasks=20", *words]
    return int(run_main(script.main, command_hint))


@pytest.mark.slow
def test_published_records_are_prompts_that_rl_draws_and_none_is_left_for_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    records = [record(number) for number in range(100)] + [choice(number) for number in range(100, 150)]
    followed = record(150, "instruction_following_simple_agent", id=1, prompt="", kwargs=[{}])
    records.append(followed | {"instruction_id_list": ["punctuation:no_comma"]})
    records.append(record(151, "structured_outputs_simple_agent", schema_str='{"type": "integer"}', schema_type="json"))
    other = record(1, "jailbreak_detection_agent")
    broken = [choice(7) | {"expected_answer": "D"}, record(8, expected_answer=4)]
    (tmp_path / "blend.jsonl").write_text(lines([*records, records[0], other, *broken]))
    assert prepare(tmp_path, "sources=[{name: blend, paths: [blend.jsonl], on_error: skip}]") == 0
    registry = Registry(tmp_path / "output" / "artifacts")
    version = registry.resolve(json.loads(capsys.readouterr().out)["data"])
    counts = {
        row["outcome"]: row["conversations"]
        for row in version.record["metrics"]["curation"]
        if row["source"] == "blend"
    }
    assert counts == {"read": 153, "kept": 152, "exact duplicate": 1, "not read: not a valid task": 3}
    reasons = [sample["reason"] for sample in version.record["metrics"]["not_read_samples"]["blend"]]
    assert reasons == [
        "not a valid task: no environment here for the agent 'jailbreak_detection_agent'",
        "not a valid task: mcqa: expected_answer 'D' is none of the options A, B",
        "not a valid task: not what its environment asks for: math_with_judge: expected_answer is not text",
    ]
    train = version.path / "train.jsonl"
    for task in PromptSource(train, {"math": 0.5, "multiple_choice": 0.5}, 8, 0).batch(0):
        number = int(task.prompt.split()[4].rstrip("?"))
        right = f"\\boxed{{{number / 2}}}" if task.family == "math" else "\\boxed{B}"
        assert verify(task, f"<think>\n\\boxed{{A}}</think>{right}", thinking=True).status == "score"
        assert verify(task, "\\boxed{A}").status == "wrong"
    # What was published comes back as it was.
    assert prepare(tmp_path, f"sources=[{train}]") == 0
    again = registry.resolve(json.loads(capsys.readouterr().out)["data"])
    assert (again.path / "train.jsonl").read_bytes() == train.read_bytes()


def test_a_record_of_another_environment_stops_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "blend.jsonl").write_text(lines([record(1), record(2, "calendar_agent")]))
    assert prepare(tmp_path, "sources=[blend.jsonl]") == 2
    assert "blend.jsonl:2: no environment here for the agent 'calendar_agent'" in capsys.readouterr().err
