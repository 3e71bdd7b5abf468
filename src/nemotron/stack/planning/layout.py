"""A training as the planner sees it: model, batch, and how both are laid out over GPUs; and whether that divides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from nemo_runspec.errors import UserError
from nemotron.kit.megatron import check_world_size
from nemotron.kit.schemas.megatron import Dimensions, ParallelConfig, TrainConfig, check_layout
from nemotron.stack.models.config import NemotronHConfig

ONE_GPU = ParallelConfig(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, sequence_parallel=False,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Sizes are those of Megatron's options.

    seq_len: tokens a sequence. global_batch: sequences an iteration. precision: of the matrix products, a key of a
    GPU's `tflops`. matchers: glob of Megatron's names of modules -> another precision, the first one counts. bf16_ends:
    so many blocks from the first and up to the last stay in BF16. virtual: stages that a GPU has of the pipeline.
    recompute: "full", or modules that are computed again, as `recompute_modules` has them. gradient_bytes: of a value
    in the buffer of gradients: bf16, or 4 with `grad_reduce_in_fp32`.
    whole_graph: one CUDA graph has the whole iteration, experts included. teacher: of distillation, the model whose
    logits `model` learns, laid out as it is.
    """

    model: NemotronHConfig
    gpus: int
    seq_len: int
    global_batch: int
    micro_batch: int = 1
    precision: str = "bf16"
    matchers: tuple[tuple[str, str], ...] = ()
    bf16_ends: tuple[int, int] = (0, 0)
    parallel: ParallelConfig = field(default_factory=lambda: ONE_GPU)
    virtual: int = 1
    recompute: tuple[str, ...] = ()
    gradient_bytes: int = 2
    whole_graph: bool = False
    teacher: NemotronHConfig | None = None

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
    model, pattern = layout.model, layout.model.hybrid_override_pattern
    dimensions = Dimensions(
        blocks=len(pattern),
        heads=model.num_attention_heads * ("*" in pattern),
        mamba_heads=model.mamba_num_heads * ("M" in pattern),
        groups=model.n_groups * ("M" in pattern),
        experts=model.n_routed_experts * ("E" in pattern),
        expert_width=model.moe_intermediate_size * ("E" in pattern),
    )
    try:
        check_layout(layout.parallel, dimensions, layout.seq_len)
    except ValueError as error:
        raise UserError(str(error)) from None
    batch = TrainConfig(
        train_tokens=layout.tokens, train_iters=1, global_batch_size=layout.global_batch,
        micro_batch_size=layout.micro_batch,
    )  # fmt: skip
    check_world_size(layout.parallel, batch, layout.gpus)
    if layout.teacher:
        check(of_teacher(layout, layout.teacher))


def of_teacher(layout: Layout, teacher: NemotronHConfig) -> Layout:
    """The layout as the teacher has it, which only predicts: nothing is computed again."""
    return replace(layout, model=teacher, teacher=None, recompute=())


def with_parallel(layout: Layout, **sizes: int | bool) -> Layout:
    """The same training with other sizes."""
    return replace(layout, parallel=layout.parallel.model_copy(update=sizes))
