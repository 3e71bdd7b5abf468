"""Kill a run that goes on with a published model, start the same command again: the weights of an unbroken run.

The second run begins with weights, moments and a cursor of the first, and has steps of two lengths and multi-token
prediction: all that a phase of pretraining may have beside a run from new weights.
"""

from __future__ import annotations

import json
import random
import signal

import pytest

from .house import NANO3, House
from .test_resume import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 40
COMMON = [
    NANO3 / "stage0_pretrain" / "train.py", "--config", "tiny", *(f"model.{setting}" for setting in MODEL),
    "model.num_nextn_predict_layers=1", "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_iters=2",
    "train.eval_interval=15", "scheduler.lr_warmup_iters=0", "evaluation.tasks_per_family=0", "logger.log_interval=1",
]  # fmt: skip
FIRST = [
    *COMMON, "train.train_iters=6", "dataset.seq_length=32", "dataset.phase=diversity", "checkpoint.save_optim=true",
    "scheduler.lr_wsd_decay_iters=0", "run.output=first",
]  # fmt: skip
SECOND = [
    *COMMON, f"train.train_iters={STEPS}", "dataset.seq_length=64", "dataset.phase=quality",
    "dataset.short={seq_length: 32, share: 0.5, phase: diversity}", "scheduler.lr_wsd_decay_iters=20",
    "scheduler.lr_wsd_decay_style=minus_sqrt", "checkpoint.save_interval=7", "run.model=first:1",
    "checkpoint.pretrained_checkpoint=${art:model,path}", "checkpoint.load_optim=true", "run.output=second",
]  # fmt: skip


@pytest.mark.gpu
def test_a_killed_phase_ends_with_the_same_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    house = House(tmp_path_factory.mktemp("house"))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["the", "model", "reads", "a", "line", "and", "writes"], k=80)) for _ in range(90)]
    notes = house.root / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": f"{text} {i}."}) + "\n" for i, text in enumerate(texts)))
    house.run([
        NANO3 / "stage0_pretrain" / "data_prep.py", "--config", "tiny", "stdlib.enabled=false", "tasks.num_tasks=2000",
        "tokenizer.vocab_size=400", "curation.evaluation_tasks=5",
        f"sources=[{{name: notes, paths: [{notes}], weight: 0.5, valid_fraction: 0.2}}]",
    ])  # fmt: skip
    house.run(FIRST, "first")
    house.run(SECOND, "unbroken")
    expected = house.digest("second:1")
    assert house.run_and_stop(SECOND, "killed", 18, signal.SIGKILL) == -9
    assert "resumed at step" in house.run(SECOND, "killed")
    assert house.digest("second") == expected
    assert [step["loss"] for step in house.steps("killed")] == [step["loss"] for step in house.steps("unbroken")]
