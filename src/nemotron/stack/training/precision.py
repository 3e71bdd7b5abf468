"""Where bf16 pays: `mixed_precision: auto` is "bf16_mixed" there, and "fp32" elsewhere."""

from __future__ import annotations

import torch


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the processor has instructions that multiply bf16: a GPU, an x86 CPU with AVX512-BF16 or AMX.

    Others convert bf16 to fp32 for every product, which takes longer than fp32 does. ARM processors may have such
    instructions; PyTorch does not say.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
