"""One process, two that hold the whole model (DDP) and two that share it (FSDP2) train the same model.

The loop is that of the pretraining script, on a hybrid of every kind of block with moving expert bias. The three
launches of `launches` (one process, two, one again) run everything; the tests compare what they left.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.training.loaders import BlendLoader

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("train_worker.py")
FSDP2 = {"dist.use_torch_fsdp2": True}
# Depths 1 and 2 of one block with experts, which is applied twice; every fourth step is of sequences of a quarter.
MTP = {"model.num_nextn_predict_layers": 1, "model.mtp_hybrid_override_pattern": "*E", "model.mtp_num_layers": 2,
       "model.mtp_loss_scaling_factor": 0.3, "model.moe_latent_size": 8}  # fmt: skip
SHORT = {"dataset.short": {"seq_length": 5, "share": 0.25}}
HALF = 10  # of 20 steps; a validation is due there, which the signal cuts short


@dataclass
class Launches:
    """What the runs left: weights and metrics by name."""

    folder: Path

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors at the end of a run."""
        return load_file(self.folder / f"{name}.safetensors")

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Records of a run on rank 0, wall time left out."""
        lines = (self.folder / name / "metrics0.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]

    def farthest(self, name: str, other: str) -> float:
        """The largest difference between a weight of two runs."""
        ours, theirs = self.weights(name), self.weights(other)
        assert ours.keys() == theirs.keys()
        return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, launch_worker: Callable[..., str]) -> Launches:
    """All runs. A resumed one works in a copy of the directory of the run that was stopped."""
    folder = tmp_path_factory.mktemp("launches")

    def launch(runs: list[dict[str, Any]], processes: int) -> list[int]:
        """Do `runs` in `processes` processes; the steps at which some resumed."""
        output = launch_worker(WORKER, folder, runs, processes)
        return [int(step) for step in re.findall(r"^resumed at step (\d+)", output, re.MULTILINE)]

    launch([
        {"name": "one"},
        {"name": "micro-batch of 8", "config": {"train.micro_batch_size": 8}},
        {"name": "micro-batch of 3", "config": {"train.micro_batch_size": 3}},
        {"name": "chunks of 5", "config": {"model.chunk_size": 5}},
        {"name": "recompute all", "config": {"model.recompute_granularity": "full"}},
        {"name": "recompute some", "config": {"model.recompute_granularity": "selective",
                                              "model.recompute_modules": ["mamba", "moe"]}},
        {"name": "one stopped", "stop_after": HALF},
        {"name": "one fp32", "dtype": "float32", "stop_after": 1},
        {"name": "mtp", "config": MTP | SHORT},
        {"name": "mtp stopped", "directory": "mtp -> mtp", "config": MTP | SHORT, "stop_after": HALF},
        {"name": "mtp -> mtp", "config": MTP | SHORT, "resume": True},
        {"name": "mtp micro-batch of 3", "config": {**MTP, **SHORT, "train.micro_batch_size": 3}},
    ], 1)  # fmt: skip
    shutil.copytree(folder / "one stopped", folder / "one -> one")
    shutil.copytree(folder / "one stopped", folder / "one -> fsdp2")
    resumed_at = launch([
        {"name": "ddp"},
        {"name": "fsdp2", "config": FSDP2},
        {"name": "fsdp2 recompute", "config": {**FSDP2, "model.recompute_granularity": "full"}, "stop_after": HALF},
        {"name": "ddp fp32", "dtype": "float32", "stop_after": 1},
        {"name": "mtp ddp", "config": MTP | SHORT},
        {"name": "mtp fsdp2", "config": MTP | SHORT | FSDP2, "stop_after": HALF},
        {"name": "mtp fsdp2", "config": MTP | SHORT | FSDP2, "resume": True},
        {"name": "fsdp2 fp32", "dtype": "float32", "config": FSDP2, "stop_after": 1},
        {"name": "ddp stopped", "directory": "ddp -> ddp", "stop_after": HALF},
        {"name": "ddp -> ddp", "resume": True},
        {"name": "fsdp2 stopped", "directory": "fsdp2 -> fsdp2", "config": FSDP2, "stop_after": HALF},
        {"name": "fsdp2 -> fsdp2", "config": FSDP2, "resume": True},
        {"name": "fsdp2 -> ddp -> one", "config": FSDP2, "stop_after": 6},
        {"name": "fsdp2 -> ddp -> one", "stop_after": 13, "resume": True},
        {"name": "one -> fsdp2", "config": FSDP2, "resume": True},
    ], 2)  # fmt: skip
    assert resumed_at == [HALF, HALF, HALF, 6, HALF]
    runs = [{"name": name, "resume": True} for name in ("one -> one", "fsdp2 -> ddp -> one")]
    assert launch(runs, 1) == [HALF, 13]
    return Launches(folder)


def test_the_expert_bias_moved_and_the_weights_learned(launches: Launches) -> None:
    """Otherwise equality would prove little."""
    bias = launches.weights("one")["backbone.layers.1.mixer.gate.e_score_correction_bias"]
    assert bias.abs().max() > 0.02 and bias.dtype == torch.float64
    losses = [record["loss"] for record in launches.metrics("one") if "loss" in record]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "name",
    ["micro-batch of 8", "micro-batch of 3", "chunks of 5", "ddp", "fsdp2", "one -> fsdp2", "fsdp2 -> ddp -> one"],
)
def test_results_do_not_depend_on_how_the_work_is_cut(launches: Launches, name: str) -> None:
    """float64, 20 steps: only the order of sums differs."""
    assert launches.farthest(name, "one") < 1e-9
    for ours, theirs in zip(launches.metrics(name), launches.metrics("one"), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "load_balancing_loss", "valid_loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9)


@pytest.mark.parametrize("name", ["mtp micro-batch of 3", "mtp ddp", "mtp fsdp2"])
def test_nor_do_those_of_multi_token_prediction_and_of_steps_of_two_lengths(launches: Launches, name: str) -> None:
    """A micro-batch of 3 divides 8 rows into 3, 3 and 2, and 32 short ones into 12, 12 and 8."""
    assert launches.farthest(name, "mtp") < 1e-9
    for ours, theirs in zip(launches.metrics(name), launches.metrics("mtp"), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm", "load_balancing_loss", "valid_loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9)


def test_losses_of_the_first_step_are_those_of_the_definition(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position by position: the trunk predicts token t+1, depth k token t+k+1; means over what there is to predict."""
    monkeypatch.syspath_prepend(WORKER.parent)
    torch.set_default_dtype(torch.float64)
    try:
        values = {**importlib.import_module("train_worker").BASE, **MTP}
        architecture = config_from_dict({k[6:]: v for k, v in values.items() if k.startswith("model.")})
        torch.manual_seed(1234)
        model = NemotronH(architecture)
        batch = BlendLoader(launches.folder / "data", 20, 160, 1234).next_batch(8)
        ids_BT = torch.cat([batch.input_ids_BL, batch.labels_BL[:, -1:]], 1)
        out = model(batch.input_ids_BL)
        losses = []
        for depth, logits_BLV in enumerate([out.logits, *out.mtp_logits]):
            terms = [
                -logits_BLV[b, t].log_softmax(-1)[ids_BT[b, t + depth + 1]] for b in range(8) for t in range(20 - depth)
            ]
            losses.append(sum(terms[1:], terms[0]) / len(terms))
        (losses[0] + 0.3 * (losses[1] + losses[2]) / 2 + 1e-2 * out.load_balancing_loss).backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    finally:
        torch.set_default_dtype(torch.float32)
    first = launches.metrics("mtp")[0]
    assert [first[key] for key in ("loss", "mtp_1_loss", "mtp_2_loss")] == pytest.approx([x.item() for x in losses])
    assert first["grad_norm"] == pytest.approx(norm.item())


def test_every_fourth_step_is_of_short_sequences(launches: Launches) -> None:
    lengths = [record["seq_length"] for record in launches.metrics("mtp") if "loss" in record]
    assert lengths == [20, 20, 20, 5] * 5


@pytest.mark.parametrize(
    ("name", "unbroken"),
    [
        ("recompute all", "one"),
        ("recompute some", "one"),
        ("one -> one", "one"),
        ("ddp -> ddp", "ddp"),
        ("fsdp2 -> fsdp2", "fsdp2"),
        ("mtp -> mtp", "mtp"),
    ],
)
def test_recomputing_and_resuming_change_no_bit(launches: Launches, name: str, unbroken: str) -> None:
    assert launches.farthest(name, unbroken) == 0
    assert launches.metrics(name) == launches.metrics(unbroken)  # the validation that was cut short, too


def test_recomputing_changes_no_bit_of_a_sharded_run(launches: Launches) -> None:
    assert launches.metrics("fsdp2 recompute") == launches.metrics("fsdp2")[:HALF]


@pytest.mark.parametrize("name", ["ddp fp32", "fsdp2 fp32"])
def test_the_first_step_in_fp32(launches: Launches, name: str) -> None:
    (ours, *_), (theirs, *_) = launches.metrics(name), launches.metrics("one fp32")
    for key in ("loss", "grad_norm", "load_balancing_loss"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6)


def test_a_checkpoint_holds_whole_tensors_whoever_wrote_it(launches: Launches) -> None:
    """DDP and FSDP2 at the same step: the same names, shapes and, but for the order of sums, values."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        path = f"checkpoints/step-00000014/{file}"
        one = load_file(launches.folder / "one" / path)
        for name in ("ddp", "fsdp2"):
            other = load_file(launches.folder / name / path)
            assert {key: tensor.shape for key, tensor in other.items()} == {k: t.shape for k, t in one.items()}
            assert max(float((other[key] - one[key]).abs().max()) for key in one) < 1e-9
    rng = load_file(launches.folder / "ddp" / "checkpoints/step-00000014/rng.safetensors")
    assert rng.keys() == {"rank0.cpu", "rank1.cpu"}
