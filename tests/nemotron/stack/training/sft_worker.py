"""One rank of runs of the SFT script's own loop, in float64: `python sft_worker.py RUNS.json`.

RUNS.json lists runs, each with a name, a packing, which is a folder beside it, and config values; where it says so it
stops after a step, or goes on in the folder of its name. The metrics and the weights of each are written beside it; the
data and the model to begin with, `base`, are there before.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from train_worker import StopAfter

from nemotron.kit import MetricsLog
from nemotron.kit.stop import StopRequested
from nemotron.recipes.nano3.stage1_sft import train as script
from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.training import session as module
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.distributed import Ranks, start_distributed, stop_distributed
from nemotron.stack.training.loaders import PackedLoader
from nemotron.stack.training.session import Session

# Whatever depends on how rows are cut is off: the load-balancing loss is a mean over rows, and padding counts as load.
BASE: dict[str, dict[str, Any]] = {
    "run": {"model": "none", "data": "none"}, "dataset": {"path": "none"},
    "checkpoint": {"pretrained_checkpoint": "none"},
    "model": {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0, "mtp_loss_scaling_factor": 0.3},
    "train": {"train_iters": 4, "eval_interval": 2, "eval_iters": 1},
    "optimizer": {"lr": 1e-2, "clip_grad": 0.5}, "scheduler": {"lr_warmup_iters": 1},
    "logger": {"log_interval": 1}, "mixed_precision": "fp32",
}  # fmt: skip


def train(run: dict[str, Any], out: Path, ranks: Ranks) -> None:
    """One run: every step takes all rows of its packing."""
    values = {group: {**keys, **run["config"].get(group, {})} if isinstance(keys, dict) else keys
              for group, keys in {"peft": {}, "dist": {}, **BASE}.items()}  # fmt: skip
    packing = out / run["packing"]
    rows = PackedLoader(packing, None, 0).num_rows
    values["train"]["global_batch_size"] = rows
    cfg = SFTConfig.model_validate(values)
    loader, valid = (
        PackedLoader(packing, None, 0, each, cfg.train.loss_reduction) for each in (ranks, Ranks(0, 1, ranks.device))
    )
    inputs: Any = SimpleNamespace(
        base=SimpleNamespace(path=out / "base"),
        pack=SimpleNamespace(seq_len=loader.seq_len),
        loader=loader,
        valid=valid,
    )
    metrics = MetricsLog(out / run["name"] / f"metrics{ranks.rank}.jsonl")
    opened: Any = SimpleNamespace(
        dir=out / run["name"], resumed=run.get("resume", False), metrics=metrics, config={},
        write_state=lambda *_, **__: None,
    )  # fmt: skip
    with Checkpoints(out / run["name"] / "checkpoints", "the same run") as checkpoints:
        stop = StopAfter(metrics, run.get("stop_after"))
        session = Session(ranks, opened, stop, checkpoints, cfg.checkpoint.save_interval, precision="fp32")
        try:
            model, _ = script.train(cfg, session, inputs)
        except StopRequested:
            return
    if ranks.is_main:
        save_file(model.state_dict(), out / f"{run['name']}.safetensors")


def main() -> None:
    """All runs of the file."""
    faulthandler.dump_traceback_later(240, exit=True)  # where it hangs
    torch.set_default_dtype(torch.float64)
    read = NemotronH.from_pretrained
    script.NemotronH.from_pretrained = lambda path, *_: read(path, torch.float64)  # type: ignore[assignment,method-assign]
    module.measure_peak_flops = lambda *_: 1.0
    path, ranks = Path(sys.argv[1]), start_distributed()
    for run in json.loads(path.read_text()):
        train(run, path.parent, ranks)
    stop_distributed()


if __name__ == "__main__":
    main()
