"""Two gloo ranks against one process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.stack.training.distributed import (
    Ranks,
    any_rank,
    clip_gradients,
    deal,
    from_rank_0,
    gather_bytes,
    least_of_ranks,
    start_distributed,
    sum_gradients,
    sum_metrics,
    sum_over_ranks,
)


def test_alone_nothing_changes() -> None:
    ranks = start_distributed()
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    tensor = torch.tensor([1.0, 2.0])
    sum_over_ranks([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert any_rank(True) and not any_rank(False)
    assert from_rank_0(7) == least_of_ranks(7) == 7 and gather_bytes(b"") == [b""]
    assert sum_metrics({"loss": torch.tensor(0.5), "tokens": 3}, ranks) == {"loss": 0.5, "tokens": 3.0}
    assert sum_metrics({}, ranks) == {}  # validation where no source holds text out
    layer = torch.nn.Linear(1, 1)
    sum_gradients(layer)
    assert layer.weight.grad is None
    layer(torch.tensor([[3.0]])).sum().backward()  # gradients 3 and 1
    assert clip_gradients(layer, 1.0).item() == pytest.approx(10**0.5)
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == pytest.approx(3 / 10**0.5)


@pytest.mark.parametrize(("count", "world_size"), [(5, 1), (5, 2), (6, 3), (2, 4), (0, 2)])
def test_all_batches_are_dealt_once_and_every_rank_is_called_equally_often(count: int, world_size: int) -> None:
    hands = [list(deal(iter(range(count)), Ranks(rank, world_size, torch.device("cpu")))) for rank in range(world_size)]
    assert sorted(batch for hand in hands for batch, counts in hand if counts) == list(range(count))
    assert {len(hand) for hand in hands} == {-(-count // world_size)}
    source = iter(range(count))
    next(deal(source, Ranks(0, world_size, torch.device("cpu"))), None)
    assert len(list(source)) == max(0, count - world_size), "one turn is read ahead, not all"


def test_what_does_not_divide_among_the_ranks_is_refused() -> None:
    Ranks(0, 2, torch.device("cpu")).check_divides("train.global_batch_size", 4)
    with pytest.raises(UserError, match="global_batch_size 5 does not divide among 2 processes"):
        Ranks(0, 2, torch.device("cpu")).check_divides("train.global_batch_size", 5)


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="process 1 of this machine has no GPU of its own: PyTorch sees 1"):
        start_distributed()


def test_a_build_of_torch_for_cpus_beside_gpus_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else as many processes as GPUs would train on the CPU without a word."""
    monkeypatch.setattr("nemotron.stack.training.distributed.visible_gpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start_distributed().device.type == "cpu"
    assert capsys.readouterr().err == f"GPUs: 8, of which torch {torch.__version__} sees none: training on the CPU\n"


def test_two_ranks_sum_gradients_counts_and_flags(tmp_path: Path) -> None:
    """And leave: threads of Gloo that run on, as a module that keeps the group makes them, abort a process at its end.

    torch.optim imports such modules when the first optimiser is built, and FSDP2 keeps the group in circles and caches.
    """
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import atexit, os, sys, torch
        from pathlib import Path
        from nemotron.stack.training.distributed import *

        def gloo_threads():
            return [name for task in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := task.read_text())]

        atexit.register(lambda: os._exit(bool(gloo_threads())))  # after what start_distributed registers
        ranks = start_distributed()
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in "abc"})
        with torch.no_grad():
            model["a"].weight.fill_(1.0)
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[ranks.rank]
        model["a"](x).sum().backward()
        if ranks.rank == 1:
            model["b"](x).sum().backward()
        sum_gradients(model)                    # "c" got no gradient anywhere
        gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        count = torch.tensor(ranks.rank + 1, dtype=torch.int64)
        sum_over_ranks([count, torch.zeros(2)])
        sums = sum_metrics({"tokens": 2**53 - 1 if ranks.rank else 1, "nats": torch.tensor(0.5 + ranks.rank)}, ranks)
        flags = (any_rank(ranks.rank == 1), any_rank(False), from_rank_0(ranks.rank + 5))
        assert least_of_ranks(sys.maxsize - ranks.rank) == sys.maxsize - 1
        assert gather_bytes(b"x" * ranks.rank) == [b"", b"x"] and gather_bytes(b"") == [b"", b""]
        torch.optim.AdamW(model.parameters())
        Path(sys.argv[1], f"{ranks.rank}.txt").write_text(repr((gradients, count.item(), sums, flags)))

        def main():  # a script that ends while it holds a sharded model
            from torch.distributed.fsdp import fully_shard
            sharded = fully_shard(torch.nn.Linear(8, 8))
            sharded(torch.ones(2, 8)).sum().backward()
            stop_distributed()
        main()
    """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, tmp_path]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    results = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    sums = {"tokens": 2.0**53, "nats": 2.0}
    assert results == {repr(([[[4.0, 6.0]], [[3.0, 4.0]], None], 3, sums, (True, False, 5)))}
