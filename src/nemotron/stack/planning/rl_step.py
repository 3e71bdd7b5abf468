"""Seconds of a step of GRPO in NeMo-RL: generation, training, all else.

Generation is bound by memory: in every decoding step an engine reads its weights (of the experts, those that some
sequence visits), the keys and values and the SSM states of its sequences, and starts the kernels of every block.
On-policy, a step has as many of these as its longest completion has tokens; with a lag of k steps k batches are on the
way at once, and one is finished every 1/k-th of the time that a completion of mean length takes. Training and
generation alternate on the same GPUs, or run side by side on their own; then the slower one decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemotron.stack.models.published.memory import (
    BITS_PER_WEIGHT,
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
)
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.planning.layout import Layout
from nemotron.stack.planning.speed import Gpu, coefficients, token_seconds


@dataclass(frozen=True)
class RlStep:
    """A step. `training`: the layout of its GPUs; a sequence there is a pack of `seq_len` tokens.

    sequences: prompts x completions. mean_tokens: of a sequence, prompt included. lag: steps that completions may be
    older than the weights; 0: on-policy. generation_gpus: all of them, where training uses the same. engine: GPUs of
    one inference engine (TP).
    """

    training: Layout
    sequences: int
    mean_tokens: float
    lag: int
    generation_gpus: int
    engine: int

    @property
    def in_engine(self) -> float:
        """Sequences that one engine decodes together."""
        return max(1, self.lag) * self.sequences * self.engine / self.generation_gpus


def training_seconds(step: RlStep, gpu: Gpu) -> float:
    """Forward and backward of all sequences, as in pretraining; log-probabilities are in the coefficient of RL."""
    layout = step.training
    micro_batches = max(1.0, step.sequences * step.mean_tokens / layout.seq_len / (layout.data * layout.micro_batch))
    bubble = (layout.pipeline - 1) / micro_batches
    return token_seconds(layout, gpu) * step.sequences * step.mean_tokens / layout.gpus * (1 + bubble)


def decoding_steps(step: RlStep) -> float:
    """Decoding steps between two steps of training."""
    return step.mean_tokens / step.lag if step.lag else step.training.seq_len


def decoding_memory_seconds(step: RlStep, gpu: Gpu) -> float:
    """What an engine reads in that time, at the data sheet's bandwidth."""
    model, count = step.training.model, count_parameters(step.training.model)
    drawn = step.sequences * step.engine / step.generation_gpus * step.mean_tokens  # tokens, by one engine
    together = max(1.0, drawn / decoding_steps(step))  # sequences in a decoding step: on-policy ever fewer
    visited = 1 - (1 - model.num_experts_per_tok / model.n_routed_experts) ** together
    read = count.active_without_embedding - count.visited_experts + visited * count.routed_experts
    precision = "fp8" if "fp8" in step.training.precision else step.training.precision
    weights = decoding_steps(step) * read * BITS_PER_WEIGHT[precision] / 8
    # every token of a sequence reads the cache of those before it, half of its length on average, and reads and writes
    # the states of Mamba
    states = 2 * (ssm_state_bytes(model) + conv_state_bytes(model))
    cache = drawn * (step.mean_tokens / 2 * kv_cache_bytes_per_token(model) + states)
    return (weights + cache) / (1e12 * gpu.hbm_tb_s * step.engine)


def rl_parts(step: RlStep, gpu: Gpu) -> dict[str, float]:
    """Seconds of training and generation, and of all else in a step."""
    fitted = coefficients("rl")
    launches = decoding_steps(step) * len(step.training.model.hybrid_override_pattern)
    return {
        "training": fitted["training"] * training_seconds(step, gpu),
        "generation": fitted["memory"] * decoding_memory_seconds(step, gpu) + fitted["launch"] * launches,
        "all else": fitted["step"],
    }


def rl_seconds(parts: dict[str, float], lag: int) -> float:
    """Seconds of a step."""
    training, generation = parts["training"], parts["generation"]
    return (max(training, generation) if lag else training + generation) + parts["all else"]
