"""Training takes the number of threads that is faster at the moment, and computes the same on any number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training import threads as module
from nemotron.stack.training.threads import PERIOD, Threads, choose_threads, has_fixed_gradients


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Threads, dict[int, float], int], list[int]]]:
    """Takes steps that last so many seconds on so many threads, on a clock of its own; the threads of each step."""
    before, now = torch.get_num_threads(), [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def steps(threads: Threads, seconds: dict[int, float], count: int) -> list[int]:
        counts = []
        for _ in range(count):
            threads.begin()
            counts.append(torch.get_num_threads())
            now[0] += seconds[counts[-1]]
            threads.end()
        return counts

    yield steps
    torch.set_num_threads(before)


def test_one_thread_while_a_core_is_taken_and_two_when_it_is_free(
    run: Callable[[Threads, dict[int, float], int], list[int]],
) -> None:
    threads = Threads(2)
    busy, free = {1: 1.0, 2: 2.0}, {1: 1.0, 2: 0.6}
    assert run(threads, busy, PERIOD) == [2, 1, 2, 1, 2, 1] + [1] * (PERIOD - 6)
    assert run(threads, free, PERIOD) == [1, 2, 1, 2, 1, 2] + [2] * (PERIOD - 6)
    assert threads.count == 2


def test_of_many_threads_half_and_twice_as_many_are_tried(
    run: Callable[[Threads, dict[int, float], int], list[int]],
) -> None:
    threads = Threads(6)
    run(threads, {4: 5.0, 2: 2.0, 1: 3.0}, 4 * PERIOD)
    assert threads.count == 2
    run(threads, {4: 1.0, 2: 2.0, 1: 3.0}, 2 * PERIOD)
    assert threads.count == 4  # of the powers of two
    assert torch.get_num_threads() == 6  # as at the start, when no update is being computed


def test_a_model_whose_gradients_depend_on_threads_is_noticed_and_left_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = NemotronH(NemotronHConfig("ME", vocab_size=64, hidden_size=32, chunk_size=16)).train()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        random_state, precision = torch.get_rng_state(), torch.autocast("cpu", torch.bfloat16, enabled=False)
        model.lm_head.register_forward_hook(lambda _module, _input, logits: logits * torch.get_num_threads())
        assert not has_fixed_gradients(model, (2, 32), True, precision)
        assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), random_state)
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
        assert all(p.grad is None for p in model.parameters())
        assert not any(moe.gate.expert_load.any() for moe in model.moe_blocks())
        assert choose_threads(model, (2, 32), 2, packed=True).most == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_difference_within_the_noise_changes_nothing(
    run: Callable[[Threads, dict[int, float], int], list[int]],
) -> None:
    threads = Threads(2)
    run(threads, {1: 0.97, 2: 1.0}, PERIOD)
    assert threads.count == 2


SAME_WEIGHTS = """
import torch
from nemotron.stack.training.threads import fix_order_of_sums, has_fixed_gradients
fix_order_of_sums()
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.optim import build_optimizer

def new_model():
    torch.manual_seed(0)
    return NemotronH(NemotronHConfig("MEM*EME", n_routed_experts=16, chunk_size=32)).train()

def weights(count, rows, seq_len):
    torch.set_num_threads(count)
    model = new_model()
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))
    for _ in range(2):
        ids, answers = torch.randint(2048, (rows, seq_len + 1)), torch.rand(rows, seq_len) < 0.4
        documents = torch.arange(seq_len).expand(rows, -1) // 40
        out = model(ids[:, :-1], documents, answers)
        (selected_loss_sum(out.logits, ids[:, 1:][answers]) / 400 + out.load_balancing_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

for shape in [(8, 128), (3, 384), (9, 511)]:
    torch.set_num_threads(4)
    fixed = has_fixed_gradients(new_model(), shape, True, torch.autocast("cpu", enabled=False))
    print(fixed, all(torch.equal(weights(1, *shape), weights(count, *shape)) for count in (2, 4)))
"""  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")
def test_weights_do_not_depend_on_threads_where_gradients_of_random_rows_do_not() -> None:
    """In a process of its own: MKL reads its setting once. 9 rows of 511 tokens are no whole vectors a thread."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", SAME_WEIGHTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shapes = [line.split() for line in done.stdout.splitlines()]
    if shapes[0] == ["False", "False"]:
        pytest.skip("MKL cannot fix the order of sums on this processor")
    assert shapes[:2] == [["True", "True"]] * 2  # those of the tiny pretraining and SFT
    assert shapes[2] in (["True", "True"], ["False", "False"])
