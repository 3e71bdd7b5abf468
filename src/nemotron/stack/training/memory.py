"""Whether a training run fits into this machine's memory, estimated before anything is allocated.

On a CPU nothing else says so: the kernel ends the process without a word. A GPU refuses by itself, but not before all
weights have been read; what it must hold in any case is checked.

Measured peaks of resident memory were 0.85 to 1.7 times the estimate (the most under bf16, whose matrix products make
copies of their own): it stops what is far too large, and is no promise about what is near the limit. On an H200
adapters of the published Nano 3 took 0.98 and 0.99 of it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.training import TrainedModelConfig
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.memory import (
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
    training_bytes,
    weight_bytes,
)
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.training.distributed import Ranks, least_of_ranks
from nemotron.stack.training.session import Session

_MODULES = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Needs:
    """What decides, beside the machine and the precision, how much memory a run takes.

    tokens: of a micro-batch on one rank. settings: which activations are computed again in the backward pass; None:
    none. sharded: by FSDP2. best_weights: rank 0 keeps those of the best validation. copies: of the weights that each
    rank has beside the model that it trains, as a reference has. completions: sampled together on one rank, each of up
    to `completion_tokens` tokens with its prompt. conversations: how many of them may have several turns.
    decodes_beside: while a micro-batch is trained on, not before. judge: what a model that judges those takes beside
    all this; it decodes when they are there. trained: values that are trained while the other weights are frozen, as
    those of adapters are; None: all. frozen_bytes: of the others, where they are not fp32.
    """

    config: NemotronHConfig
    tokens: int
    settings: TrainedModelConfig | None = None
    sharded: bool = False
    best_weights: bool = False
    copies: int = 0
    completions: int = 0
    completion_tokens: int = 0
    conversations: int = 0
    judge: Needs | None = None
    decodes_beside: bool = False
    trained: int | None = None
    frozen_bytes: int | None = None


def check_memory(session: Session, needs: Needs, key: str) -> None:
    """Refuse a run that does not fit into the memory of one of its machines or GPUs; on all ranks alike.

    On a GPU, only for what is there all the time: weights, gradients and moments.

    Args:
        session: says where and in which precision is trained.
        key: of the config, that sets the sequences of a micro-batch.

    Raises:
        UserError: the estimate exceeds what is available; it names what would help.
    """
    ranks = session.ranks
    if ranks.device.type != "cpu":
        check_gpu_memory(ranks, needs)
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))  # of this machine
    state = processes * state_bytes(needs, ranks.world_size, session.bf16)
    state += rank_0_bytes(needs, ranks.world_size, session.checkpoints.async_save)  # counted on every machine
    activations = processes * activation_bytes(needs, session.bf16)
    decoding = processes * decoding_bytes(needs, session.bf16)
    needed = state + (activations + decoding if needs.decodes_beside else max(activations, decoding))
    own = available_bytes()
    available = needed + least_of_ranks((sys.maxsize if own is None else own) - needed)
    if needed <= available:
        return
    what, hint = f"{human_size(activations)} of activations", "--run PROFILE trains on GPUs, -c tiny is for a CPU"
    if decoding > activations:
        group, sampled = "policy.generation", needs
        if needs.judge and processes * decoding_bytes(needs.judge, session.bf16) == decoding:
            group, sampled = "judge", needs.judge
        what = f"{human_size(decoding)} for {processes * sampled.completions:,} completions that are sampled together"
        if state + activations <= available:
            hint = f"a smaller {group}.batch_size needs less; {hint}"
    elif state + decoding <= available:
        hint = f"a smaller {key} needs less and changes no result; {hint}"
    raise UserError(
        f"training needs about {human_size(needed)} of memory ({human_size(state)} of weights, gradients, moments and "
        f"copies of them, {what}), and {human_size(available)} are available",
        hint,
    )


def check_gpu_memory(ranks: Ranks, needs: Needs) -> None:
    """UserError where weights, gradients and moments alone exceed what is free; sharded ones are not counted."""
    if needs.sharded and ranks.world_size > 1:
        return
    state, free = state_bytes(needs, ranks.world_size, bf16=False), torch.cuda.mem_get_info(ranks.device)[0]
    if (missing := -least_of_ranks(free - state)) > 0:
        raise UserError(
            f"training needs {human_size(state)} of a GPU's memory for weights, gradients and moments alone, and "
            f"{human_size(state - missing)} are free",
            "a larger GPU, a smaller model, or none: -c tiny runs on a CPU",
        )


def state_bytes(needs: Needs, world_size: int, bf16: bool) -> int:
    """Bytes of weights, gradients and Adam moments that one process has, of copies of the weights and of a judge."""
    parameters = _parameters(needs.config)
    copies = needs.copies * weight_bytes(parameters, "fp32")
    if needs.judge:
        copies += weight_bytes(_parameters(needs.judge.config), "fp32")
    if needs.trained is not None:
        frozen = weight_bytes(parameters, "fp32") if needs.frozen_bytes is None else needs.frozen_bytes
        return frozen + training_bytes(needs.trained) + copies
    if not needs.sharded or world_size == 1:
        return training_bytes(parameters) + copies + (weight_bytes(parameters, "bf16") if bf16 else 0)
    # Its slice, and what is gathered with its gradients: two blocks, embedding and head. But every process begins with
    # all weights, before they are sliced.
    ends = 2 * needs.config.vocab_size * needs.config.hidden_size
    block = max(_block_parameters(needs.config, symbol) for symbol in set(needs.config.hybrid_override_pattern))
    gathered = 2 * weight_bytes(ends + 2 * block, "fp32")
    return max(weight_bytes(parameters, "fp32"), training_bytes(parameters) // world_size + gathered) + copies


def rank_0_bytes(needs: Needs, world_size: int, async_save: bool) -> int:
    """Bytes that rank 0 alone has: the copy of weights and moments that a checkpoint is written from, best weights."""
    weights = weight_bytes(_parameters(needs.config) if needs.trained is None else needs.trained, "fp32")
    snapshot = async_save or (needs.sharded and world_size > 1)
    return weights * (3 * snapshot + needs.best_weights)


def activation_bytes(needs: Needs, bf16: bool) -> int:
    """Bytes of a micro-batch's activations, when the backward pass begins."""
    logits_gradient = 4 * needs.config.vocab_size  # beside the kept ones
    return needs.tokens * (activation_bytes_per_token(needs.config, needs.settings, bf16) + logits_gradient)


def decoding_bytes(needs: Needs, bf16: bool) -> int:
    """Bytes of the completions that are sampled together: keys and values, convolution and SSM states, and a step's
    logits with what is computed from them: probabilities, and their sums in float64. A judge's, where they are more.

    A turn leaves the states of conversations beside its own, and the next one reads on from copies of them.
    """
    config, width = needs.config, 1 if bf16 else 2  # in units of bf16, which the two functions count
    per_token = 2 * kv_cache_bytes_per_token(config)  # `attention_dtype`: fp32
    states = ssm_state_bytes(config) + width * conv_state_bytes(config)
    cached = needs.completion_tokens * per_token + states
    own = (needs.completions + needs.conversations) * cached + needs.completions * 24 * config.vocab_size
    return max(own, decoding_bytes(needs.judge, bf16) if needs.judge else 0)


def activation_bytes_per_token(config: NemotronHConfig, settings: TrainedModelConfig | None, bf16: bool) -> int:
    """Bytes that one token's forward pass keeps for the backward pass, summed over the blocks and the head.

    Under `bf16` mixed precision the head and Mamba-2, whose scan is in fp32, keep fp32 values. Attention keeps queries,
    keys and values in both; experts get rows that stay empty, so that all have equally many.

    A block that is recomputed keeps its input; while its turn comes in the backward pass it has the rest as well, one
    block at a time.
    """
    granularity = settings.recompute_granularity if settings else None
    kept, largest_recomputed = 4 * (config.vocab_size + 2 * config.hidden_size), 0
    for symbol in config.hybrid_override_pattern:
        width = {"M": 4, "*": 3, "E": 3, "-": 2}[symbol] if bf16 else 4
        block = width * block_values(config, symbol)
        selected = settings is not None and _MODULES[symbol] in settings.recompute_modules
        if granularity == "full" or (granularity == "selective" and selected):
            kept += 4 * config.hidden_size
            largest_recomputed = max(largest_recomputed, block - width * config.hidden_size)
        else:
            kept += block
    return kept + largest_recomputed


def block_values(config: NemotronHConfig, symbol: str) -> int:
    """Values a token that one block keeps: its input, the normalised input, and what stands between its matrices."""
    hidden = 2 * config.hidden_size
    if symbol == "M":
        inner, conv = config.mamba_inner_size, config.mamba_conv_size
        # in_proj: gate, convolution's input, dt. The convolution's output and its SiLU. Inside a chunk, decays and
        # scores of every pair of positions, a head each. The scan's output, gated, normalised.
        within_chunk = 2 * config.mamba_num_heads * config.chunk_size
        return hidden + (inner + conv + config.mamba_num_heads) + 2 * conv + within_chunk + 3 * inner
    if symbol == "*":
        queries = config.num_attention_heads * config.head_dim
        return hidden + 2 * queries + 2 * config.num_key_value_heads * config.head_dim
    if symbol == "E":
        # Of each visited expert its input, both sides of the squared ReLU, its output.
        expert = 2 * (config.routed_size + config.moe_intermediate_size)
        return hidden + config.num_experts_per_tok * expert + 2 * config.moe_shared_expert_intermediate_size
    return hidden + 2 * config.intermediate_size


def _parameters(config: NemotronHConfig) -> int:
    return count_parameters(config).total + count_mtp_parameters(config).total


def _block_parameters(config: NemotronHConfig, symbol: str) -> int:
    ends = 2 * config.vocab_size * config.hidden_size
    return count_parameters(replace(config, hybrid_override_pattern=symbol)).total - ends


def available_bytes() -> int | None:
    """Memory that a new process can have here: what the kernel says is available, swap, and no more than its group may.

    None where the system does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    available = (kib["MemAvailable"] + kib["SwapFree"]) * 1024
    try:
        return min(available, int(_CGROUP.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return available
