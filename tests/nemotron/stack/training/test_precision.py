"""Whether a processor multiplies bf16; `test_session.py` has what follows for `mixed_precision: auto`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemotron.stack.training.precision import multiplies_bf16

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_a_processor_says_whether_it_multiplies_bf16(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, object], expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_bf16(CPU) is expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the kernel lists the processor's flags on Linux alone")
def test_pytorch_and_the_kernel_agree() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    assert multiplies_bf16(CPU) == bool(flags & {"avx512_bf16", "amx_bf16"})
