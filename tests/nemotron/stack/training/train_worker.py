"""One rank of training runs of the pretraining script's own loop: `python train_worker.py RUNS.json`.

RUNS.json lists runs, done one after another in one process group. A run has a name and, where they are not the
defaults, a directory (else its name), config values over those of BASE, a dtype, `stop_after`, a step, and `resume`.
All is written beside RUNS.json: the data before the first run, the metrics of every rank, the weights of runs that end.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from token_files import write_blend

from nemotron.kit import MetricsLog
from nemotron.kit.stop import StopFlag, StopRequested
from nemotron.recipes.nano3.stage0_pretrain import train as script
from nemotron.recipes.nano3.stage0_pretrain.schema import PretrainConfig
from nemotron.stack.training import session as module
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.distributed import Ranks, start_distributed, stop_distributed
from nemotron.stack.training.phases import PhaseLoaders
from nemotron.stack.training.session import Session

VOCAB_SIZE = 48
BASE: dict[str, Any] = {
    "run.data": "none", "model.hybrid_override_pattern": "ME*-", "model.vocab_size": VOCAB_SIZE,
    "model.hidden_size": 16, "model.num_attention_heads": 2, "model.num_key_value_heads": 1, "model.head_dim": 8,
    "model.mamba_num_heads": 2, "model.mamba_head_dim": 8, "model.ssm_state_size": 4, "model.n_groups": 1,
    "model.chunk_size": 8, "model.n_routed_experts": 5, "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 8, "model.moe_shared_expert_intermediate_size": 8, "model.intermediate_size": 16,
    "model.initializer_range": 0.1, "model.moe_router_bias_update_rate": 1e-2, "model.moe_aux_loss_coeff": 1e-2,
    "dataset.seq_length": 20, "train.train_iters": 20, "train.global_batch_size": 8, "train.micro_batch_size": 2,
    "train.eval_interval": 10, "train.eval_iters": 3, "optimizer.lr": 1e-2, "optimizer.min_lr": 1e-4,
    "optimizer.clip_grad": 0.5, "scheduler.lr_warmup_iters": 3, "scheduler.lr_wsd_decay_iters": 4,
    "checkpoint.save_interval": 7, "logger.log_interval": 1, "mixed_precision": "fp32",
}  # fmt: skip


class StopAfter(StopFlag):
    """Stands in for the signal: it comes as soon as `step` is logged."""

    def __init__(self, metrics: MetricsLog, step: int | None) -> None:
        super().__init__()
        self.metrics, self.step = metrics, step

    @property
    def received(self) -> signal.Signals | None:
        logged = self.step is not None and any(record["step"] >= self.step for record in self.metrics.read())
        return signal.SIGTERM if logged else None

    @received.setter
    def received(self, number: signal.Signals | None) -> None:
        """No signal comes but that one."""


def train(run: dict[str, Any], data: Path, out: Path, ranks: Ranks) -> None:
    """One run, to its end or to `stop_after`."""
    torch.set_default_dtype(getattr(torch, run.get("dtype", "float64")))
    values: dict[str, Any] = {}
    for key, value in {**BASE, "dataset.path": str(data), **run.get("config", {})}.items():
        group, _, name = key.partition(".")
        if name:
            values.setdefault(group, {})[name] = value
        else:
            values[group] = value
    cfg = PretrainConfig.model_validate(values)
    sequences = cfg.train.train_iters * cfg.train.global_batch_size
    loaders = PhaseLoaders(cfg.dataset, sequences, cfg.rng.seed, ranks)
    inputs = script.Data(loaders, data, torch.ones(VOCAB_SIZE, dtype=torch.int64))
    directory = out / run.get("directory", run["name"])
    metrics = MetricsLog(directory / f"metrics{ranks.rank}.jsonl")
    opened: Any = SimpleNamespace(
        dir=directory, resumed=run.get("resume", False), metrics=metrics, config={}, write_state=lambda *_, **__: None
    )
    with Checkpoints(directory / "checkpoints", "the same run", cfg.checkpoint.keep_last) as checkpoints:
        stop = StopAfter(metrics, run.get("stop_after"))
        session = Session(ranks, opened, stop, checkpoints, cfg.checkpoint.save_interval, precision="fp32")
        try:
            model, _ = script.train(cfg, session, inputs)
        except StopRequested:
            assert stop.checkpoint is not None and stop.checkpoint == checkpoints.last
            return
    if ranks.is_main:
        save_file(model.state_dict(), out / f"{run['name']}.safetensors")


def write_data(folder: Path) -> None:
    """A blend of two sources: documents count up, by one or by two, from a random token."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    documents = {
        name: [
            [1 + (start + step * i) % (VOCAB_SIZE - 1) for i in range(length)]
            for start, length in rng.integers(10, 60, (60, 2)).tolist()
        ]
        for step, name in enumerate(("a", "b"), start=1)
    }
    write_blend(folder, documents, {"a": 0.7, "b": 0.3})
    blend = json.loads((folder / "blend.json").read_text())
    (folder / "blend.json").write_text(json.dumps(blend | {"vocab_size": VOCAB_SIZE}))


def main() -> None:
    """All runs of the file."""
    faulthandler.dump_traceback_later(240, exit=True)  # where it hangs
    path = Path(sys.argv[1])
    module.measure_peak_flops = lambda *_: 1.0
    ranks = start_distributed()
    data = path.with_name("data")
    if not data.exists():  # the first launch is of one process
        write_data(data)
    for run in json.loads(path.read_text()):
        train(run, data, path.parent, ranks)
    stop_distributed()


if __name__ == "__main__":
    main()
