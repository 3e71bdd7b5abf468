"""A training as the planner sees it: model, batch, and how both are laid out over GPUs; and whether that divides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from nemo_runspec.errors import UserError
from nemotron.kit.megatron import check_world_size
from nemotron.kit.schemas.megatron import ParallelConfig, TrainConfig
from nemotron.stack.models.config import NemotronHConfig

ONE_GPU = ParallelConfig(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, sequence_parallel=False,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Sizes are those of Megatron's options.

    seq_len: tokens a sequence. global_batch: sequences an iteration. precision: of the matrix products, a key of a
    GPU's `tflops`. virtual: stages that a GPU has of the pipeline. recompute: "full", or modules that are computed
    again, as `recompute_modules` has them. gradient_bytes: of a value in the buffer of gradients; the recipes of
    Nemotron 3 reduce them in bf16, 4 with `grad_reduce_in_fp32`. fsdp: weights and gradients are sliced as well.
    """

    model: NemotronHConfig
    gpus: int
    seq_len: int
    global_batch: int
    micro_batch: int = 1
    precision: str = "bf16"
    parallel: ParallelConfig = field(default_factory=lambda: ONE_GPU)
    virtual: int = 1
    recompute: tuple[str, ...] = ()
    gradient_bytes: int = 2
    fsdp: bool = False

    @property
    def tensor(self) -> int:
        """TP."""
        return self.parallel.tensor_model_parallel_size

    @property
    def pipeline(self) -> int:
        """PP."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def context(self) -> int:
        """CP."""
        return self.parallel.context_parallel_size

    @property
    def expert(self) -> int:
        """EP."""
        return self.parallel.expert_model_parallel_size

    @property
    def data(self) -> int:
        """DP: replicas of what is no routed expert."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Replicas of each routed expert."""
        return self.gpus // (self.expert * self.parallel.expert_tensor_parallel_size * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Forward passes of a replica in an iteration."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def bubble(self) -> float:
        """Share of an iteration's work that a pipeline adds by waiting: (p - 1) / (m v) (Narayanan et al. 2021,
        arXiv 2104.04473, section 2.2)."""
        return (self.pipeline - 1) / (self.micro_batches * self.virtual)

    @property
    def tokens(self) -> int:
        """Tokens an iteration."""
        return self.global_batch * self.seq_len

    @cached_property
    def stages(self) -> list[str]:
        """The pattern's part of each pipeline stage, in equal parts (the first ones longer where it is not even)."""
        pattern, parts = self.model.hybrid_override_pattern, self.pipeline
        ends = [-(-len(pattern) * part // parts) for part in range(parts + 1)]
        return [pattern[start:end] for start, end in pairwise(ends)]


def check(layout: Layout) -> None:
    """Refuse what the libraries refuse once all GPUs have been taken.

    Raises:
        UserError: heads, groups, experts, widths, blocks, tokens, GPUs or the batch do not divide.
    """
    model, tensor, context = layout.model, layout.tensor, layout.context
    pattern, parallel = model.hybrid_override_pattern, layout.parallel
    if parallel.sequence_parallel and tensor == 1:
        raise UserError("sequence_parallel shares tokens among the GPUs of TP, and TP is 1")
    experts = model.n_routed_experts if "E" in pattern else 1
    rules = [
        ("pipeline_model_parallel_size", layout.pipeline, "blocks", len(pattern)),
        ("expert_model_parallel_size", layout.expert, "experts", experts),
        ("expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, "columns of an expert",
         model.moe_intermediate_size if "E" in pattern else 1),
        ("PP x virtual stages", layout.pipeline * layout.virtual, "blocks", len(pattern)),
    ]  # fmt: skip
    if "*" in pattern:
        rules.append(("tensor_model_parallel_size", tensor, "attention heads", model.num_attention_heads))
    if "M" in pattern:  # CP deals the heads of a TP part out, and its groups as far as there are some
        rules.append(("tensor_model_parallel_size", tensor, "groups of Mamba", model.n_groups))
        rules.append(("context_parallel_size", context, "heads of Mamba in a TP part", model.mamba_num_heads // tensor))
    if context > 1:  # causal attention is balanced by a piece from the front and one from the back for each GPU
        rules.append(("2 x context_parallel_size", 2 * context, "tokens of a sequence", layout.seq_len))
    if parallel.sequence_parallel:
        rules.append(("TP x CP", tensor * context, "tokens of a sequence", layout.seq_len))
    for name, size, what, number in rules:
        if number % size:
            raise UserError(f"{name} {size} does not divide the {number:,} {what}")
    kv, groups = model.num_key_value_heads, model.n_groups // tensor
    if "*" in pattern and tensor % kv and kv % tensor:
        raise UserError(
            f"tensor_model_parallel_size {tensor} neither divides the {kv} key/value heads nor is a multiple"
        )
    if "M" in pattern and groups % context and context % groups:
        raise UserError(
            f"context_parallel_size {context} neither divides the {groups} groups of Mamba in a TP part, nor is a "
            "multiple"
        )
    if "E" in pattern and tensor > 1 and not parallel.sequence_parallel:
        raise UserError(f"TP {tensor} with experts needs sequence_parallel: Megatron-Core does not train without it")
    batch = TrainConfig(
        train_tokens=layout.tokens, train_iters=1, global_batch_size=layout.global_batch,
        micro_batch_size=layout.micro_batch,
    )  # fmt: skip
    check_world_size(parallel, batch, layout.gpus)


def with_parallel(layout: Layout, **sizes: int | bool) -> Layout:
    """The same training with other sizes."""
    return replace(layout, parallel=layout.parallel.model_copy(update=sizes))
