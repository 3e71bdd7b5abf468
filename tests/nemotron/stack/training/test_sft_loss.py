"""The two means of SFT, over tokens and over conversations, do not depend on packing, micro-batches or ranks.

The loop is that of the script, on a hybrid of every kind of block with multi-token prediction, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nemo_runspec.errors import UserError
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.loaders import PackedLoader

WORKER = Path(__file__).with_name("sft_worker.py")
CONFIG = NemotronHConfig(
    "ME*-", vocab_size=48, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, mamba_num_heads=2,
    mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=8, n_routed_experts=5, moe_intermediate_size=8,
    moe_shared_expert_intermediate_size=8, moe_latent_size=6, intermediate_size=16, initializer_range=0.2,
    num_nextn_predict_layers=1,
)  # fmt: skip
# Sequences of each conversation: (tokens of the prompt, tokens of the answer). The third lies in three sequences.
CONVERSATIONS = [[(3, 2)], [(5, 17)], [(4, 3), (6, 9), (2, 1)], [(7, 5)], [(2, 11), (9, 4)], [(3, 1)]]
# Which sequences, counted through, lie in which row.
PACKINGS = {
    "two rows": [[0, 3, 8, 1], [2, 4, 5, 6, 7]],
    "four rows": [[7, 4], [1], [6, 0, 3], [8, 2, 5]],
    "a row each": [[i] for i in range(9)] + [[]],
}
RUNS = [
    ("two rows", 2, 1), ("two rows", 1, 2), ("four rows", 4, 1), ("four rows", 3, 1), ("four rows", 1, 2),
    ("a row each", 4, 1), ("a row each", 2, 2),
]  # fmt: skip


@dataclass
class Sequence:
    """Token ids, and a mask aligned to labels."""

    ids: list[int]
    mask: list[int]
    conversation: int


def sequences() -> list[Sequence]:
    """Those of CONVERSATIONS: the answer is trained, its first token by the last of the prompt."""
    rng = np.random.default_rng(1)
    return [
        Sequence(rng.integers(1, 48, prompt + answer).tolist(), [0] * (prompt - 1) + [1] * answer + [0], conversation)
        for conversation, parts in enumerate(CONVERSATIONS)
        for prompt, answer in parts
    ]


def write_packing(folder: Path, rows: list[list[int]], weights: dict[int, float] | None = None) -> None:
    """Parquet as data preparation writes it. `weights`: of conversations, 1 for the others."""
    folder.mkdir()
    parts, totals = sequences(), [sum(answer for _, answer in parts) for parts in CONVERSATIONS]
    table: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "loss_mask", "seq_start_id", "conversation_tokens")
    }
    for row in rows:
        chosen = [parts[i] for i in row] or [Sequence([1, 1], [0, 0], 0)]  # nothing to train on
        table["input_ids"].append([token for part in chosen for token in part.ids])
        of_tokens = [
            mask if weights is None else mask * weights.get(part.conversation, 1.0)
            for part in chosen
            for mask in part.mask
        ]
        table["loss_mask"].append(of_tokens)
        table["seq_start_id"].append(np.cumsum([0] + [len(part.ids) for part in chosen])[:-1].tolist())
        table["conversation_tokens"].append([totals[part.conversation] for part in chosen])
    pq.write_table(pa.table(table), folder / "rows.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, launch_worker: Callable[..., str]) -> Path:
    """All runs, of both reductions."""
    out = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)
    NemotronH(CONFIG).double().save_pretrained(out / "base")
    for name, rows in PACKINGS.items():
        write_packing(out / name, rows)
    lora = {"peft": {"peft_scheme": "lora", "dim": 4}, "train": {"micro_batch_size": 1}}
    for processes in (1, 2):
        runs = [
            {"name": f"{reduction} {packing} {micro} {processes}", "packing": packing,
             "config": {"train": {"loss_reduction": reduction, "micro_batch_size": micro}}}
            for reduction in ("token", "conversation") for packing, micro, ranks in RUNS if ranks == processes
        ]  # fmt: skip
        runs += [
            {"name": f"lora {processes} {sharded}", "packing": "four rows",
             "config": {**lora, "dist": {"use_torch_fsdp2": sharded}}}
            for sharded in (False, True)[:processes]
        ]  # fmt: skip
        if processes == 1:
            stopped = {"name": "lora resumed", "packing": "four rows", "config": lora}
            runs += [{**stopped, "stop_after": 3}, {**stopped, "resume": True}]
        launch_worker(WORKER, out, runs, processes)
    return out


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics0.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["token", "conversation"])
def test_every_way_to_cut_the_same_conversations_is_the_same_training(folder: Path, reduction: str) -> None:
    names = [f"{reduction} {packing} {micro} {ranks}" for packing, micro, ranks in RUNS]
    first, base = load_file(folder / f"{names[0]}.safetensors"), load_file(folder / "base" / "model.safetensors")
    assert max(float((first[name] - base[name]).abs().max()) for name in base if name in first) > 0.01  # it learned
    for name in names[1:]:
        weights = load_file(folder / f"{name}.safetensors")
        assert max(float((weights[key] - first[key]).abs().max()) for key in first) < 1e-6, name
        for one, other in zip(metrics(folder, names[0]), metrics(folder, name), strict=True):
            for key in {"loss", "mtp_1_loss", "mtp_2_loss", "grad_norm", "valid_loss"} & one.keys():
                assert one[key] == pytest.approx(other[key], rel=1e-6), (name, key)


def reference(reduction: str) -> dict[str, float]:
    """Losses of the initial model, from their definition: each sequence by itself, nothing packed or padded."""
    torch.manual_seed(0)
    model = NemotronH(CONFIG).double()
    nats: dict[int, list[torch.Tensor]] = {}
    mtp: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for part in sequences():
            ids = torch.tensor([part.ids])
            out = model(ids, mtp_depths=2)
            labels, trained = ids[0, 1:], torch.tensor(part.mask[:-1]).bool()
            losses = F.cross_entropy(out.logits[0, :-1], labels, reduction="none")
            nats.setdefault(part.conversation, []).append(losses[trained])
            for depth, logits in enumerate(out.mtp_logits, start=1):  # at t it says what t + depth + 1 is
                further = F.cross_entropy(logits[0, : -1 - depth], labels[depth:], reduction="none")
                mtp[depth - 1].append(further[trained[depth:]])
    of_conversations = [torch.cat(parts) for parts in nats.values()]
    loss = (
        torch.cat(of_conversations).mean()
        if reduction == "token"
        else torch.stack([n.mean() for n in of_conversations]).mean()
    )
    return {"loss": float(loss)} | {f"mtp_{k}_loss": float(torch.cat(of).mean()) for k, of in enumerate(mtp, start=1)}


@pytest.mark.slow
def test_the_losses_are_those_of_their_definitions(folder: Path) -> None:
    by_token, by_conversation = reference("token"), reference("conversation")
    assert abs(by_token["loss"] - by_conversation["loss"]) > 0.01
    for reduction, expected in (("token", by_token), ("conversation", by_conversation)):
        first = metrics(folder, f"{reduction} four rows 3 1")[0]
        assert {key: first[key] for key in expected} == pytest.approx(expected, rel=1e-7)
        assert first["trained_tokens"] == sum(answer for parts in CONVERSATIONS for _, answer in parts)


def test_a_conversation_keeps_its_weight_and_a_part_of_it_counts_as_a_part(tmp_path: Path) -> None:
    write_packing(tmp_path / "data", [[0, 2, 3], [4, 5, 6, 1], [7, 8]], weights={2: 0.5})
    loader = PackedLoader(tmp_path / "data", None, 0, reduction="conversation")
    first, rest = loader.all_batches(1), loader.all_batches(3)
    # Of conversation 2 (13 trained tokens, weight 0.5) the first row has 3 + 9.
    assert float(next(first).loss_mask_BL.sum()) == pytest.approx(1 + 0.5 * 12 / 13)
    assert float(next(rest).loss_mask_BL.sum()) == pytest.approx(5 + 0.5)


def test_data_without_the_numbers_of_its_conversations_is_refused(tmp_path: Path) -> None:
    write_packing(tmp_path / "data", PACKINGS["two rows"])
    file = tmp_path / "data" / "rows.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("conversation_tokens"), file)
    with pytest.raises(UserError, match="needs the column conversation_tokens"):
        PackedLoader(tmp_path / "data", None, 0, reduction="conversation")
    pq.write_table(table.set_column(3, "conversation_tokens", pa.array([[1], [1]])), file)
    with pytest.raises(UserError, match="not a number from 1 on for each sequence"):
        PackedLoader(tmp_path / "data", None, 0, reduction="conversation")


@pytest.mark.slow
def test_adapters_are_the_same_after_a_stop_and_on_two_ranks_that_share_the_frozen_model(folder: Path) -> None:
    one, base = load_file(folder / "lora 1 False.safetensors"), load_file(folder / "base" / "model.safetensors")
    assert all(torch.equal(one[name], base[name]) for name in base if name in one)
    adapters = {name for name in one if "lora_" in name}
    assert len(adapters) == 2 * (2 + 2 + 4 + 2 + 4 + 2)  # M, E, *, -, and * and E of the block that predicts further
    assert min(float(one[name].abs().max()) for name in adapters) > 1e-3  # all of them moved away from zero
    resumed = load_file(folder / "lora resumed.safetensors")
    assert all(torch.equal(resumed[name], one[name]) for name in one)
    for name in ("lora 2 False", "lora 2 True"):
        weights = load_file(folder / f"{name}.safetensors")
        assert weights.keys() == one.keys()
        assert max(float((weights[key] - one[key]).abs().max()) for key in one) < 1e-9
