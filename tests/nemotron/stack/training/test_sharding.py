"""Two gloo ranks that share a model get the gradients and expert loads of one process that has it whole."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.sharding import matrix_modules, recompute_activations

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    "n_routed_experts": 5, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "intermediate_size": 32, "initializer_range": 0.1,
}  # fmt: skip
LATENT_WITH_MTP = {"moe_latent_size": 8, "num_nextn_predict_layers": 1}

SCRIPT = """
import itertools, json, sys, torch
from pathlib import Path
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.checkpoint import optimizer_tensors
from nemotron.stack.training.distributed import *
from nemotron.stack.training.losses import mtp_loss, next_token_loss
from nemotron.stack.training.sharding import *

ranks, results = start_distributed(), {}
sizes, latent = json.loads(sys.argv[2]), json.loads(sys.argv[3])
ids = torch.randint(0, 64, (4, 21), generator=torch.Generator().manual_seed(1))

def backward(model, rows, bf16):
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = model(rows[:, :-1])
    loss = next_token_loss(out.logits, rows[:, 1:]) + 0.01 * out.load_balancing_loss
    if out.mtp_logits:
        loss = loss + 0.3 * mtp_loss(out.mtp_logits, rows[:, 1:])
    (loss * len(rows) / len(ids)).backward()

for more, bf16, recompute in itertools.product(({}, latent), (False, True), (None, "full")):
    config = NemotronHConfig("ME*-E", **sizes, **more)
    torch.manual_seed(0)
    whole, shared = NemotronH(config), NemotronH(config)
    shared.load_state_dict(whole.state_dict())
    recompute_activations(shared, recompute)
    shard_model(shared, ranks, bf16)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.0, momentum=0.9)
    for row in ids:
        backward(whole, row[None], bf16)
    first, second = ids[ranks.rank :: 2]
    sync_gradients_in_backward(shared, False)
    backward(shared, first[None], bf16)
    sync_gradients_in_backward(shared, True)
    backward(shared, second[None], bf16)
    loads = [moe.gate.expert_load.clone() for moe in shared.moe_blocks()]
    sum_over_ranks(loads)
    optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        shared(first[None, :-1])  # leaves the root's parameters whole
    moments = optimizer_tensors(shared, optimizer)
    gradients = {name: full_tensor(parameter.grad) for name, parameter in shared.named_parameters()}
    errors = {
        name: ((gradients[name] - p.grad).norm() / p.grad.norm().clamp(min=1e-12)).item()
        for name, p in whole.named_parameters()
    }
    results[f"latent {bool(more)}, bf16 {bf16}, recompute {recompute}"] = {
        "error": max(errors.values()),
        "loads": all(torch.equal(a, m.gate.expert_load) for a, m in zip(loads, whole.moe_blocks(), strict=True)),
        "norm": (clip_gradients(shared, 0.1) / clip_gradients(whole, 0.1)).item(),
        "share": sum(p.to_local().numel() for p in shared.parameters()) / whole.num_parameters()[0],
        "same": all(torch.equal(whole.state_dict()[name], w) for name, w in whole_weights(shared, ranks).items()),
        "moments": {name.partition(":")[0] for name in moments} == {name for name, _ in whole.named_parameters()},
        "copied": [whole_model(model, ranks) is model for model in (whole, shared)],
    }
stop_distributed()
if ranks.is_main:
    Path(sys.argv[1]).write_text(json.dumps(results))
"""


@pytest.mark.slow
def test_sharded_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    script, out = tmp_path / "ranks.py", tmp_path / "results.json"
    script.write_text(textwrap.dedent(SCRIPT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*torchrun, script, out, json.dumps(SIZES), json.dumps(LATENT_WITH_MTP)]
    done = subprocess.run(command, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert len(results) == 8
    for case, found in results.items():
        assert found["error"] < 1e-6, case  # bf16 too: autocast rounds the same weights, and sums are fp32
        assert found["loads"] and found["same"] and found["moments"] and found["copied"] == [True, False], case
        assert found["norm"] == pytest.approx(1, abs=1e-6), case
        assert 0.5 <= found["share"] < 0.56, case  # A_log and the like, of a few numbers, divide unevenly


def test_what_travels_as_bf16_is_matrices_and_nothing_else() -> None:
    model = NemotronH(NemotronHConfig("ME*-", **SIZES, **LATENT_WITH_MTP))
    rounded = {
        f"{index}.{name}"
        for index, block in enumerate(model.blocks())
        for part in matrix_modules(block)
        for name, parameter in block.named_parameters()
        if any(parameter is of_part for of_part in part.parameters())
    }
    names = {f"{index}.{name}" for index, block in enumerate(model.blocks()) for name, _ in block.named_parameters()}
    assert {name.split(".mixer.")[-1] for name in names - rounded} == {
        *(f"{index}.norm.weight" for index in range(4)),
        "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight", "gate.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("granularity", "modules", "symbols"),
    [(None, ["moe"], ""), ("full", ["moe"], "ME*-*E"), ("selective", ["moe", "mamba"], "MEE")],
)
def test_blocks_chosen_for_recomputing(granularity: object, modules: list[str], symbols: str) -> None:
    config = NemotronHConfig("ME*-", **SIZES, **LATENT_WITH_MTP)
    model = NemotronH(config)
    recompute_activations(model, granularity, modules)  # type: ignore[arg-type]
    assert model.mtp is not None
    blocks = [*model.blocks(), *model.mtp.blocks()]
    chosen = zip(config.hybrid_override_pattern + config.mtp_hybrid_override_pattern, blocks, strict=True)
    assert "".join(symbol for symbol, block in chosen if block.recompute) == symbols


@pytest.mark.parametrize("packed", [False, True])
def test_recomputing_frees_activations_and_changes_no_bit(packed: bool) -> None:
    """Gradients, loads and losses equal, with fewer tensors kept for the backward pass."""
    torch.manual_seed(0)
    model = NemotronH(NemotronHConfig("ME*-E", **SIZES, **LATENT_WITH_MTP))
    ids = torch.randint(0, 64, (2, 24))
    seq_idx = torch.arange(24).expand(2, 24) // 10 if packed else None
    found = []
    for granularity in (None, "full"):
        recompute_activations(model, granularity)  # type: ignore[arg-type]
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(ids, seq_idx)
        (out.logits.square().mean() + out.load_balancing_loss + out.mtp_logits[1].square().mean()).backward()
        loads = [moe.gate.expert_load.clone() for moe in model.moe_blocks()]
        found.append((kept, out.logits.detach(), loads, [p.grad for p in model.parameters()]))
        model.zero_grad()
        for moe in model.moe_blocks():
            moe.gate.expert_load.zero_()
    (kept, logits, loads, gradients), (kept_less, logits_again, loads_again, gradients_again) = found
    assert kept_less < kept / 2
    assert torch.equal(logits, logits_again)
    assert all(torch.equal(a, b) for a, b in zip(loads, loads_again, strict=True)) and loads[0].sum() == 2 * 24 * 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
