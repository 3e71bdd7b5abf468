"""Two lanes compute what one after another does, bit by bit, and end together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.lanes import Lanes, Stopped
from nemotron.stack.training.losses import next_token_loss


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def dense() -> NemotronH:
    torch.manual_seed(0)
    config = NemotronHConfig(
        hybrid_override_pattern="M-*", vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2,
        chunk_size=8,
    )  # fmt: skip
    return NemotronH(config)


def loss_sum(model: NemotronH, ids_BL: Tensor) -> Tensor:
    return next_token_loss(model(ids_BL[:, :-1]).logits, ids_BL[:, 1:]) * ids_BL[:, 1:].numel()


def gradients(model: NemotronH) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_gradients_are_those_of_the_whole_batch_on_any_number_of_threads(num_parts: int) -> None:
    model, ids_BL = dense(), torch.randint(64, (5, 17), generator=torch.Generator().manual_seed(0))
    whole = loss_sum(model, ids_BL) / 80
    whole.backward()
    expected, parts = gradients(model), ids_BL.tensor_split(num_parts)
    results = []
    for count in (1, 2, 2, 2):
        model.zero_grad()
        lanes = Lanes(count)
        loss = lanes.add_gradients(model, partial(loss_sum, model), parts, 80)
        torch.testing.assert_close(loss, whole.detach())
        results.append(gradients(model))
        torch.testing.assert_close(results[-1], expected, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(results[0], other) for other in results[1:])
    lanes.add_gradients(model, partial(loss_sum, model), parts, 80)  # on top of what is there
    assert torch.equal(gradients(model), 2 * results[0])


def test_measures_come_back_beside_the_loss_and_have_no_gradient() -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    parts = [torch.full((3,), float(i)) for i in range(3)]
    means = Lanes().add_gradients(layer, lambda x: torch.stack([layer(x).sum(), 100 * layer(x).sum()]), parts, 3)
    torch.testing.assert_close(means, torch.tensor([1.0, 100.0]) * layer.weight.sum().detach())
    torch.testing.assert_close(layer.weight.grad, torch.ones(1, 3))
    assert Lanes().add_gradients(layer, torch.sum, []) == 0


def test_the_gradient_of_a_transposed_weight_has_the_layout_of_the_weight() -> None:
    layer, grad_32 = torch.nn.Linear(3, 2, bias=False), torch.arange(6.0).view(3, 2)
    Lanes().add_gradients(layer, lambda x: (layer.weight.T * x).sum(), [grad_32, grad_32])
    assert layer.weight.grad is not None and layer.weight.grad.stride() == layer.weight.stride() == (3, 1)
    assert torch.equal(layer.weight.grad, 2 * grad_32.T)


def test_two_forward_passes_do_not_count_into_one_buffer() -> None:
    with pytest.raises(ValueError, match="has buffers"):
        Lanes().add_gradients(torch.nn.BatchNorm1d(2), torch.sum, [torch.ones(2, 2)])


@pytest.mark.parametrize("count", [1, 2])
def test_results_are_in_the_order_of_the_parts(count: int) -> None:
    lanes = Lanes(count)
    assert lanes.map(lambda part: (part, torch.get_num_threads()), range(9)) == [(i, 1) for i in range(9)]


@pytest.mark.parametrize("failing", [0, 1])
def test_where_a_part_fails_the_others_are_stopped_and_the_rest_is_not_begun(failing: int) -> None:
    lanes, begun, stopped = Lanes(2), list[int](), list[int]()

    def work(part: int) -> None:
        begun.append(part)
        if part == failing:
            raise RuntimeError(f"part {part}")
        try:
            while True:
                lanes.poll()
        except Stopped:
            stopped.append(part)
            raise

    with pytest.raises(RuntimeError, match=f"part {failing}"):
        lanes.map(work, range(50))
    assert len(begun) < 50 and sorted([*stopped, failing]) == sorted(begun)
    assert lanes.map(lambda part: part, range(3)) == [0, 1, 2]  # they go on


def test_a_signal_stops_the_lanes() -> None:
    """As Ctrl-C does: an exception in the thread that waits for them."""
    lanes, begun = Lanes(2), threading.Event()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def work(part: int) -> None:
        begun.set()
        while True:
            lanes.poll()

    def send() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lanes.map(work, range(4))
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
