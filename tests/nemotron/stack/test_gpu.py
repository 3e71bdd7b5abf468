"""On a CUDA GPU updates, tokens and codes are those of the CPU, in fp64, where rounding hides nothing; in lower
precisions updates have the same bits each time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import cache as cache_module
from nemotron.stack.models.decoding import replay
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.decoding.speculative import generate_speculative
from nemotron.stack.quantization.fp8 import train_in_fp8
from nemotron.stack.quantization.nvfp4 import Scales, quantize_nvfp4
from nemotron.stack.quantization.nvfp4_training import Nvfp4Run, train_in_nvfp4
from nemotron.stack.serving.engine import Engine, Limits, Sampling
from nemotron.stack.training.distributed import use_deterministic_cuda
from nemotron.stack.training.losses import mtp_loss, next_token_loss
from nemotron.stack.training.optim import build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and `pytest -m gpu`"),
]

SUPER: dict[str, Any] = {"moe_latent_size": 10, "num_nextn_predict_layers": 1}
ADAMW = AdamWConfig(lr=3e-3, adam_beta2=0.95, weight_decay=0.1)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13]]


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("MEM*EME-", 1, **SUPER).double()


def test_updates_are_those_of_the_cpu(model: NemotronH) -> None:
    """Packed rows, a further token predicted, the bias of the experts, AdamW: ten steps."""
    ids = torch.randint(61, (10, 4, 31), generator=torch.Generator().manual_seed(0))
    seq_idx = torch.arange(30).div(8, rounding_mode="floor").expand(4, -1)

    def losses_and_weights(device: str) -> tuple[list[float], Tensor]:
        trained = copy.deepcopy(model).to(device).train()
        optimizer, losses = build_optimizer(trained, ADAMW), []
        for rows in ids.to(device):
            out = trained(rows[:, :-1], seq_idx.to(device))
            loss = next_token_loss(out.logits, rows[:, 1:]) + 0.3 * mtp_loss(out.mtp_logits, rows[:, 1:])
            (loss + 1e-2 * out.load_balancing_loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.update_expert_bias(1e-2)
            losses.append(loss.item())
        return losses, torch.cat([p.detach().flatten().cpu() for p in trained.state_dict().values()])

    losses, weights = losses_and_weights("cpu")
    found, found_weights = losses_and_weights("cuda")
    assert losses[-1] < losses[0] - 0.1
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(found_weights, weights, rtol=1e-7, atol=1e-9)


@pytest.fixture
def one_order() -> Iterator[None]:
    """As every training script has it. PyTorch also says so where an operation has no fixed order on a GPU."""
    use_deterministic_cuda()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize("precision", ["bf16", "FP8", "NVFP4"])
@pytest.mark.parametrize("packed", [False, True])
def test_updates_have_the_same_bits_each_time(
    small_model: Callable[..., NemotronH], precision: str, packed: bool
) -> None:
    """On shapes that take the kernels of a real run: what a resumed run relies on."""
    sizes = {"hidden_size": 128, "head_dim": 32, "mamba_head_dim": 32, "ssm_state_size": 32, "chunk_size": 64}
    ids = torch.randint(61, (3, 4, 257), generator=torch.Generator().manual_seed(0)).cuda()
    seq_idx = torch.arange(256).div(100, rounding_mode="floor").expand(4, -1).cuda() if packed else None
    ends = []
    for _ in range(2):
        model = small_model("M*-M*-" if precision == "FP8" else "MEM*EME-", 1, **sizes, moe_intermediate_size=64)
        if precision == "FP8":
            train_in_fp8(model, 0, 0)
        elif precision == "NVFP4":
            train_in_nvfp4(model, Nvfp4Run(0, 0), None, 0, 0)
        model.cuda().train()
        optimizer = build_optimizer(model, ADAMW)
        for rows in ids:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(rows[:, :-1], seq_idx).logits
            next_token_loss(logits, rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_tokens_are_those_of_the_cpu(model: NemotronH) -> None:
    """Plain and speculative decoding, and the server's engine, which holds rows of all ages."""
    model.eval()
    expected = generate(model, PROMPTS, 20, temperature=0, stop_token_ids=())
    model.cuda()
    found = generate(model, PROMPTS, 20, temperature=0, stop_token_ids=())
    assert found.tokens == expected.tokens
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs))
    drafted, _ = generate_speculative(model, PROMPTS, 20, 3, stop_token_ids=())
    assert drafted.tokens == expected.tokens
    for num_drafts in (0, 2):
        engine = Engine(model, Limits(max_length=100, max_rows=3, num_drafts=num_drafts))
        engine.start()
        try:
            answers = [engine.submit(prompt, Sampling(20, (), temperature=0)) for prompt in PROMPTS]
            served = [[token.id for tokens in answer for token in tokens] for answer in answers]
        finally:
            engine.stop(0)
        assert served == expected.tokens


@pytest.mark.usefixtures("one_order")
def test_replayed_steps_have_the_bits_of_those_that_are_launched(
    small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows end, and keys outgrow the slots that a graph reads."""
    model = small_model("MEM*EME", 1, hidden_size=64, head_dim=32, moe_intermediate_size=64).cuda().eval()
    prompts = [[1 + i % 7] * (1 + i % 5) for i in range(40)]
    found, recorded = [], []
    monkeypatch.setattr(cache_module, "MIN_WINDOW", 16)
    record = replay.ReplayedStep.record
    monkeypatch.setattr(replay.ReplayedStep, "record", lambda *of: recorded.append(len(of[1])) or record(*of))
    for steps_before in (2, 10**9):
        monkeypatch.setattr(replay, "STEPS_BEFORE", steps_before)
        source = torch.Generator("cuda").manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16):
            found.append(generate(model, prompts, 50, stop_token_ids=(11, 12), generator=source))
    assert len(recorded) > 2
    assert len(set(recorded)) > 1, "no row ended"
    assert found[0] == found[1]


@pytest.mark.parametrize("scales", ["max", "mse"])
def test_codes_of_quantised_weights_are_those_of_the_cpu(scales: Scales) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    found, expected = (quantize_nvfp4(x, scales=scales) for x in (weight.cuda(), weight))
    for name in ("codes", "scales", "global_scale"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
