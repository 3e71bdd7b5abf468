"""Whether a training run fits into this machine's memory, estimated before anything is allocated.

On a CPU nothing else says so: the kernel ends the process without a word. A GPU refuses by itself.
"""

from __future__ import annotations

from pathlib import Path

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.training import TrainedModelConfig
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.memory import training_bytes, weight_bytes
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.training.session import Session

_MODULES = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def check_memory(
    session: Session, config: NemotronHConfig, tokens: int, settings: TrainedModelConfig | None, key: str
) -> None:
    """Refuse a run on the CPU whose weights, gradients, Adam moments and activations do not fit.

    Args:
        session: says where and in which precision is trained. Each process has all of it.
        tokens: of a micro-batch on one rank.
        settings: which activations are computed again in the backward pass; None: none.
        key: of the config, that sets the sequences of a micro-batch.

    Raises:
        UserError: the estimate exceeds what is available; it names what would help.
    """
    available, ranks = available_bytes(), session.ranks
    if ranks.device.type != "cpu" or available is None:
        return
    parameters = count_parameters(config).total + count_mtp_parameters(config).total
    state = training_bytes(parameters) + (weight_bytes(parameters, "bf16") if session.bf16 else 0)  # autocast's copies
    logits_gradient = 4 * config.vocab_size  # beside the kept ones, when the backward pass begins
    activations = tokens * (activation_bytes_per_token(config, settings, session.bf16) + logits_gradient)
    needed = (state + activations) * ranks.world_size
    if needed <= available:
        return
    parts = f"{human_size(state)} of weights, gradients and moments, {human_size(activations)} of activations"
    hint = f"a smaller {key} needs less and changes no result; --run PROFILE trains on GPUs, -c tiny is for a CPU"
    if state * ranks.world_size > available:
        hint = "--run PROFILE trains on GPUs, -c tiny is for a CPU"
    raise UserError(
        f"training needs about {human_size(needed)} of memory ({parts}), and {human_size(available)} are available",
        hint,
    )


def activation_bytes_per_token(config: NemotronHConfig, settings: TrainedModelConfig | None, bf16: bool) -> int:
    """Bytes that one token's forward pass keeps for the backward pass, summed over the blocks and the head.

    Under `bf16` mixed precision Mamba-2, whose scan is in fp32, and the head keep fp32 values.

    A block that is recomputed keeps its input; while its turn comes in the backward pass it has the rest as well, one
    block at a time.
    """
    granularity = settings.recompute_granularity if settings else None
    kept, largest_recomputed = 4 * (config.vocab_size + 2 * config.hidden_size), 0
    for symbol in config.hybrid_override_pattern:
        width = 2 if bf16 and symbol != "M" else 4
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
