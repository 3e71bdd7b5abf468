"""What goes to Megatron-Bridge and comes back: blends, folders of checkpoints, layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_runspec.config.loader import load_config
from nemo_runspec.errors import UserError
from nemotron.kit import PretrainBlend
from nemotron.kit.megatron import MegatronCheckpoint, check_world_size, last_iteration, megatron_blend
from nemotron.recipes.nano3 import __file__ as nano3
from nemotron.recipes.nano3.stage0_pretrain.megatron_schema import PretrainConfig

CONFIGS = Path(nano3).parent / "stage0_pretrain/config"


def config_with(name: str = "default", **groups: dict[str, Any]) -> PretrainConfig:
    """A shipped config under other values."""
    values = load_config(CONFIGS, name).data
    values["dataset"]["path"] = "data"
    for group, keys in groups.items():
        values[group] |= keys
    return PretrainConfig.model_validate(values)


@pytest.fixture
def data(tmp_path: Path) -> PretrainBlend:
    """Two sources: one of two streams, three times as large as each other, and one without held-out text."""
    sizes = {"a-train-0": 300, "a-train-1": 100, "a-valid-0": 8, "b-train-0": 50}
    for name, size in sizes.items():
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
        (tmp_path / f"{name}.idx").write_bytes(b"")
    sources = {
        "a": {"train": ["a-train-0", "a-train-1"], "valid": ["a-valid-0"]},
        "b": {"train": ["b-train-0"], "valid": []},
    }
    phases = [
        {"name": "first", "until": 0.9, "weights": {"a": 0.8, "b": 0.2}},
        {"name": "second", "until": 1.0, "weights": {"a": 1.0, "b": 0.0}},
    ]
    (tmp_path / "blend.json").write_text(json.dumps({"phases": phases, "sources": sources}))
    return PretrainBlend.model_construct(path=tmp_path, tokenizer_path=tmp_path)


def test_the_weight_of_a_source_is_dealt_out_to_its_streams_by_their_sizes(data: PretrainBlend) -> None:
    blend = megatron_blend(data, "first")
    assert [Path(prefix).name for prefix in blend.train[0]] == ["a-train-0", "a-train-1", "b-train-0"]
    assert blend.train[1] == pytest.approx([0.6, 0.2, 0.2])
    assert ([Path(prefix).name for prefix in blend.valid[0]], blend.valid[1]) == (["a-valid-0"], [0.8])
    assert len(megatron_blend(data, "second").train[0]) == 2  # a weight of 0 is no stream


def test_a_phase_has_to_be_named_where_there_are_several(data: PretrainBlend) -> None:
    with pytest.raises(UserError, match="has the phases first, second"):
        megatron_blend(data, None)
    with pytest.raises(UserError) as caught:
        megatron_blend(data, "frist")
    assert caught.value.hint == "did you mean first?"


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    assert last_iteration(tmp_path) == 0
    for name, whole in (("iter_0000200", True), ("iter_0001000", True), ("iter_0001200", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"weights")
        if whole:
            (tmp_path / name / ".metadata").write_bytes(b"written last")
    assert last_iteration(tmp_path) == 1000
    with pytest.raises(UserError, match="no whole Megatron checkpoint"):
        MegatronCheckpoint(path=tmp_path / "iter_0001200", num_steps=1200).save("half")


def test_gpus_that_do_not_fit_the_layout_are_refused() -> None:
    cfg = config_with()
    check_world_size(cfg.model, cfg.train, 128)  # 16 nodes: 128 replicas, 24 micro-batches of 1
    with pytest.raises(UserError, match="12 GPUs are no multiple of ETP x EP x PP = 8"):
        check_world_size(cfg.model, cfg.train, 12)
    with pytest.raises(UserError, match="3072 is no multiple of 40 replicas"):
        check_world_size(cfg.model, cfg.train, 40)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"train": {"train_iters": 100}}, "933,806 iterations would be that"),  # what some library recipes default to
        ({"train": {"global_batch_size": 1024}}, "2,801,418 iterations would be that"),
        ({"dataset": {"seq_length": 4096}}, "model.seq_length 8192 is not dataset.seq_length 4096"),
        ({"scheduler": {"lr_wsd_decay_iters": None}}, "the library would decay from the beginning"),
        ({"model": {"expert_model_parallel_size": 24}}, "24 does not divide the 128 experts"),
        ({"model": {"tensor_model_parallel_size": 16}}, "16 does not divide the 8 groups of Mamba"),
        ({"model": {"sequence_parallel": True}}, "TP is 1"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(groups: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_with(**groups)


@pytest.mark.parametrize("key", ["seq_length", "context_parallel_size", "recompute_granularity"])
def test_nothing_that_decides_the_training_is_inherited(key: str) -> None:
    values = load_config(CONFIGS, "default").data
    values["dataset"]["path"] = "data"
    del values["model"][key]
    with pytest.raises(ValidationError, match=key):
        PretrainConfig.model_validate(values)


def test_the_published_tokens() -> None:
    """25 T, of which 23.5 T in phase 1; warm-up 8.4 B; the decay takes the last 5 T (arXiv 2512.20848, section 2.3)."""
    first, second = config_with("default"), config_with("phase2")
    batch = 3072 * 8192
    assert first.train.train_iters * batch == pytest.approx(23.5e12, rel=1e-6)
    assert second.train.train_iters * batch == pytest.approx(25e12, rel=1e-6)
    assert second.scheduler == first.scheduler
    assert first.scheduler.lr_warmup_iters * batch == pytest.approx(8.4e9, rel=1e-3)
    assert first.scheduler.lr_wsd_decay_iters == pytest.approx(5e12 / batch, abs=1)
    assert first.scheduler.lr_decay_iters == second.train.train_iters
