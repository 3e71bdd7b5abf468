"""Two gloo ranks against one process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from nemotron.stack.training.distributed import any_rank, start_distributed, sum_gradients, sum_over_ranks


def test_alone_nothing_changes() -> None:
    ranks = start_distributed()
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    tensor = torch.tensor([1.0, 2.0])
    sum_over_ranks([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert any_rank(True, ranks.device) and not any_rank(False, ranks.device)
    layer = torch.nn.Linear(1, 1)
    sum_gradients(layer)
    assert layer.weight.grad is None


def test_two_ranks_sum_gradients_counts_and_flags(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        from nemotron.stack.training.distributed import *
        ranks = start_distributed()
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1, bias=False), "b": torch.nn.Linear(1, 1, bias=False)})
        with torch.no_grad():
            model["a"].weight.fill_(1.0)
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[ranks.rank]
        model["a"](x).sum().backward()          # "b" got no gradient anywhere
        sum_gradients(model)
        count = torch.tensor(ranks.rank + 1, dtype=torch.int64)
        sum_over_ranks([count, torch.zeros(2)])
        flags = (any_rank(ranks.rank == 1, ranks.device), any_rank(False, ranks.device))
        stop_distributed()
        Path(sys.argv[1], f"{ranks.rank}.txt").write_text(
            repr((model["a"].weight.grad.tolist(), model["b"].weight.grad.tolist(), count.item(), flags))
        )
    """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, tmp_path]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    results = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert results == {repr(([[4.0, 6.0]], [[0.0]], 3, (True, False)))}
