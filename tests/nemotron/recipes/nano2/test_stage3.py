"""Stage 3 of Nano 2: the mixture, and a small model that comes from a large one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.tokens.blend import Blend, write_blend_file, write_source
from nemotron.data_prep.tokens.tokenizer import EOS_ID, save_tokenizer, train_tokenizer
from nemotron.kit import Checkpoint, Dataset, Model, PretrainBlend, SFTPack
from nemotron.recipes.nano2.stage0_pretrain.training import ARCHITECTURE
from nemotron.recipes.nano2.stage3_compress import data_curation, evaluation, training, training_distil, training_prune
from nemotron.stack.environments import generate_tasks, make_difficulty, plain_text
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import PackedLoader

LENGTH = 48
SMALL = replace(
    ARCHITECTURE, hybrid_override_pattern="M-M*-M-", vocab_size=400, hidden_size=64, intermediate_size=128,
    mamba_head_dim=8, ssm_state_size=8, head_dim=8,
)  # fmt: skip


@pytest.fixture
def large(tmp_path: Path) -> Checkpoint:
    """What the stages before publish, small: text `x`, conversations `y`, and a model of random weights."""
    tasks = generate_tasks("math", "train", 200, 0, make_difficulty("math", None))
    texts = [plain_text(task) for task in tasks]
    tokenizer = train_tokenizer(texts, 400, template="nano2")
    pretrain, sft, model = (tmp_path / name for name in ("pretrain", "sft", "model"))
    save_tokenizer(tokenizer, pretrain / "tokenizer", model_max_length=1024, template="nano2")
    sources = {
        "old": write_source(pretrain, "old", {"train": ["q" * 99] * 50, "valid": texts[:20]}, tokenizer, EOS_ID),
        "best": write_source(pretrain, "best", {"train": texts, "valid": texts[:20]}, tokenizer, EOS_ID),
    }
    phases = [
        {"name": "a", "until": 0.9, "weights": {"old": 1.0}},
        {"name": "b", "until": 1.0, "weights": {"best": 1.0}},
    ]
    blend: Blend = {"phases": phases, "sources": sources, "vocab_size": 400, "eos_id": EOS_ID}  # type: ignore[typeddict-item]
    blend_path = write_blend_file(blend, pretrain)
    PretrainBlend(path=pretrain, num_examples=1, tokenizer_path=pretrain / "tokenizer", blend_path=blend_path).save(
        "nano2-pretrain-data"
    )
    torch.manual_seed(0)
    network = NemotronH(SMALL)
    with torch.no_grad():
        network.lm_head.weight.mul_(20)  # opinions that pruning changes: initial weights are near to uniform
    network.save_pretrained(model)
    save_tokenizer(tokenizer, model, model_max_length=1024, template="nano2")
    (model / "generation_config.json").write_text('{"temperature": 0.5}')  # a model from elsewhere has one
    checkpoint = Model(path=model, num_steps=0, tokenizer_path=model, chat_template="nano2", reasoning=True)
    checkpoint.save("nano2-sft-model")
    rng = np.random.default_rng(0)
    for split, count in (("train", 200), ("valid", 40)):
        rows = [(rng.integers(20, 400, n).astype(np.int32), np.ones(n, np.uint8)) for n in rng.integers(9, 30, count)]
        for ids, mask in rows:
            ids[0], mask[: len(ids) // 2], mask[-1] = 7, 0, 0
        write_rows(sft / split / "mixed.parquet", rows, LENGTH, concatenate=True)
    SFTPack(
        path=sft, num_examples=1, train_path=sft / "train", tokenizer_path=checkpoint.path, seq_len=LENGTH,
        chat_template="nano2",
    ).save("nano2-sft-data")  # fmt: skip
    return checkpoint


def curate(**changes: Any) -> Dataset:
    small = data_curation.Config(scale="full", num_rows=60, valid_rows=12, calibration_rows=8)
    return data_curation.main(replace(small, **changes))


def prune(dataset: Dataset) -> Checkpoint:
    return training_prune.main(
        training_prune.Config(dataset_path=dataset.path, candidates=4, trials=2, trial_steps=2, threads=1)
    )


def test_the_mixture_is_of_both_and_the_calibration_rows_are_full(large: Checkpoint) -> None:
    dataset = curate()
    assert {v.partition(":")[0] for v in dataset.inputs.values()} == {
        "nano2-sft-data", "nano2-pretrain-data", "nano2-sft-model",
    }  # fmt: skip
    rows = pq.read_table(dataset.path / "train.parquet").to_pylist()
    answers = [row for row in rows if row["input_ids"][0] == 7]
    text = [row for row in rows if row["input_ids"][0] != 7]
    share = sum(len(row["input_ids"]) for row in answers) / dataset.num_tokens
    assert share == pytest.approx(0.7, abs=LENGTH / dataset.num_tokens)
    assert all(len(row["input_ids"]) == LENGTH and sum(row["loss_mask"]) == LENGTH - 1 for row in text)
    # Text is of the last phase alone.
    tokenizer = load_tokenizer(large.path)
    assert not any("qqq" in tokenizer.decode(row["input_ids"]) for row in text)
    calibration = pq.read_table(dataset.path / "calibration.parquet")["input_ids"].to_pylist()
    assert [len(row) for row in calibration] == [LENGTH] * 8
    assert curate().digest == dataset.digest and curate(seed=2).digest != dataset.digest
    valid = pq.read_table(curate(sft_share=0.1, valid_rows=4).path / "valid.parquet")  # a tenth of four rows is one
    assert valid.num_rows > 1
    blend = PretrainBlend.load("nano2-pretrain-data").path  # of two sources that hold out the same text
    first, same, second, other = data_curation.held_out_text(blend, LENGTH, 4, 0)
    assert (first == same).all() and (second == other).all() and (first != second).any()
    with pytest.raises(UserError, match="no source has 100001 tokens held out"):
        data_curation.held_out_text(blend, 100_000, 1, 0)
    # A model of stage 2 is preferred; one with another tokenizer is refused.
    Model(path=large.path, num_steps=1, tokenizer_path=large.path, chat_template="nano2").save("nano2-rl-model")
    assert curate().inputs["model"].startswith("nano2-rl-model:1@")


def test_another_tokenizer_is_refused(large: Checkpoint, tmp_path: Path) -> None:
    other = tmp_path / "other"
    NemotronH.from_pretrained(large.path).save_pretrained(other)
    save_tokenizer(train_tokenizer(["a b c"] * 9, 300, template="nano2"), other, model_max_length=9, template="nano2")
    model = Model(path=other, num_steps=0, tokenizer_path=other).save("other")
    with pytest.raises(UserError, match="has not the tokenizer of other:1"):
        curate(teacher_path=model.path)


@pytest.mark.slow
def test_the_pruned_model_fits_and_is_distilled(large: Checkpoint) -> None:
    dataset = curate()
    pruned = prune(dataset)
    assert Checkpoint.input_of(pruned).ref == "nano2-sft-model:1" and pruned.chat_template == "nano2"
    full, small = NemotronH.from_pretrained(large.path), NemotronH.from_pretrained(pruned.path)
    assert isinstance(pruned, Model) and pruned.num_parameters == sum(p.numel() for p in small.parameters())
    assert pruned.num_parameters <= 0.75 * full.num_parameters()[0]
    sizes = pruned.metrics["bytes"]
    assert sizes["pruned"] <= sizes["budget"] == int(0.75 * sizes["full"])
    assert len(pruned.metrics["kl_as_pruned"]) == 4 and len(pruned.metrics["kl_after_trial"]) == 2
    assert -1 <= pruned.metrics["rank_correlation"] <= 1
    # Its weights are the large model's own: every row of the embedding is a part of the full one.
    kept, whole = small.backbone.embeddings.weight, full.backbone.embeddings.weight
    assert all((whole == kept[:, i : i + 1]).all(0).any() for i in range(kept.shape[1]))

    config = training_distil.Config(student_path=pruned.path, epochs=2, batch_size=4, warmup_steps=2, threads=1)
    checkpoint = training_distil.main(config)
    recovery = checkpoint.metrics["recovery"]
    assert [at["tokens"] for at in recovery][-1] == checkpoint.tokens == checkpoint.num_steps * 4 * LENGTH
    assert len(recovery) == 5 and recovery[-1]["kl"] < 0.8 * recovery[0]["kl"]
    assert Checkpoint.input_of(checkpoint).ref == pruned.ref
    for made in (pruned, checkpoint):
        assert json.loads((made.path / "generation_config.json").read_text()) == {"temperature": 0.5}


@pytest.mark.parametrize("given", [{"output_dir": Path("a")}, {"distil": training_distil.Config(output_dir=Path("a"))}])
def test_both_flags_for_the_folder_of_the_model_hold(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setattr(training_prune, "main", lambda config: SimpleNamespace(path=Path("pruned")))
    monkeypatch.setattr(training_distil, "main", lambda config: config.output_dir)
    assert training.main(training.Config(**given)) == Path("a")


def test_a_student_equal_to_its_teacher_has_no_loss_and_learns_labels_without_one(large: Checkpoint) -> None:
    file = curate().path / "train.parquet"
    rows = PackedLoader(file, None, 0)
    model, config = NemotronH.from_pretrained(large.path), training_distil.Config(batch_size=4, warmup_steps=1, lr=3e-3)
    twin = NemotronH.from_pretrained(large.path)
    assert rows.seq_len == LENGTH
    assert next(training_distil.distil(twin, model, rows, config, 1)) == pytest.approx(0, abs=1e-5)
    batch = PackedLoader(file, None, 1).next_batch(4)
    trained_BL = batch.loss_mask_BL.bool()
    with torch.no_grad():
        log_q_TV = model(batch.input_ids_BL, batch.seq_idx_BL, trained_BL).logits.log_softmax(-1)
    labels_T = batch.labels_BL[trained_BL]
    losses = list(training_distil.distil(model, None, PackedLoader(file, None, 1), config, 20))
    assert losses[0] == pytest.approx(-log_q_TV[torch.arange(len(labels_T)), labels_T].mean().item(), rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_stage_ends_in_a_comparison(large: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = curate()
    prune_config = training_prune.Config(candidates=2, trials=1, trial_steps=1, threads=1)
    checkpoint = training.main(training.Config(dataset_path=dataset.path, prune=prune_config))
    results = evaluation.main(evaluation.Config(checkpoint_path=checkpoint.path, num_tasks=200))
    assert [results.metrics[name]["parameters"] for name in ("large", "small")] == [
        NemotronH.from_pretrained(folder).num_parameters()[0] for folder in (large.path, checkpoint.path)
    ]
    assert results.metrics["kept"]["parameters"] <= 0.75
    assert results.inputs["model"] == checkpoint.version.pinned and len(results.inputs) == 3
    json.dumps(results.metrics)
    assert "2.5 B 90.5%, 80 B 98.5%" in capsys.readouterr().err  # 59.8 and 65.1 of 66.1
    with pytest.raises(UserError, match="was not made from a Checkpoint"):
        evaluation.main(evaluation.Config(checkpoint_path=large.path))
