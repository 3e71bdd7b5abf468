"""The user's own comparisons for a judge: which ones can be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from nemotron.recipes.nano3.stage2_rl.genrm import read_own
from nemotron.recipes.nano3.stage2_rl.genrm_schema import GenRMConfig
from nemotron.stack.training.distributed import ALONE


def test_comparisons_without_room_for_a_verdict_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    short = {"prompt": "Which?", "response_1": "this", "response_2": "that", "preference": 1}
    tokenizer = train_tokenizer(["Which? this that"], MIN_VOCAB_SIZE)
    cfg = GenRMConfig.model_validate(
        {
            "run": {"model": "model", "data": "data"},
            "data": {"path": "data", "comparisons": [str(path)]},
            "policy": {"model_name": "m", "max_total_sequence_length": 250, "generation": {"max_new_tokens": 50}},
        }
    )

    path.write_text(f"{json.dumps(short)}\n{json.dumps(short | {'response_2': 'x' * 300})}\n")
    ((task, _),) = read_own(cfg, tokenizer, "nano3", ALONE)
    assert "that" in task.prompt
    assert "left out: 1 comparison of more than 200 tokens" in capsys.readouterr().err

    path.write_text(json.dumps(short | {"response_2": "x" * 300}))
    with pytest.raises(UserError, match="all 1 have more than 200 tokens"):
        read_own(cfg, tokenizer, "nano3", ALONE)
    path.write_text(f"{json.dumps(short)}\n{json.dumps(short)}\n{json.dumps(short | {'preference': 2})}\n")
    assert len(read_own(cfg, tokenizer, "nano3", ALONE)) == 2
    assert "left out, as there twice: 1 comparison" in capsys.readouterr().err
    path.write_text("\n")
    with pytest.raises(UserError, match="there is none"):
        read_own(cfg, tokenizer, "nano3", ALONE)
