"""The presets and their parameter counts, against published numbers, our modules, and Hugging Face's (meta device)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.parameters import Parameters, count_mtp_parameters, count_parameters
from nemotron.stack.models.published.presets import PRESETS

SMALL = NemotronHConfig("M*E-EM", conv_kernel=3, moe_latent_size=24, num_nextn_predict_layers=1)
MODELS = {**PRESETS, "small": SMALL, "small, M in MTP": dataclasses.replace(SMALL, mtp_hybrid_override_pattern="M-E*")}
PART_OF_NAME = [  # the first fragment that a tensor's name has decides
    ("embeddings", "embedding"),
    ("lm_head", "head"),
    ("eh_proj", "mtp_projection"),
    ("mixer.gate", "router"),
    ("mixer.experts", "routed_experts"),
    ("latent_proj", "latent_projections"),
    ("shared_experts", "shared_experts"),
    ("mixer.norm", "mamba"),
    ("norm", "norms"),
    *((f"mixer.{name}", "mamba") for name in ("in_proj", "out_proj", "conv1d", "A_log", "D", "dt_bias")),
    *((f"mixer.{name}", "attention") for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *((f"mixer.{name}", "mlp") for name in ("up_proj", "down_proj")),
]


def billions(number: float) -> float:
    """Rounded to the four or five digits that the reports' numbers are known to."""
    return round(number / 1e9, 3)


def by_part(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Numbers of elements of tensors by the part that their names say, without the empty parts."""
    sums: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sums[next(part for fragment, part in PART_OF_NAME if fragment in name)] += tensor.numel()
    return dict(sums)


def closed_form(count: Parameters) -> dict[str, int]:
    """The parts of a count that are not empty."""
    values = dataclasses.asdict(count)
    del values["visited_experts"]
    return {part: number for part, number in values.items() if number}


@pytest.mark.parametrize(
    ("name", "blocks", "total", "active_without_embedding", "active"),
    [
        ("nano3-30b", {"M": 23, "E": 23, "*": 6}, 31.578, 3.228, 3.580),  # tech report: 31.6 B, 3.2 B, 3.6 B
        ("super3-120b", {"M": 40, "E": 40, "*": 8}, 120.669, 12.233, 12.770),
        ("nano2-12b", {"M": 28, "-": 28, "*": 6}, 12.310, 11.639, 12.310),
        ("nano2-9b", {"M": 27, "-": 25, "*": 4}, 8.888, 8.301, 8.888),
    ],
)
def test_published_sizes(
    name: str, blocks: dict[str, int], total: float, active_without_embedding: float, active: float
) -> None:
    count = count_parameters(PRESETS[name])
    assert Counter(PRESETS[name].hybrid_override_pattern) == blocks
    assert billions(count.total) == total
    assert billions(count.active_without_embedding) == active_without_embedding
    assert billions(count.active) == active


def test_super_counts_as_its_report_does_without_the_router() -> None:
    # 120.6 B total, 12.1 B active without and 12.7 B with embeddings; the 84 M router weights are in none of them.
    count, mtp = count_parameters(PRESETS["super3-120b"]), count_mtp_parameters(PRESETS["super3-120b"])
    assert round(count.router / 1e6) == 84
    assert billions(count.total - count.router) == 120.585
    assert billions(count.active_without_embedding - count.router) == 12.149
    assert billions(count.active - count.router) == 12.686
    assert (round(mtp.total / 1e9, 2), billions(mtp.active)) == (2.94, 0.245)


@pytest.mark.parametrize("name", MODELS)
def test_closed_form_equals_the_modules_part_by_part(name: str) -> None:
    config = MODELS[name]
    with torch.device("meta"):
        model = NemotronH(config)
    tensors = dict(model.named_parameters())
    mtp = {key: tensor for key, tensor in tensors.items() if key.startswith("mtp.")}
    trunk = {key: tensor for key, tensor in tensors.items() if key not in mtp}
    assert closed_form(count_parameters(config)) == by_part(trunk)
    assert closed_form(count_mtp_parameters(config)) == by_part(mtp)
    # Plain decoding uses K of E experts, and no multi-token prediction.
    experts = sum(tensor.numel() for key, tensor in trunk.items() if ".experts." in key)
    idle = experts * (config.n_routed_experts - config.num_experts_per_tok) // config.n_routed_experts
    active = sum(tensor.numel() for tensor in trunk.values()) - idle
    assert model.num_parameters() == (sum(tensor.numel() for tensor in tensors.values()), active)


@pytest.mark.parametrize("name", PRESETS)
def test_hugging_face_builds_the_same_size(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = PRESETS[name]
    reference = transformers.NemotronHConfig(**config.to_dict())
    with torch.device("meta"):
        model: nn.Module = transformers.NemotronHForCausalLM(reference)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total  # it has no MTP block


def test_presets_and_counts_need_no_torch() -> None:
    modules = ["config", "published.memory", "published.parameters", "published.presets"]
    code = "import sys\n" + "".join(f"import nemotron.stack.models.{module}\n" for module in modules)
    code += "import nemotron.stack.training.flops\nassert 'torch' not in sys.modules\n"
    code += "from nemotron.stack.models import NemotronH\nassert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
