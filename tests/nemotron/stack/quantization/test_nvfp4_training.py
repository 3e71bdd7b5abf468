"""NVFP4 training against slow formulas of its own, closed forms and invariances."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.kit.schemas.training import QuantRecipe
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.moe import Experts
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.quantization.nvfp4_training import (
    HADAMARD,
    Layer,
    LowPrecisionExperts,
    LowPrecisionLinear,
    Nvfp4Run,
    rotate,
    round_squares,
    round_vectors,
    train_in_nvfp4,
)
from nemotron.stack.training.losses import next_token_loss

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Positive values of E4M3 from their bits: exponent e of 4, mantissa m of 3; the code 127 is NaN.
E4M3 = [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
ALL_NVFP4 = QuantRecipe(**dict.fromkeys(QuantRecipe.model_fields, "nvfp4"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(value: float, grid: list[float]) -> float:
    """Ties to the even index, which is the even code."""
    return grid[min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(value)), i % 2))] * (-1 if value < 0 else 1)


def slow_nvfp4(x: Tensor, rows: int, columns: int) -> Tensor:
    """Number by number in float64: blocks of rows x columns, scales from the largest values, all to nearest."""
    x = x.detach().double()
    tensor_scale, out = x.abs().max().item() / (6 * 448), torch.zeros_like(x)
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        block = x[i : i + rows, j : j + columns]
        scale = nearest(block.abs().max().item() / 6 / tensor_scale, E4M3) * tensor_scale
        for a, b in itertools.product(*map(range, block.shape)):
            out[i + a, j + b] = nearest(block[a, b].item() / scale, E2M1) * scale
    return out


def slow_mxfp8(x: Tensor) -> Tensor:
    """The same with a power of two for 32 values of a row, the smallest with which none is beyond 448."""
    x = x.detach().double()
    out = torch.zeros_like(x)
    for i, j in itertools.product(range(x.shape[0]), range(0, x.shape[1], 32)):
        block = x[i, j : j + 32]
        scale = next(2.0**e for e in range(-127, 128) if block.abs().max().item() <= 448 * 2.0**e)
        for b in range(len(block)):
            out[i, j + b] = nearest(block[b].item() / scale, E4M3) * scale
    return out


def slow_rotation(x: Tensor) -> Tensor:
    """Sixteen columns at a time times Sylvester's matrix with signs, after zeros have filled up the last sixteen."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    two, sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.ones(1, 1).double()
    for _ in range(4):
        sylvester = torch.kron(two, sylvester)
    matrix = torch.diag(torch.tensor(signs).double()) @ sylvester / 4
    x = torch.cat([x.detach().double(), torch.zeros(len(x), -x.shape[1] % 16).double()], 1)
    return torch.cat([columns @ matrix for columns in x.split(16, 1)], 1)


def products(x: Tensor, weight: Tensor, dy: Tensor, layer: Layer) -> dict[str, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer.product(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    return {"y": y.detach(), "dx": dx, "dw": dw}


def off(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rht", [True, False])
@pytest.mark.parametrize("shape", [(32, 48, 64), (20, 24, 41)], ids=["whole blocks", "ragged"])
def test_nvfp4_products_are_those_of_the_slow_formula(shape: tuple[int, int, int], rht: bool) -> None:
    tokens, inputs, outputs = shape
    x, weight, dy = random(tokens, inputs), random(outputs, inputs, seed=1), random(tokens, outputs, seed=2)
    x[3] *= 30  # an outlier
    run = Nvfp4Run(seed=0, disable_rht=not rht, disable_stochastic_rounding=True)
    actual = products(x, weight, dy, Layer("layer", "nvfp4", run))
    square = slow_nvfp4(weight, 16, 16)
    left, right = (slow_rotation(dy.T), slow_rotation(x.T)) if rht else (dy.T, x.T)
    expected = {
        "y": slow_nvfp4(x, 1, 16) @ square.T,
        "dx": slow_nvfp4(dy, 1, 16) @ square,
        "dw": slow_nvfp4(left, 1, 16) @ slow_nvfp4(right, 1, 16).T,
    }
    exact = {"y": x @ weight.T, "dx": dy @ weight, "dw": dy.T @ x}
    for name, value in actual.items():
        assert off(value, expected[name]) < 1e-6 and off(value, exact[name]) > 0.05, name


def test_mxfp8_products_are_those_of_the_slow_formula() -> None:
    x, weight, dy = random(40, 50), random(70, 50, seed=1), random(40, 70, seed=2)
    actual = products(x, weight, dy, Layer("layer", "mxfp8", Nvfp4Run(seed=0)))
    expected = {
        "y": slow_mxfp8(x) @ slow_mxfp8(weight).T,
        "dx": slow_mxfp8(dy) @ slow_mxfp8(weight.T).T,
        "dw": slow_mxfp8(dy.T) @ slow_mxfp8(x.T).T,
    }
    for name, value in actual.items():
        assert off(value, expected[name]) < 1e-6, name


def test_square_blocks_make_the_transposed_weight_the_same_values() -> None:
    weight = random(48, 80)
    assert torch.equal(round_squares(weight.T), round_squares(weight).T)
    assert not torch.equal(round_vectors(weight.T), round_vectors(weight).T)


def test_the_rotation_is_orthogonal_and_leaves_the_product_as_it_is() -> None:
    assert torch.equal(HADAMARD @ HADAMARD.T, torch.eye(16))
    integers = torch.randint(-8, 9, (2, 7, 40), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(rotate(integers[0]) @ rotate(integers[1]).T, integers[0] @ integers[1].T)
    outlier = torch.zeros(1, 16)
    outlier[0, 5] = 8
    assert torch.equal(rotate(outlier).abs(), torch.full((1, 16), 2.0))  # its energy, over all of the block


@pytest.mark.parametrize("product", ["dx", "dw"])
def test_stochastic_rounding_of_gradients_has_the_mean_and_variance_of_the_closed_form(product: str) -> None:
    """dx = dy W with W = 6 I, and dW = dy^T x with x = 6 I: the gradient with its blocks rounded, many times over.

    Between neighbours a and b of the magnitude v: mean v, variance (v - a)(b - v).
    """
    values = torch.tensor([6, 0, 0.05, 0.25, 0.6, -0.9, 1.2, 1.7, 2.2, -2.6, 3.0, 3.3, 4.4, 5.9, -0.4, 1.0])
    count, six = 20_000, 6 * torch.eye(16)
    layer = Layer("layer", "nvfp4", Nvfp4Run(seed=3, disable_rht=True))
    if product == "dx":
        rounded = products(torch.zeros(count, 16), six, values.expand(count, -1), layer)["dx"] / 6
    else:
        rounded = products(six, torch.zeros(count, 16), values.expand(count, -1).T, layer)["dw"] / 6
    for value, found in zip(values.tolist(), rounded.T, strict=True):
        below = max(v for v in E2M1 if v <= abs(value))
        above = min(v for v in E2M1 if v >= abs(value))
        neighbours = torch.tensor([below, above]).copysign(torch.tensor(value))
        one_of_them = neighbours[(found.unsqueeze(1) - neighbours).abs().argmin(1)]
        torch.testing.assert_close(found, one_of_them, rtol=1e-6, atol=0)
        variance = (abs(value) - below) * (above - abs(value))
        assert abs(found.double().mean().item() - value) <= 5 * (variance / count) ** 0.5 + 1e-6
        assert found.double().var().item() == pytest.approx(variance, rel=0.1, abs=1e-9)


def test_random_numbers_follow_from_seed_rank_step_micro_batch_layer_and_product() -> None:
    x, weight, dy = random(16, 16), random(16, 16, seed=1), random(16, 16, seed=2)

    def gradients(name: str = "layer", **changes: object) -> bytes:
        layer = Layer(name, "nvfp4", replace(Nvfp4Run(seed=3, step=7, micro_batch=1), **changes))  # type: ignore[arg-type]
        parts = products(x, weight, dy, layer)
        return parts["dx"].numpy().tobytes() + parts["dw"].numpy().tobytes()

    state = torch.get_rng_state()
    drawn = [
        gradients(),
        gradients("other"),
        *(gradients(**{name: 9}) for name in ("seed", "rank", "step", "micro_batch")),
    ]
    assert gradients() == drawn[0] and len(set(drawn)) == len(drawn)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers move
    run = Nvfp4Run(seed=3)
    both = [torch.rand(4, generator=run.generator("layer", product, x.device)) for product in ("dx", "dw")]
    assert not torch.equal(*both)


@pytest.mark.parametrize("stochastic", [True, False])
def test_each_expert_is_two_linear_layers_on_its_rows(
    small_config: Callable[..., NemotronHConfig], stochastic: bool
) -> None:
    """With one choice a token, output and all gradients are those of two `LowPrecisionLinear`, of the same names."""
    config = small_config("E", num_experts_per_tok=1, n_routed_experts=4)
    run = Nvfp4Run(seed=5, disable_stochastic_rounding=not stochastic)
    torch.manual_seed(0)
    experts = LowPrecisionExperts(config, Layer("experts", "nvfp4", run))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    x, dy = random(40, 24).bfloat16().float(), random(40, 24, seed=1).bfloat16().float()
    chosen = torch.randint(3, (40, 1), generator=torch.Generator().manual_seed(2))  # nobody chooses expert 3
    ones = torch.ones(40, 1)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, ones, chosen)
    actual = torch.autograd.grad(out, (x, *experts.parameters()), dy.bfloat16())
    for expert in range(3):
        rows = (chosen == expert).flatten()
        part = x.detach()[rows].requires_grad_()
        layers = []
        for name, weight in experts.named_parameters():
            layer = LowPrecisionLinear(
                weight.shape[2], weight.shape[1], Layer(f"experts.{expert}.{name}", "nvfp4", run)
            )
            layer.weight = torch.nn.Parameter(weight[expert].detach().clone())
            layers.append(layer)
        up, down = layers
        with torch.autocast("cpu", torch.bfloat16):
            y = down(F.relu(up(part)).square())
        dx, dup, ddown = torch.autograd.grad(y, (part, up.weight, down.weight), dy[rows].bfloat16())
        assert torch.equal(out[rows], y)
        for found, expected in ((actual[0][rows], dx), (actual[1][expert], dup), (actual[2][expert], ddown)):
            assert torch.equal(found, expected)
    assert not actual[1][3].any() and not actual[2][3].any()


def test_experts_add_up_and_weigh_as_they_do_in_bf16(small_config: Callable[..., NemotronHConfig]) -> None:
    """Choices, weights and their gradient: with values that NVFP4 has, all is as in `Experts` under autocast."""
    config = small_config("E", hidden_size=16, moe_intermediate_size=16)
    plain, run = Experts(config), Nvfp4Run(seed=0, disable_rht=True)
    low = LowPrecisionExperts(config, Layer("experts", "nvfp4", run))
    signs = [
        (torch.randint(2, w.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1).float()
        for w in plain.parameters()
    ]
    for one, other, values in zip(plain.parameters(), low.parameters(), signs, strict=True):
        one.data, other.data = values / 4, (values / 4).clone()
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(32)])
    results = []
    for experts in (plain, low):
        x, weights = (random(32, 16).sign() * 2).requires_grad_(), (random(32, 2, seed=1).sigmoid()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = experts(x, weights, chosen)
        results.append((out, *torch.autograd.grad(out, (weights,), random(32, 16, seed=2).sign().to(out.dtype))))
    for one, other in zip(*results, strict=True):
        assert off(other.float(), one.float()) < 0.1  # relu(x W)^2 is rounded to NVFP4, and nothing else


def test_the_recipe_takes_the_layers_that_super_3_publishes() -> None:
    """The first 74 of 88 blocks, 34 M, 33 E and 7 *: two linear layers of each shared expert, all routed experts."""
    with torch.device("meta"):
        model = NemotronH(PRESETS["super3-120b"])
    before = list(model.state_dict())
    precisions = train_in_nvfp4(model, Nvfp4Run(seed=0))
    found = [(name.split(".mixer.")[1], precision) for name, precision in precisions.items()]
    assert {entry: found.count(entry) for entry in found} == {
        ("in_proj", "nvfp4"): 34, ("out_proj", "mxfp8"): 34, ("experts", "nvfp4"): 33,
        ("shared_experts.up_proj", "nvfp4"): 33, ("shared_experts.down_proj", "nvfp4"): 33,
    }  # fmt: skip
    assert max(int(name.split(".")[2]) for name in precisions) == 73
    assert list(model.state_dict()) == before


def test_the_recipe_takes_the_layers_of_a_small_model(small_model: Callable[..., NemotronH]) -> None:
    model = small_model(
        "MEM*EME", moe_latent_size=8, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E"
    ).eval()
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    precisions = train_in_nvfp4(model, Nvfp4Run(seed=0))
    experts = ["experts", "shared_experts.up_proj", "shared_experts.down_proj"]
    expected = {0: ["in_proj", "out_proj"], 1: experts, 2: ["in_proj", "out_proj"], 4: experts}  # 7 - ceil(1.05) blocks
    assert precisions == {
        f"backbone.layers.{index}.mixer.{name}": "mxfp8" if name == "out_proj" else "nvfp4"
        for index, names in expected.items()
        for name in names
    }
    replaced = [n for n, m in model.named_modules() if isinstance(m, LowPrecisionLinear | LowPrecisionExperts)]
    assert sorted(replaced) == sorted(precisions)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert not any(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="leave none of the 7 blocks for NVFP4"):
        train_in_nvfp4(model, Nvfp4Run(seed=0), num_layers_at_start_in_bf16=5)


def test_every_linear_layer_of_a_mixer_has_a_line_in_the_recipe(small_model: Callable[..., NemotronH]) -> None:
    model = small_model("ME*-", moe_latent_size=8)
    assert len(train_in_nvfp4(model, Nvfp4Run(seed=0), ALL_NVFP4, 0, 0)) == 2 + 5 + 4 + 2


def gradients_of(model: NemotronH, ids: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    return list(torch.autograd.grad(next_token_loss(logits, ids), list(model.parameters())))


def test_nvfp4_is_on_under_autocast_only_and_gradients_are_near(small_model: Callable[..., NemotronH]) -> None:
    plain, converted = (small_model("ME*-", initializer_range=0.05).train() for _ in range(2))
    train_in_nvfp4(converted, Nvfp4Run(seed=0), None, 0, 0)
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(converted(ids).logits, plain(ids).logits)
    found, expected = gradients_of(converted, ids), gradients_of(plain, ids)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (found, expected))
    assert 0.05 < off(one, other) < 0.4  # bf16 alone is 0.005 off, MXFP8 in all of these layers 0.08


def test_recomputed_activations_change_no_bit(small_model: Callable[..., NemotronH]) -> None:
    ids, results = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0)), []
    for recompute in (False, True):
        model = small_model("ME*-").train()
        train_in_nvfp4(model, Nvfp4Run(seed=0, step=4, micro_batch=2), ALL_NVFP4, 0, 0)
        for block in model.blocks():
            block.recompute = recompute
        results.append(gradients_of(model, ids))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


SHARDED = """
import json, sys, torch
from pathlib import Path
from nemotron.kit.schemas.training import QuantRecipe
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.quantization.nvfp4_training import Nvfp4Run, train_in_nvfp4
from nemotron.stack.training.distributed import full_tensor, start_distributed, stop_distributed
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.sharding import shard_model

ranks, results = start_distributed(), []
ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
for shard in (False, True):
    torch.manual_seed(0)
    model = NemotronH(NemotronHConfig(**json.loads(sys.argv[2]))).train()
    train_in_nvfp4(model, Nvfp4Run(seed=0), QuantRecipe(experts="nvfp4", qkv_proj="nvfp4", latent_proj="nvfp4"), 0, 0)
    if shard:
        shard_model(model, ranks, bf16=False)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    next_token_loss(logits, ids).backward()
    results.append([full_tensor(parameter.grad) for parameter in model.parameters()])
stop_distributed()
if ranks.is_main:  # both ranks had the same tokens and the same random numbers, and gradients are summed
    Path(sys.argv[1]).write_text(json.dumps([torch.equal(2 * one, two) for one, two in zip(*results)]))
"""


@pytest.mark.slow
def test_a_sharded_model_has_the_same_gradients(small_config: Callable[..., NemotronHConfig], tmp_path: Path) -> None:
    script, result = tmp_path / "sharded.py", tmp_path / "result.json"
    script.write_text(SHARDED)
    config = json.dumps(asdict(small_config("ME*-", moe_latent_size=8)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(script), str(result), config], check=True, capture_output=True, timeout=250)
    same = json.loads(result.read_text())
    assert same and all(same)
