"""Bytes that one GPU holds in training, by part. Powers of ten are GB, as in the data sheets of GPUs.

Weights, gradients, optimiser: bf16 weights, a gradient buffer, and 12 bytes of fp32 state (master copy, two moments)
that the distributed optimiser slices over the replicas (Megatron-Core, docs of the distributed optimiser: 6 + 12 / d
bytes a parameter with fp32 gradients, 4 + 12 / d with bf16 ones).

Activations: what each block keeps for the backward pass, in the manner of Korthikanti et al. 2022 (arXiv 2205.05198,
section 4), for blocks without dropout, with fused attention (no scores) and Mamba-2's fused kernel, which keeps its
input and output and computes what is between again. In the 1F1B schedule stage i of p holds p - i micro-batches.

Distillation: bf16 weights of the teacher, whose forward pass keeps nothing but its logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.memory import (
    TRAINING_BYTES,
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
)
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.planning.layout import Layout, of_teacher

STATE_BYTES = TRAINING_BYTES["master"] + TRAINING_BYTES["moments"]
BF16 = 2
LOGIT_BYTES = 2 + 4  # bf16, and the fp32 gradient that the fused cross-entropy writes
# Both models' in bf16, and eight fp32 copies at the peak of ModelOpt 0.47.0's LogitsKLLoss, which is not fused (seven
# without TP). tests/contracts/test_modelopt.py measures it.
DISTILLED_LOGIT_BYTES = 2 + 2 + 8 * 4


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that has most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    mtp: int  # weights, state and activations of multi-token prediction
    teacher: int = 0  # weights

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def training_memory(layout: Layout) -> Memory:
    """Of the pipeline stage that needs most."""
    return max((stage_memory(layout, stage) for stage in range(layout.pipeline)), key=lambda memory: memory.total)


def stage_memory(layout: Layout, stage: int) -> Memory:
    """Of the GPUs of one pipeline stage."""
    model, tensor, last = layout.model, layout.tensor, stage == layout.pipeline - 1
    dense, experts = stage_parameters(layout, stage)
    tokens = layout.micro_batch * layout.seq_len / layout.context
    held = float(min(layout.micro_batches, layout.pipeline - stage))
    if layout.virtual > 1 and layout.micro_batches > layout.pipeline:  # interleaved: arXiv 2205.05198, section 4.2.3
        held *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual)
    activations = held * tokens * kept_bytes(layout, layout.stages[stage]) + tokens * transient_bytes(layout)
    logit_bytes = DISTILLED_LOGIT_BYTES if layout.teacher else LOGIT_BYTES
    logits = tokens * logit_bytes * model.vocab_size / tensor if last else 0
    mtp = 0.0
    if last and model.num_nextn_predict_layers:
        count = count_mtp_parameters(model)
        mtp_experts = count.routed_experts / (layout.expert * layout.parallel.expert_tensor_parallel_size)
        mtp_dense = (count.total - count.routed_experts) / tensor
        each = tokens * (
            kept_bytes(layout, model.mtp_hybrid_override_pattern) + LOGIT_BYTES * model.vocab_size / tensor
        )
        mtp = sum(state_bytes(layout, mtp_dense, mtp_experts)) + model.mtp_num_layers * each
    teacher = BF16 * sum(stage_parameters(of_teacher(layout, layout.teacher), stage)) if layout.teacher else 0
    return Memory(*map(round, (*state_bytes(layout, dense, experts), activations, logits, mtp, teacher)))


def stage_parameters(layout: Layout, stage: int) -> tuple[float, float]:
    """Parameters of a GPU of one stage: of all but the routed experts, and of these."""
    model = layout.model
    count = count_parameters(replace(model, hybrid_override_pattern=layout.stages[stage]))
    shared = count.mamba + count.attention + count.mlp + count.shared_experts
    shared += count.embedding * (stage == 0) + count.head * (stage == layout.pipeline - 1)
    copied = count.router + count.latent_projections + count.norms
    copied -= model.hidden_size * (stage < layout.pipeline - 1)  # the final norm is on the last stage
    experts = layout.expert * layout.parallel.expert_tensor_parallel_size
    return shared / layout.tensor + copied, count.routed_experts / experts


def state_bytes(layout: Layout, dense: float, experts: float) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser of so many parameters on a GPU."""
    slices, expert_slices = layout.data * layout.context, layout.expert_data
    sliced = dense / slices + experts / expert_slices
    return BF16 * (dense + experts), layout.gradient_bytes * (dense + experts), STATE_BYTES * sliced


def checkpoint_bytes(model: NemotronHConfig) -> int:
    """Bytes of a checkpoint that a training goes on from: bf16 weights and the optimiser, 14 a parameter, MTP's too.

    A teacher is not in it (adjust_distillation_model_for_mcore of ModelOpt 0.47.0 hides it).
    """
    return (BF16 + STATE_BYTES) * (count_parameters(model).total + count_mtp_parameters(model).total)


def kept_bytes(layout: Layout, pattern: str) -> float:
    """Bytes that the blocks of `pattern` keep of one token of a GPU, from the forward to the backward pass."""
    return sum(block_bytes(layout, symbol) for symbol in pattern)


def transient_bytes(layout: Layout) -> float:
    """Bytes of one token that come back in the backward pass: those of the largest block that is computed again."""
    without = replace(layout, recompute=())
    return max(
        block_bytes(without, symbol) - block_bytes(layout, symbol) for symbol in layout.model.hybrid_override_pattern
    )


def block_bytes(layout: Layout, symbol: str) -> float:
    """Bytes that one block keeps of one token of a GPU."""
    model, tensor, again = layout.model, layout.tensor, layout.recompute
    hidden = BF16 * model.hidden_size / (tensor if layout.parallel.sequence_parallel else 1)
    if "full" in again:
        return hidden
    outside = hidden * (1 if "layernorm" in again else 2)  # input of the block, and the normalised input
    if symbol == "M":
        inner = model.mamba_inner_size
        # in_proj: gate, the convolution's input, dt. The scan's output; gated and normalised, the input of out_proj.
        return outside + BF16 * (inner + model.mamba_conv_size + model.mamba_num_heads + 2 * inner) / tensor
    if symbol == "*":
        queries, heads = model.num_attention_heads * model.head_dim, model.num_attention_heads
        keys = 2 * max(model.num_key_value_heads, tensor) * model.head_dim  # beyond their number, TP copies them
        return outside + (BF16 * (2 * queries + keys) + 4 * heads) / tensor
    if symbol == "-":
        return outside + (0 if "mlp" in again else 2 * BF16 * model.intermediate_size / tensor)
    if "moe" in again:
        return outside
    tokens = 1 / tensor if layout.parallel.sequence_parallel else 1  # experts see each token once
    wide = BF16 * model.moe_intermediate_size * (1 if "moe_act" in again else 2)
    expert = BF16 * model.routed_size + wide / layout.parallel.expert_tensor_parallel_size
    routed = tokens * (model.num_experts_per_tok * expert + 8 * model.n_routed_experts)  # logits and scores in fp32
    latent = tokens * 2 * BF16 * model.moe_latent_size if model.moe_latent_size else 0
    shared = 0 if "shared_experts" in again else 2 * BF16 * model.moe_shared_expert_intermediate_size / tensor
    return outside + routed + latent + shared


def sequence_bytes(model: NemotronHConfig, tokens: int) -> tuple[int, int]:
    """Bytes of one sequence in generation: its keys and values, and the states of Mamba (fp32 and bf16)."""
    return tokens * kv_cache_bytes_per_token(model), ssm_state_bytes(model) + conv_state_bytes(model)
