"""A validation that takes long says how far it is."""

import importlib
from pathlib import Path

import torch

from nemotron.kit import metrics
from nemotron.stack.training.distributed import ALONE


def test_a_long_validation_counts_its_rows_to_the_last(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = importlib.import_module("train_worker")
    monkeypatch.setattr(worker.module, "measure_peak_flops", lambda *_: 1.0)
    monkeypatch.setattr(torch, "set_default_dtype", lambda _: None)
    worker.write_data(tmp_path / "data")
    monkeypatch.setattr(metrics, "_PLAIN_SECONDS", 0.0)  # everything takes long
    run = {"name": "run", "dtype": "float32", "config": {"train.train_iters": 10}}
    worker.train(run, tmp_path / "data", tmp_path, ALONE)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("validate")]
    # Two sources of three batches of eight rows, two rows at a time.
    assert [line.split()[1] for line in lines] == [f"{rows}/48" for rows in range(2, 49, 2)]
    assert all("tok/s" in line and "ETA" in line for line in lines[:-1])
