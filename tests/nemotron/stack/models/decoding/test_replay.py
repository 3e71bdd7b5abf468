"""When steps are recorded, and what a recording leaves as it was; a stand-in replays on the CPU. `test_gpu.py` has the
bits of real graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import cache as cache_module
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.replay import STEPS_BEFORE, ReplayedStep
from nemotron.stack.models.decoding.steps import prefill, prepare


class Steps:
    """Steps of a model on a cache, as launched and replayed; `recorded` has the rows of each recording."""

    def __init__(self, model: NemotronH, rows: int, capacity: int) -> None:
        ids_BL = torch.arange(rows * 5).view(rows, 5) % 60 + 1
        _, self.cache = prefill(model, ids_BL, torch.ones_like(ids_BL).bool(), capacity)
        self.recorded: list[int] = []
        self.kept: list[Tensor] = []
        self.fails_with: BaseException | None = None
        self.launched = prepare(model, self.cache)
        self.replayed = ReplayedStep(self.step, self.cache)

    def step(self, input_ids_B: Tensor) -> Tensor:
        if self.kept and self.fails_with:
            raise self.fails_with
        return self.launched(input_ids_B)

    def begin(self, **_: object) -> None:
        self.kept = [tensor.clone() for tensor in self.cache.tensors()]

    def end(self) -> None:
        """A recording takes no step: what the cache holds is as it was."""
        for tensor, before in zip(self.cache.tensors(), self.kept, strict=True):
            tensor.copy_(before)
        self.recorded.append(len(self.replayed.input_ids_B))
        self.kept = []

    def replay(self) -> None:
        self.replayed.logits_BV.copy_(self.launched(self.replayed.input_ids_B))
        self.cache.length -= 1  # `step` counts, a graph does not


@pytest.fixture
def steps(make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    def start(pattern: str = "M*E", rows: int = 4, capacity: int = 40) -> Steps:
        of_model = Steps(make_model(pattern), rows, capacity)
        graph = MagicMock(capture_begin=of_model.begin, capture_end=of_model.end, replay=of_model.replay)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        return of_model

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with torch.inference_mode():
        yield start


def logits_of(step: Callable[[Tensor], Tensor], cache: Cache, count: int, rows: int = 4) -> Tensor:
    """Of `count` steps, whose tokens follow from their number."""
    return torch.stack([step(torch.full((rows,), 1 + cache.length % 60)) for _ in range(count)])


def test_replayed_and_launched_steps_give_the_same(
    steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While keys outgrow the window, from 8 slots to 16, 32 and all 40, and rows end."""
    monkeypatch.setattr(cache_module, "MIN_WINDOW", 8)
    launched, replayed = [], []
    expected = steps()
    for of_model, step, logits in (
        (expected, expected.launched, launched),
        (found := steps(), found.replayed, replayed),
    ):
        logits.append(logits_of(step, of_model.cache, 30)[:, :2])
        of_model.cache.keep_rows(torch.arange(2))
        logits.append(logits_of(step, of_model.cache, 5, rows=2))
    torch.testing.assert_close(torch.cat(replayed), torch.cat(launched), atol=1e-5, rtol=1e-5)
    assert found.recorded == [4, 4, 4, 4, 2]
    with pytest.raises(IndexError, match="room for 40 tokens"):
        logits_of(found.replayed, found.cache, 1, rows=2)


def test_a_model_without_states_knows_its_rows(steps: Callable[..., Steps]) -> None:
    found = steps("E-")
    logits_of(found.replayed, found.cache, STEPS_BEFORE + 2)
    assert logits_of(found.replayed, found.cache, 1, rows=1).shape[:2] == (1, 1)
    assert found.recorded == [4]


def test_without_memory_for_a_graph_steps_are_launched(steps: Callable[..., Steps]) -> None:
    expected = steps()
    launched, found = logits_of(expected.launched, expected.cache, 8), steps()
    found.fails_with = torch.OutOfMemoryError("full")
    torch.testing.assert_close(logits_of(found.replayed, found.cache, 8), launched, atol=1e-5, rtol=1e-5)
    assert found.recorded == [4]  # and not again


def test_an_interrupted_recording_ends_and_leaves_the_cache(steps: Callable[..., Steps]) -> None:
    found = steps()
    logits_of(found.replayed, found.cache, STEPS_BEFORE)
    length, found.fails_with = found.cache.length, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        logits_of(found.replayed, found.cache, 1)
    assert (found.recorded, found.cache.length, found.replayed.graph) == ([4], length, None)
