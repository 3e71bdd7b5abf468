"""Columns in files: gathered as from one long array, and never sent along to a worker."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.deduplication.columns import Columns, Names
from nemotron.data_prep.work.shards import ShardOutput


@settings(max_examples=50)
@given(st.lists(st.lists(st.text(max_size=5), max_size=5), min_size=1, max_size=4), st.data())
def test_gather_and_text(tmp_path_factory, shards: list[list[str]], data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("columns")
    output = ShardOutput(folder, folder / "parts")
    for number, ids in enumerate(shards):
        names = Names()
        for id in ids:
            names.add({"id": id, "text": f"text of\n{id}"})
        names.save(output, f"s{number}")
    output.commit()
    columns = Columns(folder, {f"s{number}": len(ids) for number, ids in enumerate(shards)})
    together = [id for ids in shards for id in ids]
    assert len(columns) == len(together)
    keys = columns.whole("keys")
    assert len(np.unique(keys)) == len(set(together))
    places = data.draw(st.lists(st.integers(0, len(together) - 1), max_size=10)) if together else []
    positions = np.array(places, dtype=np.int64)
    assert columns.gather("keys", positions).tolist() == keys[positions].tolist()
    for place in places:
        assert columns.text("ids", place) == together[place]
        assert columns.text("heads", place) == " ".join(f"text of\n{together[place]}".split())


def test_what_a_worker_gets_is_small(tmp_path: Path) -> None:
    np.save(tmp_path / "s.keys.npy", np.arange(100_000, dtype=np.uint64))
    columns = Columns(tmp_path, {"s": 100_000})
    assert columns.gather("keys", np.array([99_999])).tolist() == [99_999]
    sent = pickle.dumps(columns)
    assert len(sent) < 1000
    assert pickle.loads(sent).gather("keys", np.array([5, 3])).tolist() == [5, 3]


@pytest.mark.slow
def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """In a process of its own, whose limit is lowered: every shard has a dozen columns, each a file."""
    script = f"""
import resource
from pathlib import Path
from nemotron.kit.schemas.curation import MinHashSettings, SubstringSettings
from nemotron.data_prep.curation.step import write_documents
from nemotron.data_prep.curation.deduplication import columns, exact, minhash, substring
from nemotron.data_prep.work.engines import SerialEngine

files = [Path({str(tmp_path)!r}) / f"s{{number:03d}}.jsonl.zst" for number in range(50)]
shared = " ".join(f"word{{n}}" for n in range(60))
for number, path in enumerate(files):
    own = " ".join(f"own{{number}}-{{n}}" for n in range(60))
    write_documents(path, [{{"id": f"{{number}}:{{n}}", "text": t}} for n, t in enumerate((shared, own, own + " end"))])
columns.LEAST_MAPPED = 129  # all but the empty ones
resource.setrlimit(resource.RLIMIT_NOFILE, (54, 54))
folder, engine = Path({str(tmp_path)!r}), SerialEngine()
near = MinHashSettings(unit="words", shingle_size=5, num_bands=10, rows_per_band=4, min_estimate=0.7)
options = SubstringSettings(range_bytes=2**16)
print(exact.deduplicate(files, "none", folder / "exact", engine).kept.documents)
print(minhash.deduplicate(files, near, folder / "near", engine)[0].kept.documents)
print(substring.deduplicate(files, options, folder / "substring", engine)[0].kept.documents)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # Equal: one of 50. Near: that one, and one of each other two. Passages: the one, and the two that come first.
    assert result.stdout.split() == ["101", "51", "51"]
