"""Mixing weights: the realised mixture never misses the requested one by a whole sequence."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.stack.training.blend import Blend, Phase, is_short_step, read_blend


@settings(max_examples=150)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_realised_equals_requested_to_within_one_sequence_at_every_moment(weights: list[int]) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    blend = Blend((Phase("only", 1.0, dict(zip(names, map(float, weights), strict=True))),), 300)
    counts: Counter[str] = Counter()
    for n in range(1, 301):
        counts[blend.draw()] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(counts[name] - n * weight / sum(weights)) < 1.0 + 1e-6


@pytest.mark.parametrize(("share", "percent"), [(0.5, 50), (0.08, 8), (0.92, 92), (0.01, 1), (1 / 3, 100 / 3)])
def test_short_steps_are_spread_evenly(share: float, percent: float) -> None:
    """After n steps n x share of them were short, rounded down, in whole numbers; gaps differ by one step at most."""
    short = [step for step in range(600) if is_short_step(step, share)]
    for n in range(1, 601):
        assert sum(step < n for step in short) == int(n * percent / 100 + 1e-6)
    assert len({b - a for a, b in itertools.pairwise(short)}) <= 2


def test_every_other_step_is_short() -> None:
    assert [is_short_step(step, 0.5) for step in range(6)] == [False, True] * 3


def test_phases_switch_at_94_percent_and_keep_their_own_books() -> None:
    phases = (Phase("diversity", 0.94, {"web": 3.0, "code": 1.0}), Phase("quality", 1.0, {"code": 1.0, "tasks": 1.0}))
    blend = Blend(phases, 1000)
    first = Counter(blend.draw() for _ in range(940))
    assert first == {"web": 705, "code": 235}
    assert blend.phase == "quality"
    assert Counter(blend.draw() for _ in range(60)) == {"code": 30, "tasks": 30}
    rows = {(row.phase, row.source): row for row in blend.realised(seq_len=256)}
    assert rows["diversity", "web"].requested == rows["diversity", "web"].realised == 0.75
    assert rows["quality", "tasks"].tokens == 30 * 256


def test_cursor_goes_on_exactly() -> None:
    phases = (Phase("a", 0.5, {"x": 1.0, "y": 2.0, "z": 4.5}), Phase("b", 1.0, {"y": 1.0, "z": 0.3}))
    whole = Blend(phases, 200)
    order = [whole.draw() for _ in range(200)]
    for cut in (0, 37, 100, 151):
        first, second = Blend(phases, 200), Blend(phases, 200)
        drawn = [first.draw() for _ in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drawn + [second.draw() for _ in range(200 - cut)] == order
    with pytest.raises(UserError, match="another blend"):
        Blend((Phase("a", 1.0, {"x": 1.0}),), 200).load_state_dict(whole.state_dict())


def test_zero_weight_means_never() -> None:
    blend = Blend((Phase("p", 1.0, {"a": 0.0, "b": 2.0}),), 50)
    assert {blend.draw() for _ in range(50)} == {"b"}


SOURCES = {
    "a": {"train": ["a_train"], "valid": ["a_valid"], "tokens": 9, "bytes": 30},
    "v": {"train": [], "tokens": 0},
}


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"until": 0.9, "weights": {"a": 1}}, "up to 1.0"),
        ({"until": 1, "weights": {"b": 1}}, "'b', not one"),
        ({"until": 1, "weights": {"a": -1}}, "-1.0"),
        ({"until": 1, "weights": {"a": 0}}, "no source"),
        ({"until": 1, "weights": {"v": 1}}, "no training"),
        ({"weights": {"a": 0}}, "malformed.*until"),
        ({"until": "soon", "weights": {"a": 1}}, "malformed"),
    ],
)
def test_bad_blend_files_are_named(tmp_path: Path, phase: dict[str, object], message: str) -> None:
    blend = {"phases": [{"name": "p", **phase}], "sources": SOURCES, "vocab_size": 9}
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    with pytest.raises(UserError, match=message) as caught:
        read_blend(tmp_path)
    assert "blend.json" in caught.value.message


@pytest.mark.parametrize("train", ["a_train", None, [1]])
def test_prefixes_are_a_list(tmp_path: Path, train: object) -> None:
    sources = {"a": {"train": train, "tokens": 9}}
    blend = {"phases": [{"name": "p", "until": 1, "weights": {"a": 1}}], "sources": sources, "vocab_size": 9}
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    with pytest.raises(UserError, match="not a list of prefixes"):
        read_blend(tmp_path)


def test_missing_blend_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"blend\.json: no such file"):
        read_blend(tmp_path)
