"""What SFT refuses before it begins: data without a trained token, and too little memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError
from nemotron.recipes.nano3.stage1_sft import train as script
from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig
from nemotron.recipes.super3.stage3_quantize.measure import open_held_out
from nemotron.stack.models import NemotronH
from nemotron.stack.training import memory
from nemotron.stack.training.distributed import ALONE
from nemotron.stack.training.lora import count_lora_parameters


def write_split(folder: Path, split: str, trained: list[int]) -> Path:
    """Rows of four tokens, of which so many are trained; the path of the split."""
    (folder / split).mkdir(parents=True)
    columns = {
        "input_ids": pa.array([[1, 2, 3, 4]] * len(trained), pa.list_(pa.int32())),
        "loss_mask": pa.array([[1] * n + [0] * (4 - n) for n in trained], pa.list_(pa.uint8())),
        "seq_start_id": pa.array([[0]] * len(trained), pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(columns), folder / split / "00000.parquet")
    return folder / split


def config_of(**groups: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "run": {"model": "none", "data": "none"}, "dataset": {"path": "none"},
            "checkpoint": {"pretrained_checkpoint": "none"}, "model": {}, "optimizer": {"lr": 1e-3},
            "train": {"train_iters": 4, "global_batch_size": 1, "eval_iters": 2, "eval_interval": 2},
            "scheduler": {"lr_warmup_iters": 1}, "logger": {}, "dist": {}, **groups,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("train", "valid", "complaint"),
    [
        ([0, 0], [2], "train: no token is trained: loss_mask is 0 for all 8 tokens"),
        ([2], [0, 0, 0], "valid: no token is trained: loss_mask is 0 for all 12 tokens"),
        # Two batches of one row are validated on.
        ([2], [0, 0, 3], "valid: no token is trained in the first 2 of 3 rows, all that train.eval_iters reads"),
    ],
)
def test_data_without_a_trained_token_is_refused(
    train: list[int], valid: list[int], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_path, valid_path = write_split(tmp_path, "train", train), write_split(tmp_path, "valid", valid)
    pack = SimpleNamespace(
        ref="data:v1", path=tmp_path, tokenizer_path=None, train_path=train_path, valid_path=valid_path, seq_len=4
    )
    monkeypatch.setattr(script.SFTPack, "load", lambda path: pack)
    monkeypatch.setattr(script.Checkpoint, "load", lambda path: SimpleNamespace(ref="model:v1", path=tmp_path))
    cfg = config_of(peft={})
    with pytest.raises(UserError) as refused:
        script.open_data(cfg, ALONE)
    assert str(refused.value).splitlines()[0] == f"{tmp_path}/{complaint}"


def test_data_of_which_nothing_was_held_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = SimpleNamespace(ref="data:v1", path=tmp_path, tokenizer_path=None, train_path=tmp_path, valid_path=None)
    monkeypatch.setattr(script.SFTPack, "load", lambda path: pack)
    monkeypatch.setattr(script.Checkpoint, "load", lambda path: SimpleNamespace(ref="model:v1", path=tmp_path))
    with pytest.raises(UserError, match="data:v1 has no validation rows") as refused:
        script.open_data(config_of(peft={}), ALONE)
    assert "valid_fraction" in str(refused.value.hint)


def test_quantisation_refuses_held_out_rows_of_which_it_measures_no_token(tmp_path: Path) -> None:
    pack = SimpleNamespace(ref="data:v1", valid_path=write_split(tmp_path, "valid", [0] * 8 + [1]), seq_len=4)
    with pytest.raises(UserError, match=r"in the first 8 of 9 rows, all that dataset\.eval_rows reads"):
        open_held_out(pack, 3, seed=0)  # a pass takes 8 rows
    assert open_held_out(pack, 9, seed=0).num_rows == 9


@pytest.mark.parametrize(("bf16", "bytes_a_value"), [(True, 2), (False, 4)])
def test_frozen_weights_need_the_memory_that_they_take(
    tmp_path: Path, small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, bf16: bool,
    bytes_a_value: int,
) -> None:  # fmt: skip
    model = small_model("M*-")  # no router, whose bias is never bf16
    model.save_pretrained(tmp_path, dtype="bfloat16")
    cfg = config_of(peft={"peft_scheme": "lora"}, model={"moe_router_bias_update_rate": 0})
    session: Any = SimpleNamespace(
        ranks=ALONE, bf16=bf16, precision="bf16_mixed" if bf16 else "fp32",
        checkpoints=SimpleNamespace(async_save=False),
    )  # fmt: skip
    data: Any = SimpleNamespace(base=SimpleNamespace(path=tmp_path), pack=SimpleNamespace(seq_len=4), loader=None)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(memory, "activation_bytes", lambda *_: 0)
    with pytest.raises(UserError) as refused:
        script.train(cfg, session, data)
    frozen = bytes_a_value * sum(parameter.numel() for parameter in model.parameters())
    state = frozen + (16 + 4) * count_lora_parameters(model.config, cfg.peft)  # Adam's, and the best so far
    assert f"about {human_size(state)} of memory" in str(refused.value)
