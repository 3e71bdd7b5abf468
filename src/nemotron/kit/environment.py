"""The environment of a run: interpreter, libraries, processor, threads, devices. Never values of secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from nemo_runspec.cpus import usable_cpus

_PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "pydantic",
    "omegaconf",
    "rensa",
    "math-verify",
    "jsonschema",
    "transformers",
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


def describe_environment() -> dict[str, Any]:
    """Facts that explain a result or a speed. Torch is queried only if the script has already imported it."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        "packages": packages,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.cuda.get_device_name(index) for index in range(count)]
        facts["torch"] = {
            "version": str(torch.__version__),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # a guest's processors differ under one name
            "threads": torch.get_num_threads(),
            "devices": devices,
        }
    return facts


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
