"""Blockwise FP8 against ModelOpt's recorded values, torch's own cast, closed forms, and bf16 training."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.quantization.fp8 import BlockwiseFp8, Fp8Linear, dequantize, quantize, round_to_fp8, train_in_fp8
from nemotron.stack.training.losses import next_token_loss

RECORDED = json.loads(lzma.decompress((Path(__file__).parent / "recorded/quantization.json.xz").read_bytes()))
FP8_CASES = [case for case in RECORDED["cases"] if case["case"].startswith("modelopt_fp8")]


def fp32(hex_of_bytes: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(hex_of_bytes), dtype=torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def powers_of_two(*shape: int, seed: int) -> Tensor:
    """+-1, 2, 4 or 8; at least one 8 in any tile, so that its scale is 8/448 and all of them are E4M3 values."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(4, shape, generator=source).exp2() * (torch.randint(2, shape, generator=source) * 2 - 1)
    values[0], values[:, 0] = 8, 8
    return values


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: f"{case['case']}, {case['tag']}")
def test_a_block_as_large_as_the_tensor_or_a_row_is_modelopts(case: dict[str, Any]) -> None:
    tensor, recorded = RECORDED["tensors"][case["inputs"]["tensor"]], case["outputs"]
    x = fp32(tensor["float32_le_hex"]).view(tensor["shape"])
    block = tuple(x.shape) if case["options"]["axis"] is None else (1, x.shape[1])
    values, scales = quantize(x, block)
    back = dequantize(values, scales, block)
    theirs = fp32(recorded["scales"]).view(scales.shape)
    codes = torch.frombuffer(bytearray.fromhex(recorded["codes"]), dtype=torch.uint8).view(x.shape)
    some = (theirs != 0).expand(x.shape)  # where they divide by it
    assert not x[~some].any() and not back[~some].any() and (scales[theirs == 0] == 1).all()
    torch.testing.assert_close(scales[theirs != 0], theirs[theirs != 0], rtol=0, atol=0, equal_nan=True)
    is_nan = some & codes.view(torch.float8_e4m3fn).float().isnan()  # a NaN may have either sign
    assert torch.equal(values.float().isnan(), is_nan)
    assert torch.equal(values.view(torch.uint8)[some & ~is_nan], codes[some & ~is_nan])
    if some.all() and back.isfinite().all():
        assert hashlib.sha256(back.numpy().tobytes()).hexdigest()[:32] == recorded["dequantized_sha256_32"]


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 1)])
def test_ragged_tiles_are_those_of_torchs_cast_one_by_one(block: tuple[int, int]) -> None:
    x = random(200, 300) * torch.logspace(-6, 6, 300)
    expected = torch.empty_like(x)
    for i in range(0, 200, block[0]):
        for j in range(0, 300, block[1]):
            tile = x[i : i + block[0], j : j + block[1]]
            scale = tile.abs().max() / 448
            expected[i : i + block[0], j : j + block[1]] = (tile / scale).to(torch.float8_e4m3fn).float() * scale
    values, scales = quantize(x, block)
    assert scales.shape == (-(-200 // block[0]), -(-300 // block[1]))
    assert torch.equal(dequantize(values, scales, block), expected)


@given(seed=st.integers(0, 2**31), exponents=st.tuples(st.integers(-100, 100), st.integers(-100, 100)))
def test_the_error_is_half_a_step(seed: int, exponents: tuple[int, int]) -> None:
    """2^-4 of the value, 3 mantissa bits, down to 2^-6 x scale; half of 2^-9 x scale below. 2^-4 of amax is more."""
    x = random(3, 256, seed=seed).double() * 2.0 ** torch.linspace(*exponents, 256)
    x = x.float()
    _, scales = quantize(x, (1, 128))
    error, scale = (round_to_fp8(x, (1, 128)) - x).abs(), scales.repeat_interleave(128, 1)
    assert (error <= torch.maximum(x.abs() / 16, scale / 1024) * (1 + 1e-6)).all()
    assert (error <= scale * 448 / 28 * (1 + 1e-6)).all()  # half a step of 32 in 448


def test_zeros_stay_and_what_is_not_finite_reaches_its_own_block_only() -> None:
    x = torch.ones(2, 512)
    x[:, 128:256] = 0
    x[0, 300], x[1, 400] = torch.nan, torch.inf
    back = round_to_fp8(x, (1, 128))
    assert torch.equal(back[:, :256], x[:, :256])
    assert back[0, 256:384].isnan().all() and back[1, 384:].isnan().all()
    assert (back[0, 384:] == 1).all() and (back[1, 256:384] == 1).all()
    tiny = torch.tensor([[667 * 2.0**-149]])  # scale 2^-149, where 1.49 x 2^-149 was wanted
    assert round_to_fp8(tiny, (1, 128)).item() == 448 * 2.0**-149
    assert round_to_fp8(torch.tensor([[224 * 2.0**-149]]), (1, 128)).item() == 0


def test_products_and_gradients_of_representable_values_are_exact() -> None:
    """Sums of integers below 2^24 in fp32: nothing may differ from y = x W^T, dx = dy W, dW = dy^T x in float64."""
    x, weight, dy = powers_of_two(150, 200, seed=0), powers_of_two(130, 200, seed=1), powers_of_two(150, 130, seed=2)
    for tensor in (x, weight, dy):
        assert all(torch.equal(round_to_fp8(tensor, block), tensor) for block in ((128, 128), (1, 128), (128, 1)))
    x, weight = x.view(3, 50, 200).requires_grad_(), weight.requires_grad_()
    y = BlockwiseFp8.apply(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy.view(3, 50, 130))
    exact_x, exact_w, exact_dy = x.detach().double(), weight.detach().double(), dy.view(3, 50, 130).double()
    assert torch.equal(y.double(), exact_x @ exact_w.T)
    assert torch.equal(dx.double(), exact_dy @ exact_w)
    assert torch.equal(dw.double(), torch.einsum("bln,blk->nk", exact_dy, exact_x))


def test_each_product_rounds_along_what_it_sums_over() -> None:
    """Against float64 products of tiles that torch's cast rounds; with tiles the other way round they are others."""
    x, weight, dy = random(140, 150), random(160, 150, seed=1), random(140, 160, seed=2)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = BlockwiseFp8.apply(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    blocks = torch.cat([cast(rows, (0, 1), 1) for rows in weight.split(128, 0)])
    right = {"y": cast(x, 1) @ blocks.T, "dx": cast(dy, 1) @ blocks, "dw": cast(dy, 0).T @ cast(x, 0)}
    wrong = {"y": cast(x, 0) @ blocks.T, "dx": cast(dy, 0) @ blocks, "dw": cast(dy, 1).T @ cast(x, 1)}
    for name, actual in {"y": y, "dx": dx, "dw": dw}.items():
        error, of_others = ((actual - expected[name]).norm() / actual.norm() for expected in (right, wrong))
        assert error < 1e-6 and of_others > 0.01, name


def cast(values: Tensor, shared: int | tuple[int, int], cut: int | None = None) -> Tensor:
    """E4M3 by torch's cast, with a scale along the dimensions `shared`, in pieces of 128 along `cut`; in float64."""
    pieces = []
    for piece in values.detach().split(128, shared if isinstance(shared, int) else cut or 0):
        scale = piece.abs().amax(shared, keepdim=True) / 448
        pieces.append((piece / scale).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(pieces, shared if isinstance(shared, int) else cut or 0)


def test_linear_layers_between_the_first_and_last_blocks_are_replaced(small_model: Callable[..., NemotronH]) -> None:
    model = small_model("M-*M-*", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-").eval()
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    names = train_in_fp8(model, 1, 2)
    assert names == [
        "backbone.layers.1.mixer.up_proj", "backbone.layers.1.mixer.down_proj",
        *(f"backbone.layers.2.mixer.{name}_proj" for name in "qkvo"),
        "backbone.layers.3.mixer.in_proj", "backbone.layers.3.mixer.out_proj",
    ]  # fmt: skip
    assert [name for name, part in model.named_modules() if isinstance(part, Fp8Linear)] == names
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert not any(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_fp8_is_on_under_autocast_only(small_model: Callable[..., NemotronH]) -> None:
    plain, converted = small_model("M*-"), small_model("M*-")
    train_in_fp8(converted, 0, 0)
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(converted(ids).logits, plain(ids).logits)
    with torch.autocast("cpu", torch.bfloat16):
        fp8, bf16 = converted(ids).logits, plain(ids).logits
    assert fp8.dtype == bf16.dtype and not torch.equal(fp8, bf16)
    gradients = torch.autograd.grad(next_token_loss(fp8, ids), list(converted.parameters()))
    expected = torch.autograd.grad(next_token_loss(plain(ids).logits, ids), list(plain.parameters()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (gradients, expected))
    assert (one - other).norm() < 0.2 * other.norm()


@pytest.mark.parametrize(("pattern", "start", "message"), [("ME*-", 0, "experts"), ("M*-", 3, "none of the 3 blocks")])
def test_what_cannot_train_in_fp8_is_refused(
    small_model: Callable[..., NemotronH], pattern: str, start: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_in_fp8(small_model(pattern), start, 0)


@pytest.mark.slow
def test_thirty_steps_in_fp8_end_near_bf16(small_model: Callable[..., NemotronH]) -> None:
    """Each token follows from the one before, but every eighth: the mean of the last five losses, within 3 %."""
    losses = {}
    for fp8 in (False, True):
        model = small_model("-M*-", initializer_range=0.1).train()
        if fp8:
            train_in_fp8(model, 1, 1)
        optimizer, source = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1)
        steps = []
        for _ in range(30):
            chain = [torch.randint(61, (8, 4), generator=source)]
            for _ in range(7):
                chain.append((chain[-1] * 7 + 3) % 61)
            ids = torch.stack(chain, -1).flatten(1)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1]).logits
            loss = next_token_loss(logits, ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses[fp8] = sum(steps[-5:]) / 5
    assert losses[False] < 1.5
    assert losses[True] == pytest.approx(losses[False], rel=0.03)
