"""Stage 1 of Nano 2: what its rows hold, and that a model learns from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Checkpoint, Dataset, Model
from nemotron.kit.dataclass_script import read_config
from nemotron.recipes.nano2.stage0_pretrain.training import ARCHITECTURE
from nemotron.recipes.nano2.stage1_sft import data_curation, evaluation, training
from nemotron.stack.environments import generate_tasks, make_difficulty, plain_text
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    """A base model of random weights, as stage 0 publishes one."""
    tasks = generate_tasks("math", "train", 200, 0, make_difficulty("math", None))
    tokenizer = train_tokenizer((plain_text(task) for task in tasks), 512, template="nano2")
    folder = tmp_path / "base"
    torch.manual_seed(0)
    NemotronH(replace(ARCHITECTURE, vocab_size=tokenizer.get_vocab_size())).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model_max_length=1024, template="nano2")
    return Model(path=folder, num_steps=0, tokenizer_path=folder).save("nano2-pretrain-model")


def curate(**changes: Any) -> Dataset:
    return data_curation.main(
        replace(data_curation.Config(scale="full", num_conversations=1000, seq_length=1600), **changes)
    )


def test_the_three_stages_hold_what_they_are_for(base: Checkpoint, tmp_path: Path) -> None:
    dataset = curate()
    assert dataset.inputs == {"model": base.version.pinned} and dataset.ref == "nano2-sft-data:1"
    tokenizer = load_tokenizer(base.path)
    rows = {stage: pq.read_table(dataset.path / "train" / f"{stage}.parquet").to_pylist() for stage in training.STAGES}
    texts = {
        stage: "".join(tokenizer.decode(row["input_ids"], skip_special_tokens=False) for row in of_stage)
        for stage, of_stage in rows.items()
    }
    assert all(len(row["seq_start_id"]) == 1 for row in rows["tools"])  # without concatenation
    assert any(len(row["seq_start_id"]) > 1 for row in rows["mixed"])
    assert "<TOOLCALL>" in texts["tools"] and texts["tools"].count("<AVAILABLE_TOOLS>") >= len(rows["tools"])
    # Reasoning off leaves `<think></think>`: in about a tenth of `mixed` (some families have no reasoning at all).
    turns, stripped = texts["mixed"].count("<SPECIAL_11>Assistant"), texts["mixed"].count("<think></think>")
    assert 0.05 < stripped / turns < 0.25
    # What is trained is what the model writes: the last trained label of each conversation ends its turn.
    first = rows["mixed"][0]
    end = first["seq_start_id"][1]
    trained = [label for label, on in zip(first["input_ids"][1:end], first["loss_mask"][: end - 1], strict=True) if on]
    assert tokenizer.decode(trained, skip_special_tokens=False).endswith("<SPECIAL_12>")
    assert "<SPECIAL_11>" not in tokenizer.decode(trained, skip_special_tokens=False)
    assert curate().digest == dataset.digest


@pytest.mark.slow
def test_a_model_learns_from_the_rows_and_is_asked(base: Checkpoint, tmp_path: Path) -> None:
    data = curate(output_dir=tmp_path / "rows")
    config = training.Config(dataset_path=data.path, seq_length=1600, epochs=(1, 0, 0), warmup_steps=2)
    checkpoint = training.main(config)
    assert checkpoint.inputs == {"data": data.version.pinned, "model": base.version.pinned}
    losses = checkpoint.metrics["valid_loss"]
    assert set(losses) == set(training.STAGES) and losses["mixed"] < 5  # from ln 512 = 6.2
    num_rows = pq.read_metadata(data.path / "train/mixed.parquet").num_rows
    tenth = training.main(replace(config, scale="small", warmup_steps=0))
    assert (checkpoint.num_steps, tenth.num_steps) == (num_rows // 2, num_rows // 10 // 2)
    results = evaluation.main(evaluation.Config(checkpoint_path=checkpoint.path, num_tasks=200, samples=0))
    assert set(results.metrics) == {"reasoning_on", "reasoning_off"}
    assert results.inputs == {"model": checkpoint.version.pinned}
    json.dumps(results.metrics)


def test_what_does_not_fit_is_refused(base: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tools: none of \d+ (train|valid) sequences fits"):
        curate(seq_length=100)
    with pytest.raises(UserError, match="is a base model"):
        evaluation.main(evaluation.Config(checkpoint_path=base.path))
    with pytest.raises(UserError, match="does not say which model"):
        (tmp_path / "plain").mkdir()
        (tmp_path / "plain/x").write_text("x")
        training.main(training.Config(dataset_path=tmp_path / "plain"))
    with pytest.raises(UserError, match=r"epochs\.0 = -1"):
        read_config(training.Config, ["--epochs", "-1", "1", "1"])


def test_rows_are_the_sequences_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        (rng.integers(5, 99, n).astype(np.int32), rng.integers(0, 2, n).astype(np.uint8)) for n in (7, 3, 9, 1, 4)
    ]
    for concatenate, least in ((True, 3), (False, 5)):
        counts = write_rows(tmp_path / f"{concatenate}.parquet", sequences, 10, concatenate=concatenate)
        rows = pq.read_table(tmp_path / f"{concatenate}.parquet").to_pylist()
        found = []
        for row in rows:
            ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
            found += [
                (row["input_ids"][a:b], row["loss_mask"][a:b]) for a, b in zip(row["seq_start_id"], ends, strict=True)
            ]
        assert sorted(found) == sorted((ids.tolist(), mask.tolist()) for ids, mask in sequences)
        assert counts["rows"] == len(rows) == least and counts["tokens"] == 24
