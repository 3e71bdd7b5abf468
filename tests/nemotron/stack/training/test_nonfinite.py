"""A gradient that is not finite ends a run of the pretraining script before it reaches a weight."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_runspec.errors import RunFailed
from nemotron.recipes.nano3.stage0_pretrain import train as script
from nemotron.stack.training.distributed import ALONE


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_reaches_no_weight(tmp_path, monkeypatch, value):
    """The loss of that step is finite, and one number of one gradient is not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = importlib.import_module("train_worker")
    monkeypatch.setattr(worker.module, "measure_peak_flops", lambda *_: 1.0)
    monkeypatch.setattr(torch, "set_default_dtype", lambda _: None)
    models, steps = [], []
    clip = script.clip_gradients

    def damage_and_clip(model: nn.Module, max_norm: float) -> torch.Tensor:
        steps.append(len(steps) + 1)
        if len(steps) == 8:
            models.append((model, {name: weight.clone() for name, weight in model.state_dict().items()}))
            model.lm_head.weight.grad[0, 0] = value
        return clip(model, max_norm)

    monkeypatch.setattr(script, "clip_gradients", damage_and_clip)
    worker.write_data(tmp_path / "data")
    with pytest.raises(RunFailed, match=f"gradient norm {value} at step 8"):
        worker.train({"name": "run", "dtype": "float32"}, tmp_path / "data", tmp_path, ALONE)
    ((model, before),) = models
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
