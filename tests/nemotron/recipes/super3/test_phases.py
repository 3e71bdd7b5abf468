"""Phases of pretraining as runs of their own, each on the model of the one before; merging of what a run kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_runspec.artifacts import Registry, Version
from nemotron.stack.training.merging import merge, merge_weights

from ..scripts import published, run

pytestmark = pytest.mark.slow

TRAIN, DATA = "nano3/stage0_pretrain/train.py", "nano3/stage0_pretrain/data_prep.py"
MODEL = (
    "hybrid_override_pattern=ME*", "vocab_size=512", "hidden_size=16", "num_attention_heads=2", "num_key_value_heads=1",
    "head_dim=8", "mamba_num_heads=2", "mamba_head_dim=8", "ssm_state_size=4", "n_groups=1", "chunk_size=16",
    "n_routed_experts=8", "num_experts_per_tok=2", "moe_latent_size=8", "moe_intermediate_size=8",
    "moe_shared_expert_intermediate_size=8", "num_nextn_predict_layers=1", "mtp_loss_scaling_factor=0.3",
)  # fmt: skip
COMMON = (
    *(f"model.{setting}" for setting in MODEL), "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.eval_interval=8", "train.eval_iters=1", "dataset.seq_length=32", "scheduler.lr_warmup_iters=0",
    "scheduler.lr_wsd_decay_style=minus_sqrt", "scheduler.lr_wsd_decay_iters=0", "checkpoint.save_interval=4",
    "evaluation.tasks_per_family=0", "evaluation.trigram_baseline=false", "logger.log_interval=1",
)  # fmt: skip


class Phases:
    """A registry with data of two phases and of long documents, and what training runs leave in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        draw = random.Random(0)
        words = ["the", "model", "reads", "many", "words", "about", "rivers", "mountains", "letters", "machines", "day"]
        rows = [" ".join(draw.choices(words, k=80)) + f" {i}." for i in range(120)]
        file = root / "own.jsonl"
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        blend = [
            {"name": "diversity", "until": 0.75, "weights": {"own": 0.75, "tasks": 0.25}},
            {"name": "quality", "until": 1.0, "weights": {"own": 0.25, "tasks": 0.75}},
        ]
        long = {"length": 128, "share": 0, "num_documents": 2, "retrieval_share": 0.5, "num_retrieval": 800}
        long |= {"facts": 2, "repeats": 2, "words": 2}
        self.data = published(root, run(
            root, DATA, "tiny", "stdlib.enabled=false", "tasks.num_tasks=6000", "tokenizer.vocab_size=512",
            "curation.evaluation_tasks=5", f"blend={json.dumps(blend)}", f"long_context={json.dumps(long)}",
            f"sources=[{{name: own, paths: [{file}], weight: 0.25, valid_fraction: 0.2}}]",
        ))  # fmt: skip

    def train(self, name: str, *words: str, fails: bool = False) -> Version | str:
        """The model of a run, or what a run that is refused says."""
        names = (f"run.output={name}", f"run.results={name}-results")
        result = run(self.root, TRAIN, "tiny", *COMMON, *names, *words)
        if fails:
            assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
            return result.stderr
        assert result.returncode == 0, result.stderr
        return Registry(self.root / "output" / "artifacts").resolve(name)

    def metrics(self, name: str) -> dict[str, Any]:
        results = Registry(self.root / "output" / "artifacts").resolve(f"{name}-results")
        return dict(results.record["metrics"])


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """Phase 1 published with its moments, and with the weights of every third step."""
    phases = Phases(tmp_path_factory.mktemp("phases"))
    phases.train(
        "phase1", "dataset.phase=diversity", "train.train_iters=12", "scheduler.lr_warmup_iters=2",
        "checkpoint.save_optim=true", "checkpoint.save_retain_interval=3",
    )  # fmt: skip
    return phases


def weights(version: Version | str) -> dict[str, torch.Tensor]:
    assert isinstance(version, Version)
    return load_file(version.path / "model.safetensors")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


PHASE2 = (
    "run.model=phase1", "dataset.phase=quality", "train.train_iters=4", "scheduler.lr_wsd_decay_iters=4",
    "checkpoint.pretrained_checkpoint=${art:model,path}",
)  # fmt: skip


def test_two_runs_end_with_the_bits_of_one(phases: Phases) -> None:
    """Weights, expert biases, moments, rates, and windows read: the same step by step."""
    one = phases.train("one", "train.train_iters=16", "scheduler.lr_warmup_iters=2", "scheduler.lr_wsd_decay_iters=4")
    two = phases.train("phase2", *PHASE2, "checkpoint.load_optim=true")
    assert isinstance(two, Version) and isinstance(one, Version)
    assert equal(weights(two), weights(one))
    assert two.record["metrics"]["drawn"] == one.record["metrics"]["drawn"]
    assert not (two.path / "optimizer.safetensors").exists()
    assert not equal(weights(phases.train("anew", *PHASE2)), weights(one))  # moments that begin anew


def test_what_does_not_go_on_is_refused_in_words(phases: Phases) -> None:
    said = phases.train("x", *PHASE2, "model.moe_latent_size=4", "model.n_routed_experts=4", fails=True)
    assert "model.n_routed_experts is 4, but phase1:1 has 8" in said and "moe_latent_size" in said
    phases.train("bare", *PHASE2)
    said = phases.train("x", *PHASE2[1:], "run.model=bare", "checkpoint.load_optim=true", fails=True)
    assert "optimizer.safetensors" in said and "checkpoint.save_optim=true" in said
    assert "no phase 'better'" in phases.train("x", *PHASE2, "dataset.phase=better", fails=True)
    assert "no pretrained_checkpoint" in phases.train(
        "x", "train.train_iters=1", "checkpoint.load_optim=true", fails=True
    )


def test_steps_of_long_and_of_short_sequences_alternate(phases: Phases) -> None:
    long = phases.train(
        "long", "run.model=phase1", "checkpoint.pretrained_checkpoint=${art:model,path}", "train.train_iters=8",
        "dataset.blend=long", "dataset.seq_length=128", "train.global_batch_size=1", "train.micro_batch_size=1",
        "dataset.short={seq_length: 32, share: 0.5, phase: quality}", "scheduler.lr_decay_style=constant",
        "evaluation.retrieval={lengths: [128, 256], num_documents: 3, facts: [1, 2], words: 2}",
    )  # fmt: skip
    assert isinstance(long, Version)
    sequences = {(row["phase"], row["source"]): row["sequences"] for row in long.record["metrics"]["mixture"]}
    assert sequences["long", "retrieval"] == 2  # half of four steps of one sequence
    assert [sum(n for (name, _), n in sequences.items() if name == phase) for phase in ("long", "quality")] == [4, 16]
    # The short steps go on behind what phase 1 had read of the same streams: 12 steps of 4 windows, then 4 of 4.
    assert sum(long.record["metrics"]["drawn"][". 32 1234"].values()) == 12 * 4 + 4 * 4
    scores = phases.metrics("long")["long"]
    assert scores["before"].keys() == scores["after"].keys()
    asked = {name: each["tokens"] for name, each in scores["after"].items()}
    assert asked == {f"retrieval_{facts}_{size}": 3 * facts for facts in (1, 2) for size in (128, 256)}


def test_merged_weights_are_the_mean_of_those_that_were_kept(phases: Phases) -> None:
    config = phases.root / "merge.yaml"
    config.write_text(
        "run: {script: merge.py, model: phase1, data: nano3-pretrain-data-tiny, output: merged, "
        "results: merged-results}\n"
        "model_path: ${art:model,path}\ndataset_path: ${art:data,path}\nwindows: [3, 9]\nwindow: 9\n"
        "lr_wsd_decay_style: minus_sqrt\nmin_lr_share: 0.01\nseq_length: 32\nbatch_size: 8\n"
    )
    result = run(phases.root, "super3/stage0_pretrain/merge.py", str(config))
    assert result.returncode == 0, result.stderr
    registry = Registry(phases.root / "output" / "artifacts")
    base, merged = registry.resolve("phase1"), registry.resolve("merged")
    states = [load_file(base.path / "retained" / f"{step:08d}.safetensors") for step in (3, 6, 9, 12)]
    name = "lm_head.weight"
    expected = merge(states, merge_weights(3, 3, "minus_sqrt", 0.01))[name]
    assert torch.equal(load_file(merged.path / "model.safetensors")[name], expected)
    assert torch.equal(states[-1][name], weights(base)[name])
    assert merged.record["metrics"]["drawn"] == base.record["metrics"]["drawn"]  # a further phase reads on behind it
    scores = phases.metrics("merged")["merging"]
    assert [row["checkpoints"] for row in scores.values()] == [1, 2, 4] and "last" in scores
    (phases.root / "odd.yaml").write_text(config.read_text().replace("[3, 9]", "[4, 9]"))
    result = run(phases.root, "super3/stage0_pretrain/merge.py", str(phases.root / "odd.yaml"))
    assert result.returncode == 2 and "window 4: there are weights of every 3 steps from 3 to 12" in result.stderr
