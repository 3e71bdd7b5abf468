"""What goes to Megatron-Bridge and comes back: blends, folders of checkpoints, layouts; the published configs."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import load_config
from nemo_runspec.errors import Preempted, UserError
from nemo_runspec.runspec import parse
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter
from nemotron.kit import PretrainBlend
from nemotron.kit.megatron import (
    MegatronCheckpoint,
    check_world_size,
    hand_on,
    last_iteration,
    megatron_blend,
    preemptible,
    register_checkpoint,
    warn_of_context_parallelism,
)
from nemotron.kit.schemas.megatron import packing_multiple
from nemotron.recipes import __file__ as recipes
from nemotron.recipes.nano3.stage0_pretrain.megatron_schema import PretrainConfig
from nemotron.recipes.nano3.stage1_sft.megatron_schema import SFTConfig

RECIPES = Path(recipes).parent
CONFIGS = RECIPES / "nano3/stage0_pretrain/config"
SUPER3, NANO2 = RECIPES / "super3/stage0_pretrain/config", RECIPES / "nano2/stage0_pretrain/config/training"


def values_with(folder: Path, name: str, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Values of a shipped config, some of them others."""
    values = load_config(folder, name).data
    values["dataset"]["path"] = "data"
    for key in ("family", "env"):
        values["run"].pop(key, None)  # the toolkit's
    for group, keys in groups.items():
        values[group] |= keys
    return dict(values)


def config_with(name: str = "default", folder: Path = CONFIGS, **groups: dict[str, Any]) -> PretrainConfig:
    """A shipped config of pretraining under other values."""
    return PretrainConfig.model_validate(values_with(folder, name, groups))


def sft_with(family: str = "nano3", **groups: dict[str, Any]) -> SFTConfig:
    """A shipped config of fine-tuning under other values."""
    return SFTConfig.model_validate(values_with(RECIPES / family / "stage1_sft/config", "default", groups))


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


@pytest.mark.slow  # to import Megatron-Core
def test_the_library_writes_its_indices_where_it_is_told_and_not_into_the_artifact(tmp_path: Path) -> None:
    """Megatron-Core's own dataset: without `path_to_cache` its shuffled indices would go beside the streams."""
    datasets = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    (tmp_path / "data").mkdir()
    for name in ("web-train", "web-valid"):
        with IndexedDatasetWriter(tmp_path / "data" / name, np.uint16) as writer:
            for document in range(50):
                writer.add_documents(np.full(100, 3 + document), [100])
    blend_file = {
        "phases": [{"name": "all", "until": 1.0, "weights": {"web": 1.0}}],
        "sources": {"web": {"train": ["web-train"], "valid": ["web-valid"]}},
    }
    (tmp_path / "data/blend.json").write_text(json.dumps(blend_file))
    data = PretrainBlend.model_construct(path=tmp_path / "data", tokenizer_path=tmp_path)
    before = sorted((tmp_path / "data").rglob("*"))
    blend = megatron_blend(data, None)
    tokenizer = SimpleNamespace(eod=2, pad=0, unique_identifiers={}, vocab_size=2048)
    config = datasets.GPTDatasetConfig(
        random_seed=1, sequence_length=32, blend_per_split=[blend.train, blend.valid, None], tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        path_to_cache=str(tmp_path / "indices"),
    )  # fmt: skip
    train, _, _ = builder.BlendedMegatronDatasetBuilder(
        datasets.GPTDataset, [40, 8, None], lambda: True, config
    ).build()
    assert len(train[0]["tokens"]) == 32 and len(train) >= 40
    assert sorted((tmp_path / "data").rglob("*")) == before and any((tmp_path / "indices").iterdir())


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
    with pytest.raises(UserError, match="12 GPUs that train are no multiple of ETP x EP x PP = 8"):
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
        ({"model": {"tensor_model_parallel_size": 2}}, "2 with experts: .* with model.sequence_parallel: true alone"),
        ({"model": {"expert_tensor_parallel_size": 3}}, "3 does not divide the 1,856 columns of an expert"),
        ({"model": {"pipeline_model_parallel_size": 3}}, "3 does not divide the 52 blocks"),
        ({"model": {"context_parallel_size": 24}}, "24 does not divide the 64 heads of Mamba"),
        # 8 heads and 1 group of Mamba in a TP part: CP can copy the group, but not deal out half a head.
        ({"model": {"tensor_model_parallel_size": 8, "context_parallel_size": 16}}, "16 does not divide the 8 heads"),
        ({"model": {"moe_aux_loss_coeff": None}}, "moe_aux_loss_coeff is missing: the library's own value"),
        ({"model": {"mtp_num_layers": 1}}, "mtp_num_layers is of no meaning for nemotron_3_nano"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(groups: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_with(**groups)


@pytest.mark.parametrize(
    ("group", "key"),
    [("model", "seq_length"), ("model", "context_parallel_size"), ("model", "recompute_granularity"),
     ("ddp", "grad_reduce_in_fp32")],
)  # fmt: skip
def test_nothing_that_decides_the_training_is_inherited(group: str, key: str) -> None:
    values = load_config(CONFIGS, "default").data
    values["dataset"]["path"] = "data"
    del values[group][key]
    with pytest.raises(ValidationError, match=key):
        PretrainConfig.model_validate(values)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nemotron_3_nanno_pretrain_config", "did you mean nemotron_3_nano"),
        ("nemotron_3_nano_sft_config", "_pretrain_"),
    ],
)
def test_a_recipe_of_unknown_dimensions_or_of_another_step_is_refused(recipe: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PretrainConfig.model_validate(values_with(CONFIGS, "default", {}) | {"recipe": recipe})


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


def test_the_published_tokens_of_super() -> None:
    """20 and 5 T; warm-up 200 B, decay over the last 5 T; 34 and 17 B of 1M tokens (arXiv 2604.12374, section 2)."""
    first, second = config_with("phase1", SUPER3), config_with("phase2", SUPER3)
    assert config_with("default", SUPER3) == first.model_copy(
        update={"run": first.run.model_copy(update={"config": "default"})}
    )
    batch = 3072 * 8192
    assert first.train.train_iters * batch == pytest.approx(20e12, rel=1e-6)
    assert second.train.train_iters * batch == pytest.approx(25e12, rel=1e-6)
    assert second.train.train_iters - (second.scheduler.lr_wsd_decay_iters or 0) == first.train.train_iters
    assert first.scheduler.lr_warmup_iters * batch == pytest.approx(200e9, rel=1e-4)
    assert first.optimizer.min_lr == pytest.approx(first.optimizer.lr / 100)
    for name, tokens in (("long_context_1m", 34e9), ("long_context_mixed", 17e9)):
        long = config_with(name, SUPER3)
        assert long.train.train_iters * 16 * 2**20 == pytest.approx(tokens, rel=1e-3)
        assert (long.optimizer.lr, long.scheduler.lr_decay_style) == (4.5e-6, "constant")


def test_the_published_tokens_of_nano_2() -> None:
    """20 T, whose data change at 60 % and 90 %; the decay takes 3.6 T; then 18.9 B (arXiv 2508.14444, section 2)."""
    phases, batch = [config_with(f"phase{number}", NANO2) for number in (1, 2, 3)], 768 * 8192
    assert [each.train.train_iters * batch / 20e12 for each in phases] == pytest.approx([0.6, 0.9, 1.0], rel=1e-6)
    assert (phases[2].scheduler.lr_wsd_decay_iters or 0) * batch == pytest.approx(3.6e12, rel=1e-6)
    assert all(each.scheduler == phases[0].scheduler for each in phases)
    assert config_with("long_context", NANO2).train.train_iters * 12 * 2**19 == pytest.approx(18.9e9, rel=1e-3)


@pytest.mark.parametrize(
    ("folder", "names", "script"),
    [
        (CONFIGS, ("default", "phase2", "long_context"), "nano3/stage0_pretrain"),
        (SUPER3, ("default", "phase2", "long_context_1m", "long_context_mixed"), "nano3/stage0_pretrain"),
        (NANO2, ("phase1", "phase2", "phase3", "long_context"), "nano3/stage0_pretrain"),
        (RECIPES / "nano3/stage1_sft/config", ("default",), "nano3/stage1_sft"),
        (RECIPES / "super3/stage1_sft/config", ("default",), "nano3/stage1_sft"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_nodes_that_a_config_asks_for_fit_its_layout(folder: Path, names: tuple[str, ...], script: str) -> None:
    block = parse(RECIPES / script / "train_megatron.py").resources
    schema = SFTConfig if "sft" in script else PretrainConfig
    for name in names:
        asked = load_config(folder, name).data["run"].get("env") or {}
        gpus = asked.get("nodes", block.nodes) * asked.get("gpus_per_node", block.gpus_per_node)
        cfg = schema.model_validate(values_with(folder, name, {}))
        check_world_size(cfg.model, cfg.train, gpus)


def test_what_is_published_of_fine_tuning() -> None:
    """Nano: 13,000 steps of 64 rows of 256k, warm-up 800; Super: some 80 B tokens, warm-up of 30,000 samples."""
    nano, super3 = sft_with("nano3"), sft_with("super3")
    assert (nano.train.train_iters, nano.scheduler.lr_warmup_iters, nano.optimizer.lr) == (13_000, 800, 5e-5)
    assert super3.train.train_iters * 64 * 2**18 == pytest.approx(80e9, rel=1e-3)
    assert super3.scheduler.lr_warmup_iters * 64 == pytest.approx(30_000, abs=64)
    for each in (nano, super3):
        assert (each.train.global_batch_size, each.dataset.seq_length) == (64, 2**18)


@pytest.mark.parametrize("family", ["nano3", "super3"])
def test_the_packed_data_is_that_of_the_layout(family: str) -> None:
    sft = sft_with(family)
    data = load_config(RECIPES / "data/pack/config", f"{family}_sft_256k").data
    assert sft.run.data == data["run"]["output"]
    assert sft.dataset.seq_length == data["packing"]["seq_length"]
    assert packing_multiple(sft.model) == data["packing"]["pad_seq_to_mult"]


@pytest.mark.parametrize(("tensor", "context", "multiple"), [(1, 1, 1), (8, 1, 1), (1, 2, 4), (4, 2, 8), (8, 8, 64)])
def test_the_multiple_that_packed_conversations_take(tensor: int, context: int, multiple: int) -> None:
    """Two of 2 CP pieces go to a GPU, and what it has into TP parts: a row of L tokens, L / CP / TP a GPU."""
    layout = {"tensor_model_parallel_size": tensor, "context_parallel_size": context, "sequence_parallel": tensor > 1}
    assert packing_multiple(sft_with(model=layout).model) == multiple


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"train": {"train_iters": 100}}, "13,000 iterations would be that"),
        ({"train": {"micro_batch_size": 2}}, "micro_batch_size"),
        ({"model": {"calculate_per_token_loss": False}}, "calculate_per_token_loss"),
        ({"checkpoint": {"pretrained_checkpoint": None}}, "pretrained_checkpoint"),
        ({"checkpoint": {"load": "elsewhere"}}, "load"),
        ({"model": {"seq_length": 4096}}, "model.seq_length 4096 is not dataset.seq_length 262144"),
    ],
)
def test_fine_tuning_that_the_library_does_otherwise_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        sft_with(**groups)


def test_a_block_of_mtp_that_is_never_applied_is_refused() -> None:
    """Megatron-Core builds it, and asserts in its first forward pass that there is a depth (hybrid_model.py)."""
    with pytest.raises(ValidationError, match="builds a block, mtp_num_layers 0 never applies it"):
        sft_with("super3", model={"mtp_num_layers": 0})


def test_context_parallelism_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_context_parallelism(config_with().model)
    assert capsys.readouterr().err == ""
    warn_of_context_parallelism(sft_with().model)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: context_parallel_size 8 with Mamba")


def test_a_field_of_another_version_is_an_error() -> None:
    target = SimpleNamespace(lr=0.1)
    hand_on({"lr": 0.2}, target, "optimizer")
    assert target.lr == 0.2
    with pytest.raises(UserError, match=r"optimizer\.lrr: SimpleNamespace of this Megatron-Bridge has no such field"):
        hand_on({"lrr": 0.2}, target, "optimizer")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of signals, as they were."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_leaving_with_a_checkpoint_before_the_end_requeues(tmp_path: Path) -> None:
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(number))
    with pytest.raises(SystemExit), preemptible(tmp_path):
        sys.exit(0)  # nothing is saved yet
    (tmp_path / "iter_0000200").mkdir()
    (tmp_path / "iter_0000200/.metadata").write_bytes(b"")
    with pytest.raises(SystemExit), preemptible(tmp_path):
        sys.exit(1)  # a failure, whatever is saved
    with pytest.raises(Preempted) as caught, preemptible(tmp_path):
        signal.raise_signal(signal.SIGUSR1)  # what Slurm sends; the library listens to SIGTERM
        sys.exit(0)
    assert heard == [signal.SIGTERM] and caught.value.checkpoint == tmp_path / "iter_0000200"


def checkpoint_in(folder: Path, iteration: int) -> None:
    """As Megatron-Bridge leaves one: the folder, and then its note."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", "common.pt", "run_config.yaml", ".metadata"):
        (path / name).write_text(f"{name} of {iteration}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_checkpoints_of_a_run_elsewhere_are_published_as_they_come(tmp_path: Path) -> None:
    folder, registry = tmp_path / "saves", Registry(tmp_path / "artifacts")
    folder.mkdir()
    assert register_checkpoint(folder, "mine", registry) is None  # nothing is noted yet
    checkpoint_in(folder, 200)
    first = register_checkpoint(folder, "mine", registry)
    assert first is not None and (first.ref, first.num_steps) == ("mine:1", 200)
    damaged = registry.publish("mine", folder / "latest_checkpointed_iteration.txt", {})
    (damaged.directory / "artifact.json").write_text("{")  # in the way of nothing
    assert register_checkpoint(folder, "mine", registry) is None
    checkpoint_in(folder, 400)
    second = register_checkpoint(folder, "mine", registry)
    assert second is not None and (second.ref, second.num_steps) == ("mine:3", 400)
    assert (second.path / "__0_0.distcp").samefile(folder / "iter_0000400/__0_0.distcp")  # linked, not copied
    shutil.rmtree(folder / "iter_0000200")  # as `most_recent_k` does
    assert MegatronCheckpoint.load(path=first.path).num_steps == 200
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000400", "latest_checkpointed_iteration.txt"]


def test_a_note_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "artifacts")
    checkpoint_in(tmp_path, 200)
    (tmp_path / "iter_0000200/.metadata").unlink()
    with pytest.raises(UserError, match=r"notes iteration 200, and .*iter_0000200 is no whole Megatron checkpoint"):
        register_checkpoint(tmp_path, "mine", registry)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(UserError, match="holds 'release', not the number of an iteration"):
        register_checkpoint(tmp_path, "mine", registry)
    assert registry.versions("mine") == []
