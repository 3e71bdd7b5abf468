"""Scale factors, against the table in the docstring of the recipe documentation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.kit import Dataset
from nemotron.kit.scale import apply_scale


@pytest.mark.parametrize(
    ("n", "scale", "expected"),
    [
        (1_000, "tiny", 10),
        (1_000_000, "tiny", 10_000),
        (50_000_000, "tiny", 10_000),
        (99, "tiny", 1),
        (1, "tiny", 1),
        (0, "full", 1),
        (1_000, "small", 100),
        (1_000, "medium", 300),
        (90, "medium", 27),
        (1_000, "full", 1_000),
        (10**15 + 1, "full", 10**15 + 1),
    ],
)
def test_table(n, scale, expected):
    assert apply_scale(n, scale) == expected


@given(st.integers(1, 10**12))
def test_scales_are_ordered_and_never_more_than_there_is(n):
    sizes = [apply_scale(n, scale) for scale in ("tiny", "small", "medium", "full")]
    assert sizes == sorted(sizes) and sizes[0] >= 1 and sizes[-1] == n


def test_a_misspelt_scale_is_refused():
    with pytest.raises(UserError) as refused:
        apply_scale(10, "tinny")
    assert refused.value.hint == "did you mean tiny?"
    with pytest.raises(ValueError, match="at least 0"):
        apply_scale(-1, "full")


@pytest.mark.parametrize(
    ("made_at", "scale", "expected"),
    [
        ("tiny", None, 600),
        ("tiny", "tiny", 600),  # what the data's scale has left is not cut again
        ("tiny", "full", 600),
        ("small", "tiny", 60),
        ("full", "medium", 180),
        (None, "tiny", 6),  # a folder that says nothing of it
        (None, None, 600),
    ],
)
def test_a_step_at_a_smaller_scale_than_its_data_reads_a_share(made_at, scale, expected, tmp_path):
    metrics = {} if made_at is None else {"scale": made_at}
    dataset = Dataset(path=tmp_path, num_examples=600, metrics=metrics)
    assert dataset.at_scale(600, scale) == expected
    assert dataset.at_scale(1, "tiny") == 1
