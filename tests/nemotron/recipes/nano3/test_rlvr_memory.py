"""What RLVR asks of the machine's memory before it begins."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, RLPrompts
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import generate_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.training.memory import Needs

SCRIPT = importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr")
FAMILIES = ("multiple_choice", "workplace_assistant")


@pytest.mark.parametrize(
    ("words", "conversations"),
    [
        (["policy.generation.batch_size=64"], 4 * 4),  # half of the eight prompts of a step have tools
        (["policy.generation.batch_size=8"], 2 * 4),  # which may all be in one call
        (["policy.generation.batch_size=64", "grpo.max_rollout_turns=1"], 0),
    ],
)
def test_only_prompts_with_tools_may_have_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., NemotronH], words: list[str],
    conversations: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    tasks = [task for family in FAMILIES for task in generate_tasks(family, "train", 8)]
    tokenizer = train_tokenizer([task.prompt for task in tasks], 400)
    save_tokenizer(tokenizer, tmp_path / "start", model_max_length=4096, template="nano3")
    small_model("M*", vocab_size=tokenizer.get_vocab_size()).save_pretrained(tmp_path / "start")
    Model(path=tmp_path / "start", num_steps=1, chat_template="nano3").save("start")
    (tmp_path / "prompts").mkdir()
    train = tmp_path / "prompts/train.jsonl"
    train.write_text("".join(json.dumps({"task": task.to_dict()}) + "\n" for task in tasks))
    RLPrompts(path=train.parent, num_examples=len(tasks), train_path=train).save("prompts")
    asked: list[Needs] = []

    def refuse(session: Any, needs: Needs, key: str) -> None:
        asked.append(needs)
        raise UserError("too large")

    monkeypatch.setattr(SCRIPT, "check_memory", refuse)
    shares = ",".join(f"{family}: 1" for family in FAMILIES)
    words = [
        "run.model=start", "run.data=prompts", f"env.families={{{shares}}}", "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4", "policy.max_total_sequence_length=4096", *words,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(SCRIPT.__file__), "--config", "smoke", *words])
    assert run_main(SCRIPT.main, command_hint) == 2
    assert [needs.conversations for needs in asked] == [conversations]
