"""How much memory a model needs, from its config alone: weights, training state, and the states of decoding.

Not counted is what depends on how a program runs: activations, communication buffers, fragmentation.
"""

from __future__ import annotations

from nemotron.stack.models.config import NemotronHConfig

# NVFP4 stores 4 bits a weight and an 8-bit scale a block of 16. One scale a tensor (FP8, NVFP4) weighs nothing.
BITS_PER_WEIGHT = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "nvfp4": 4 + 8 / 16}

# Bytes a parameter in bf16 mixed-precision training with AdamW: bf16 weight and gradient, fp32 master copy of the
# weight, fp32 first and second moment.
TRAINING_BYTES = {"weights": 2, "gradients": 2, "master": 4, "moments": 8}


def weight_bytes(num_parameters: int, precision: str) -> int:
    """Bytes of that many weights when all of them are stored in `precision`, a key of BITS_PER_WEIGHT."""
    return round(num_parameters * BITS_PER_WEIGHT[precision] / 8)


def training_bytes(num_parameters: int) -> int:
    """Bytes of weights, gradients and optimiser state, over all devices together; see TRAINING_BYTES."""
    return num_parameters * sum(TRAINING_BYTES.values())


def kv_cache_bytes_per_token(config: NemotronHConfig) -> int:
    """Bytes of the keys and values, in bf16, that all attention blocks keep for one token."""
    per_block = 2 * config.num_key_value_heads * config.head_dim
    return config.hybrid_override_pattern.count("*") * per_block * 2


def ssm_state_bytes(config: NemotronHConfig) -> int:
    """Bytes of the SSM states of one sequence, whatever its length; fp32, because they sum over the whole past."""
    per_block = config.mamba_inner_size * config.ssm_state_size
    return config.hybrid_override_pattern.count("M") * per_block * 4


def conv_state_bytes(config: NemotronHConfig) -> int:
    """Bytes of the last conv_kernel - 1 inputs, in bf16, of all convolutions of one sequence."""
    per_block = (config.conv_kernel - 1) * config.mamba_conv_size
    return config.hybrid_override_pattern.count("M") * per_block * 2
