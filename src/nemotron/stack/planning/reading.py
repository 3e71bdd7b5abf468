"""A config as the planner needs it: Megatron-Bridge's groups, NeMo-RL's, or those of the embedded stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.megatron import ParallelConfig
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import ONE_GPU, Layout
from nemotron.stack.planning.rl_step import RlStep

# A `max_num_steps` from here on says that something else ends the run, a `keep_top_k` that all checkpoints are kept.
OPEN_END = 100_000
# What a recipe function of Megatron-Bridge, else the family, says of the model.
MODELS = {
    "nemotron_nano_9b": PRESETS["nano2-9b"], "nemotron_nano_12b": PRESETS["nano2-12b"],
    "nemotron_3_nano": PRESETS["nano3-30b"], "nemotron_3_super": PRESETS["super3-120b"],
    "nano2": PRESETS["nano2-12b"], "nano3": PRESETS["nano3-30b"], "super3": PRESETS["super3-120b"],
}  # fmt: skip

# first_last_layers_bf16 of megatron.bridge.training.mixed_precision (0.6.2): blocks at the start and at the end.
BF16_ENDS = {
    "bf16_with_fp8_current_scaling_mixed": (1, 1), "nemotron_h_bf16_with_fp8_current_scaling_mixed": (2, 2),
    "nanov2_bf16_with_fp8_current_scaling_mixed": (2, 2), "nemotron_3_super_bf16_with_nvfp4_mixed": (0, 14),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a config asks for. `layout.gpus` is 1 where the config and its script say nothing of nodes.

    iterations: of the run; None: the config leaves it open. nodes, gpus_per_node: as the config states them. embedded:
    the stack of this package runs it. rl: generation beside training; its GPUs are `generation_nodes`, None: the same.
    judge_nodes: of NeMo Gym, which come on top of `nodes`.
    save_interval: iterations between checkpoints. checkpoints: how many of them are kept at a time, None: all.
    """

    layout: Layout
    iterations: int | None
    nodes: int | None
    gpus_per_node: int | None
    embedded: bool
    save_interval: int
    checkpoints: int | None
    lag: int = 0
    engine: int = 1
    generation_nodes: int | None = None
    judge_nodes: int = 0
    memory_share: float = 0.0
    is_rl: bool = False

    def rl_step(self, mean_tokens: float, generation_gpus: int) -> RlStep:
        """The step of GRPO that `layout` is the training of."""
        layout = self.layout
        return RlStep(layout, layout.global_batch, mean_tokens, self.lag, generation_gpus, self.engine)


def is_published_size(data: Mapping[str, Any]) -> bool:
    """Whether a config lays a model out over GPUs: one of Megatron-Bridge or NeMo-RL, not of the embedded stack."""
    return "tensor_model_parallel_size" in _megatron(data)


def read_training(data: Mapping[str, Any], family: str) -> Training:
    """Read a resolved config.

    Raises:
        UserError: a number is missing; nothing is trained by this config.
    """
    megatron, embedded = _megatron(data), not is_published_size(data)
    model = _model(data, megatron, family, embedded)
    run_env = group_at(data, "run.env") | group_at(data, "cluster")
    nodes = run_env.get("num_nodes", run_env.get("nodes"))
    placed: dict[str, Any] = {"nodes": nodes, "gpus_per_node": run_env.get("gpus_per_node"), "embedded": embedded}
    placed |= _checkpoints(data)
    replicas = group_at(data, "ddp") or group_at(data, "policy.megatron_cfg.distributed_data_parallel_config")
    precision = str(data.get("mixed_precision") or group_at(data, "policy").get("precision") or "bf16")
    layout = Layout(
        model, 1, 1, 1,
        precision=_precision(precision), matchers=_matchers(group_at(data, "model.quant_recipe")),
        bf16_ends=BF16_ENDS.get(precision, (0, 0)),
        parallel=ONE_GPU if embedded else _parallel(megatron),
        recompute=_recompute(megatron),
        gradient_bytes=4 if replicas.get("grad_reduce_in_fp32") else 2,
    )  # fmt: skip
    if "grpo" in data or "dpo" in data:
        return _reinforcement(data, layout, placed)
    seq_len = _first(data, "model.seq_length", "dataset.seq_length")
    micro = _first(data, "train.micro_batch_size")
    layout = replace(layout, seq_len=seq_len, global_batch=_first(data, "train.global_batch_size"), micro_batch=micro)
    layout = replace(layout, teacher=_teacher(data, family, model))
    return Training(layout, _first(data, "train.train_iters"), **placed)


def _reinforcement(data: Mapping[str, Any], layout: Layout, placed: dict[str, Any]) -> Training:
    """Of a config of NeMo-RL, and of the embedded stack's, which has its keys."""
    seq_len = _first(data, "policy.max_total_sequence_length")
    micro = _first(data, "policy.train_micro_batch_size")
    if "dpo" in data:  # a pair is two sequences
        sequences = 2 * _first(data, "policy.train_global_batch_size")
        micro *= 1 if placed["embedded"] else 2  # here it counts rows of packed pairs
        steps = group_at(data, "dpo").get("max_num_steps")
        return Training(replace(layout, seq_len=seq_len, global_batch=sequences, micro_batch=micro), steps, **placed)
    grpo = group_at(data, "grpo")
    sequences = _first(data, "grpo.num_prompts_per_step") * _first(data, "grpo.num_generations_per_prompt")
    asynchronous = grpo.get("async_grpo") or {}
    generation = group_at(data, "policy.generation")
    colocated = generation.get("colocated") or {}
    engines = generation.get("vllm_cfg") or {}
    steps = grpo.get("max_num_steps")
    return Training(
        replace(layout, seq_len=seq_len, global_batch=sequences, micro_batch=micro),
        None if steps is None or steps >= OPEN_END else steps,
        lag=asynchronous.get("max_trajectory_age_steps", 1) if asynchronous.get("enabled") else 0,
        engine=engines.get("tensor_parallel_size", 1),
        generation_nodes=None
        if colocated.get("enabled", True)
        else (colocated.get("resources") or {}).get("num_nodes"),
        judge_nodes=group_at(data, "env.nemo_gym").get("num_gpu_nodes") or 0,
        memory_share=engines.get("gpu_memory_utilization", 0.9),
        is_rl=True,
        **placed,
    )


def _checkpoints(data: Mapping[str, Any]) -> dict[str, int | None]:
    """How often a config saves, and how many of them stay: the newest in Megatron-Bridge, in NeMo-RL the best by a
    metric and the newest one."""
    if saves := group_at(data, "checkpointing"):
        kept = saves.get("keep_top_k", OPEN_END) + (saves.get("metric_name") is not None)
        return {"save_interval": saves.get("save_period", 1), "checkpoints": None if kept >= OPEN_END else kept}
    saves = group_at(data, "checkpoint")
    kept = saves.get("most_recent_k", -1)
    return {"save_interval": saves.get("save_interval", 1), "checkpoints": None if kept < 1 else kept}


def _megatron(data: Mapping[str, Any]) -> dict[str, Any]:
    """The group that has the layout."""
    return group_at(data, "policy.megatron_cfg") or group_at(data, "model")


def _model(data: Mapping[str, Any], megatron: Mapping[str, Any], family: str, embedded: bool) -> NemotronHConfig:
    values = group_at(data, "model")
    if "hybrid_override_pattern" in values:
        return config_from_dict(values)
    if embedded:
        raise UserError(
            "the config states no model, nor does that of its base model", "Nano 2's scripts have it in code"
        )
    recipe = str(data.get("recipe") or "")
    name = next((name for name in MODELS if recipe.startswith(name)), family)
    if name not in MODELS:
        raise UserError(f"no published model is known of the family {family}")
    model = MODELS[name]
    depths = megatron.get("mtp_num_layers")
    if depths is None:
        return model
    return replace(model, num_nextn_predict_layers=int(depths > 0), mtp_num_layers=depths)


def _teacher(data: Mapping[str, Any], family: str, model: NemotronHConfig) -> NemotronHConfig | None:
    """Of distillation: quantised models learn from themselves, pruned ones from what the family has."""
    stage = str(group_at(data, "run").get("stage")).split("/")
    return MODELS[family] if "distil" in stage else model if "qad" in stage else None


def _parallel(values: Mapping[str, Any]) -> ParallelConfig:
    known = {key: values[key] for key in ParallelConfig.model_fields if key in values}
    return ONE_GPU.model_copy(update=known)


def _recompute(values: Mapping[str, Any]) -> tuple[str, ...]:
    granularity = values.get("recompute_granularity")
    if granularity == "full" or (values.get("activation_checkpointing") and granularity is None):
        return ("full",)
    return tuple(values.get("recompute_modules") or ()) if granularity == "selective" else ()


def _precision(name: str) -> str:
    """That of the matrix products in a recipe of Megatron-Bridge's `mixed_precision`."""
    return next((precision for precision in ("nvfp4", "mxfp8", "fp8") if precision in name), "bf16")


def _matchers(recipe: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Glob -> precision of a `quant_recipe`; what names none is BF16."""
    precisions = {
        name: _precision(" ".join(str(value) for value in group_at(config, "training_recipe").values()))
        for name, config in recipe.get("configs", {}).items()
    }
    matchers = recipe.get("matchers", {}).values()
    return tuple((each["pattern"], precisions[each["config"]]) for each in matchers if each["enabled"])


def group_at(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The group at a path; empty where there is none."""
    value: Any = data
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


def _first(data: Mapping[str, Any], *paths: str) -> int:
    """The first of these numbers that the config has."""
    for path in paths:
        group, _, key = path.rpartition(".")
        if isinstance(value := group_at(data, group).get(key), int):
            return value
    raise UserError(f"the config states no {paths[0]}", "nemotron plan reads configs that train or post-train a model")
