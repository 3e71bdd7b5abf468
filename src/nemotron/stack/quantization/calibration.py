"""Largest values of activations over calibration samples: what static scales are made from ("max" calibration)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nemo_runspec.errors import RunFailed
from nemotron.stack.models import NemotronH
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.quantization.layers import Amax, operands
from nemotron.stack.training.loaders import Batch


class Observer:
    """In the place of a rounding: lets x pass, and keeps the largest |x|."""

    def __init__(self) -> None:
        self.amax = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if not math.isfinite(largest := float(x.detach().abs().amax())):
            raise RunFailed(f"an activation of the model is {largest}: it cannot be quantised")
        self.amax = max(self.amax, largest)
        return x


@torch.no_grad()
def calibrate(
    model: NemotronH, batches: Iterable[Batch], kv_cache: bool, poll: Callable[[], None] = lambda: None
) -> Amax:
    """Largest |x| of every operand of the model, and of keys and values, over all tokens, padding included.

    The experts of a block have one number for all: engines that multiply them in one kernel take the largest anyway.
    The model is that without quantisation, and is left so, in evaluation mode.

    Args:
        kv_cache: measure keys and values; else `Amax.kv` is empty.
        poll: called before each batch; raises to stop.
    """
    places: list[tuple[str, nn.Module, str]] = [*operands(model)]
    inputs = {name: Observer() for name, _, _ in places}
    kv = {
        name: (module, Observer())
        for name, module, _ in places
        if kv_cache and isinstance(module, Linear) and name.endswith((".k_proj", ".v_proj"))
    }
    model.eval()
    try:
        for name, module, attribute in places:
            setattr(module, attribute, inputs[name])
        for linear, observer in kv.values():
            linear.round_output = observer
        for batch in batches:
            poll()
            model(batch.input_ids_BL, batch.seq_idx_BL)
    finally:
        for _, module, attribute in places:
            setattr(module, attribute, None)
        for linear, _ in kv.values():
            linear.round_output = None
    return Amax({name: each.amax for name, each in inputs.items()}, {name: each.amax for name, (_, each) in kv.items()})
