"""The blend: weights and phases, and texts in their proportions."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.step import SUFFIX, StepTable, write_documents
from nemotron.data_prep.tokens.blend import Phase, add_shares, average_weights, resolve_phases, sample_texts


def phase(until: float, **weights: float) -> Phase:
    return {"name": f"to {until}", "until": until, "weights": weights}


def test_average_weights() -> None:
    phases = resolve_phases([phase(0.94, a=1, b=1), phase(1.0, b=1)], ["a", "b"])
    assert average_weights(phases) == pytest.approx({"a": 0.47, "b": 0.53})


def test_shares_of_added_sources() -> None:
    [first, second] = add_shares([phase(0.5, a=6, b=2), phase(1.0, a=1, c=1)], {"c": 0.2})
    assert first["weights"] == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2})
    assert second["weights"] == pytest.approx({"a": 0.5, "c": 0.5})  # a phase that names the source decides itself
    [only] = add_shares([phase(1.0)], {"c": 1.0})
    assert only["weights"] == {"c": 1.0}


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        ([phase(1.0, stdlib_cod=1)], "no source named 'stdlib_cod', did you mean 'stdlib_code'"),
        ([phase(1.0, stdlib_code=0, b=0)], "all weights are 0"),
        ([phase(1.0, b=1)], "source 'stdlib_code' has no weight in any phase"),
    ],
)
def test_bad_phases_are_refused(phases: list[Phase], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        resolve_phases(phases, ["stdlib_code", "b"])


def test_tokenizer_sample_follows_the_shares(tmp_path: Path) -> None:
    files, tables = [], {}
    for source, count in (("a", 4000), ("b", 1000)):
        rows = [
            {
                "id": f"{source}{i}",
                "text": f"{source} {i:08d}",
                "source": source,
                "split": "valid" if i < 100 else "train",
            }
            for i in range(count)
        ]
        files.append(tmp_path / f"{source}-0{SUFFIX}")
        tables[source] = StepTable(kept=write_documents(files[-1], rows))
    sample = list(sample_texts(files, tables, {"a": 0.5, "b": 0.5}, 10_000, 7))  # 500 texts of 10 bytes each
    for source in ("a", "b"):
        assert 400 < sum(text.startswith(source) for text in sample) < 600  # standard deviation 22
    assert not {int(text.split()[1]) for text in sample} & set(range(100))  # nothing held out
    everything = list(sample_texts(files, tables, {"a": 0.9, "b": 0.1}, 10**6, 7))
    assert len(everything) == len(set(everything)) == 4800  # no repetition
    assert list(sample_texts(files, tables, {"a": 0.5, "b": 0.5}, 10_000, 8)) != sample
