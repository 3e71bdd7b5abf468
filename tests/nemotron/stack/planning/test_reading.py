"""Configs with the keys of Megatron-Bridge, of NeMo-RL and of the embedded stack."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.reading import read_training

BRIDGE: dict[str, Any] = {
    "run": {"env": {"nodes": 16, "gpus_per_node": 4}},
    "recipe": "nemotron_3_super_pretrain_64gpu_gb200_bf16_config",
    "model": {
        "seq_length": 8192, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1, "expert_model_parallel_size": 64, "expert_tensor_parallel_size": 1,
        "sequence_parallel": True, "recompute_granularity": "selective", "recompute_modules": ["moe_act"],
        "mtp_num_layers": 2,
    },
    "train": {"train_iters": 794_729, "global_batch_size": 3072, "micro_batch_size": 1},
    "mixed_precision": "nemotron_3_super_bf16_with_nvfp4_mixed",
}  # fmt: skip
NEMO_RL: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 256, "num_generations_per_prompt": 16, "max_num_steps": 1_000_000,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
    },
    "policy": {
        "precision": "bfloat16", "max_total_sequence_length": 65_536, "train_micro_batch_size": 1,
        "megatron_cfg": {
            "tensor_model_parallel_size": 4, "context_parallel_size": 8, "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "sequence_parallel": True,
            "activation_checkpointing": True, "mtp_num_layers": 0,
        },
        "generation": {
            "colocated": {"enabled": False, "resources": {"num_nodes": 72, "gpus_per_node": 8}},
            "vllm_cfg": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.8},
        },
    },
    "cluster": {"num_nodes": 104, "gpus_per_node": 8},
}  # fmt: skip


def test_a_config_of_megatron_bridge() -> None:
    training = read_training(BRIDGE, "super3")
    layout = training.layout
    assert layout.model == PRESETS["super3-120b"] and layout.precision == "nvfp4"
    assert (layout.tensor, layout.expert, layout.recompute) == (2, 64, ("moe_act",))
    assert (layout.tokens, training.iterations) == (3072 * 8192, 794_729)
    assert (training.nodes, training.gpus_per_node, training.embedded) == (16, 4, False)


@pytest.mark.parametrize(("newest", "kept"), [(-1, None), (0, None), (1, 1)])
def test_how_many_checkpoints_megatron_bridge_keeps(newest: int, kept: int | None) -> None:
    """It removes `found[:-most_recent_k]` (cleanup_old_non_persistent_checkpoint): of 0 that is nothing."""
    training = read_training(BRIDGE | {"checkpoint": {"save_interval": 10, "most_recent_k": newest}}, "super3")
    assert training.checkpoints == kept


@pytest.mark.parametrize("in_fp32", [False, True])
def test_the_buffer_of_gradients_is_the_config_s(in_fp32: bool) -> None:
    replicas, rl = {"grad_reduce_in_fp32": in_fp32}, copy.deepcopy(NEMO_RL)
    rl["policy"]["megatron_cfg"]["distributed_data_parallel_config"] = replicas
    for config in (BRIDGE | {"ddp": replicas}, rl):
        assert read_training(config, "super3").layout.gradient_bytes == (4 if in_fp32 else 2)


def test_a_config_of_nemo_rl() -> None:
    training = read_training(NEMO_RL, "super3")
    layout = training.layout
    assert (layout.tensor, layout.context, layout.expert, layout.recompute) == (4, 8, 8, ("full",))
    assert layout.model.num_nextn_predict_layers == 0 and layout.precision == "bf16"
    assert (layout.global_batch, layout.seq_len, training.lag, training.engine) == (4096, 65_536, 1, 4)
    assert (training.generation_nodes, training.nodes, training.iterations) == (72, 104, None)
    synchronous = copy.deepcopy(NEMO_RL)
    synchronous["grpo"]["async_grpo"]["enabled"] = False
    synchronous["policy"]["generation"]["colocated"]["enabled"] = True
    training = read_training(synchronous, "super3")
    assert (training.lag, training.generation_nodes) == (0, None)


def test_dpo_counts_a_pair_as_two_sequences() -> None:
    config = {key: value for key, value in NEMO_RL.items() if key != "grpo"} | {"dpo": {"max_num_steps": 50}}
    config["policy"] = config["policy"] | {"train_global_batch_size": 128}
    training = read_training(config, "nano3")
    assert (training.layout.global_batch, training.iterations, training.is_rl) == (256, 50, False)
    assert training.layout.micro_batch == 2  # dpo.py of NeMo-RL doubles train_micro_batch_size, too


@pytest.mark.parametrize(
    ("recipe", "family", "preset"),
    [
        ("nemotron_nano_9b_v2_pretrain_config", "nano2", "nano2-9b"),
        ("nemotron_nano_12b_v2_pretrain_config", "nano2", "nano2-12b"),
        ("nemotron_3_nano_sft_config", "nano3", "nano3-30b"),
        ("", "nano3", "nano3-30b"),
    ],
)
def test_the_recipe_function_says_which_model(recipe: str, family: str, preset: str) -> None:
    config = copy.deepcopy(BRIDGE) | {"recipe": recipe, "mixed_precision": "bf16_mixed"}
    del config["model"]["mtp_num_layers"]
    assert read_training(config, family).layout.model == PRESETS[preset]


def test_who_teaches() -> None:
    """A stage says whether it distils; QAD teaches the model by itself, after pruning the family's model does."""
    config = copy.deepcopy(BRIDGE) | {"recipe": "nemotron_nano_9b_v2_pretrain_config", "mixed_precision": "bf16_mixed"}
    del config["model"]["mtp_num_layers"]
    teachers = {
        stage: read_training(config | {"run": {"stage": stage}}, "nano2").layout.teacher
        for stage in ("pretrain", "qad/modelopt", "compress/distil")
    }
    assert teachers == {"pretrain": None, "qad/modelopt": PRESETS["nano2-9b"], "compress/distil": PRESETS["nano2-12b"]}


def test_a_config_of_the_embedded_stack() -> None:
    model = {"hybrid_override_pattern": "MEM*EME", "hidden_size": 128, "vocab_size": 2048}
    own = {"model": model, "dataset": {"seq_length": 128}, "train": BRIDGE["train"]}
    training = read_training(own, "nano3")
    assert training.embedded and training.layout.model.hidden_size == 128 and training.layout.seq_len == 128
    with pytest.raises(UserError, match="states no model"):
        read_training(own | {"model": {"moe_aux_loss_coeff": 1e-4}}, "nano3")


def test_a_number_that_is_missing_is_named() -> None:
    config = copy.deepcopy(BRIDGE)
    del config["train"]["micro_batch_size"]
    with pytest.raises(UserError, match=r"the config states no train\.micro_batch_size"):
        read_training(config, "super3")


def test_which_matrices_have_another_precision() -> None:
    """As phase1.yaml of Super 3 says it: mixed_precision for the last 14 blocks, quant_recipe for kinds of matrices."""
    config = copy.deepcopy(BRIDGE)
    config["model"]["quant_recipe"] = {
        "configs": {
            "bf16": {"training_recipe": {"fp8_quantization_recipe": None, "fp4_quantization_recipe": None}},
            "mxfp8": {"training_recipe": {"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": None}},
        },
        "matchers": {
            "attention": {"enabled": True, "pattern": "*.self_attention.*", "config": "bf16"},
            "mamba_out": {"enabled": True, "pattern": "*.mixer.out_proj", "config": "mxfp8"},
            "experts": {"enabled": False, "pattern": "*.experts.*", "config": "bf16"},
        },
    }
    layout = read_training(config, "super3").layout
    assert layout.matchers == (("*.self_attention.*", "bf16"), ("*.mixer.out_proj", "mxfp8"))
    assert (layout.precision, layout.bf16_ends) == ("nvfp4", (0, 14))


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (BRIDGE | {"checkpoint": {"save_interval": 20, "most_recent_k": 2}}, 2),
        (BRIDGE | {"checkpoint": {"save_interval": 20, "most_recent_k": -1}}, None),
        (NEMO_RL | {"checkpointing": {"save_period": 20, "keep_top_k": 3}}, 3),
        (NEMO_RL | {"checkpointing": {"save_period": 20, "keep_top_k": 1_000_000}}, None),
    ],
)
def test_checkpoints_that_are_kept(config: dict[str, Any], kept: int | None) -> None:
    training = read_training(config, "super3")
    assert (training.save_interval, training.checkpoints) == (20, kept)
