"""Loaders: what is read is what was written, nothing is lost or repeated, and a cursor goes on exactly."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.pretraining import DatasetConfig, ShortConfig
from nemotron.stack.training.distributed import ALONE, Ranks
from nemotron.stack.training.indexed_tokens import IndexedTokens, JoinedTokens
from nemotron.stack.training.loaders import (
    Batch,
    BlendLoader,
    PackedLoader,
    TokenStream,
    validation_batches,
    validation_streams,
)
from nemotron.stack.training.phases import PhaseLoaders

_spec = importlib.util.spec_from_file_location("token_files", Path(__file__).with_name("token_files.py"))
assert _spec is not None and _spec.loader is not None
token_files = importlib.util.module_from_spec(_spec)
sys.modules["token_files"] = token_files
_spec.loader.exec_module(token_files)


def numbered(first: int, lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are consecutive numbers from `first` on."""
    documents = []
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
def test_indexed_tokens_read_back(tmp_path: Path, dtype: str, code: int) -> None:
    documents = [[5, 6, 7], [], [1], list(range(100))]
    token_files.write_indexed(tmp_path / "x", documents, dtype, code)
    tokens = IndexedTokens(tmp_path / "x")
    assert [tokens.tokens(i).tolist() for i in range(len(tokens))] == documents
    assert tokens.num_tokens == 104
    assert tokens.tokens(3, 90, 500).tolist() == list(range(90, 100))


@pytest.mark.usefixtures("few_open_files")
def test_a_source_of_more_files_than_the_soft_limit_lets_a_process_open(tmp_path: Path) -> None:
    token_files.write_indexed(tmp_path / "x", [[5, 6, 7], [8]])
    tokens = JoinedTokens([tmp_path / "x"] * 60)
    assert [tokens.tokens(i).tolist() for i in (0, 119)] == [[5, 6, 7], [8]]


def test_damaged_token_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token files"):
        JoinedTokens([])
    with pytest.raises(UserError, match=r"x\.idx: no such file"):
        IndexedTokens(tmp_path / "x")
    token_files.write_indexed(tmp_path / "x", [[1, 2, 3]])
    good = (tmp_path / "x.idx").read_bytes()
    for bad, message in ((b"NOTINDEX" + good[8:], "magic"), (good[:-8], "truncated"), (good[:12], "magic")):
        (tmp_path / "x.idx").write_bytes(bad)
        with pytest.raises(UserError, match=message):
            IndexedTokens(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(good)
    (tmp_path / "x.bin").write_bytes(b"\0\0")
    with pytest.raises(UserError, match=r"x\.bin: shorter"):
        IndexedTokens(tmp_path / "x")


def test_an_epoch_covers_every_window_once_and_the_next_is_shuffled_anew(tmp_path: Path) -> None:
    documents = numbered(0, [13, 4, 40, 1, 23])  # 81 tokens: ten windows of 8 (+1), no remainder
    token_files.write_indexed(tmp_path / "x", documents)
    stream = TokenStream(IndexedTokens(tmp_path / "x"), 8, (7, 0), "x")
    assert stream.windows_per_epoch == 10
    joins = {(a[-1], b[0]) for a in documents for b in documents}
    epochs = [[stream.window(k).tolist() for k in range(10 * e, 10 * e + 10)] for e in range(2)]
    for windows in epochs:
        assert all(len(window) == 9 for window in windows)
        trained = Counter(token for window in windows for token in window[1:])
        assert len(trained) == 80 and set(trained.values()) == {1}  # every label exactly once (the first has none)
        for window in windows:
            assert all(b == a + 1 or (a, b) in joins for a, b in itertools.pairwise(window))
    assert epochs[0] != epochs[1]
    assert stream.window(3).tolist() == epochs[0][3]  # going back gives the same


def test_first_windows_join_what_was_drawn_in_stream_order(tmp_path: Path) -> None:
    token_files.write_indexed(tmp_path / "x", numbered(0, [81]))  # one document: stream order is counting order
    stream = TokenStream(IndexedTokens(tmp_path / "x"), 8, (7, 0), "x")
    assert stream.first_windows(10).tolist() == list(range(80))
    drawn = sorted(token for k in range(10, 14) for token in stream.window(k)[:-1].tolist())
    assert stream.first_windows(14).tolist() == list(range(80)) + drawn  # one epoch and four windows of the next
    assert stream.first_windows(0).tolist() == []


def make_blend(tmp_path: Path) -> Path:
    sources = {"low": numbered(0, [50] * 8), "high": numbered(1000, [30] * 9)}
    token_files.write_blend(tmp_path, sources, {"low": 3.0, "high": 1.0})
    return tmp_path


def test_blend_batches_mix_as_asked_and_resume_exactly(tmp_path: Path) -> None:
    make_blend(tmp_path)
    loader = BlendLoader(tmp_path, seq_len=16, total_sequences=80, seed=5)
    batches, cursors = [], []
    for _ in range(10):
        cursors.append(json.dumps(loader.state_dict()))
        batches.append(loader.next_batch(8))
    first = torch.cat([batch.input_ids_BL[:, 0] for batch in batches])
    assert ((first >= 1000).sum().item(), len(first)) == (20, 80)
    for batch in batches:
        assert torch.equal(batch.input_ids_BL[:, 1:], batch.labels_BL[:, :-1])
        assert batch.input_ids_BL.shape == (8, 16) and batch.loss_mask_BL.all()
    assert {row.source: row.realised for row in loader.mixture()} == {"low": 0.75, "high": 0.25}
    trained = Counter(token for batch in batches for token in batch.input_ids_BL.flatten().tolist())
    assert Counter(loader.trained_tokens().tolist()) == trained
    assert loader.epochs()["low"] == pytest.approx(60 / 24)  # (400 - 1) // 16 windows
    for cut in (0, 4, 9):
        resumed = BlendLoader(tmp_path, seq_len=16, total_sequences=80, seed=5)
        resumed.load_state_dict(json.loads(cursors[cut]))
        for batch in batches[cut:]:
            assert torch.equal(resumed.next_batch(8).labels_BL, batch.labels_BL)
    other = BlendLoader(tmp_path, seq_len=16, total_sequences=80, seed=6)
    assert not torch.equal(other.next_batch(8).labels_BL, batches[0].labels_BL)


def test_runs_of_one_phase_after_another_read_what_a_run_of_all_phases_reads(tmp_path: Path) -> None:
    sources = {"low": numbered(0, [50] * 8), "high": numbered(1000, [30] * 9)}
    token_files.write_blend(tmp_path, sources, {})
    blend = json.loads((tmp_path / "blend.json").read_text())
    blend["phases"] = [
        {"name": "early", "until": 0.75, "weights": {"low": 1.0}},  # `high` has no weight in it
        {"name": "late", "until": 1.0, "weights": {"low": 0.25, "high": 0.75}},
    ]
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    whole = BlendLoader(tmp_path, seq_len=16, total_sequences=48, seed=5)
    expected = torch.cat([whole.next_batch(4).labels_BL for _ in range(12)])
    early = BlendLoader(tmp_path, 16, 36, 5, phase="early")
    read = [early.next_batch(4).labels_BL for _ in range(9)]
    late = BlendLoader(tmp_path, 16, 12, 5, phase="late")
    late.go_on_from(early.drawn)
    read += [late.next_batch(4).labels_BL for _ in range(3)]
    assert torch.equal(torch.cat(read), expected)
    assert late.drawn == whole.drawn == {"low": 36 + 3, "high": 9}
    assert {row.phase for row in late.mixture()} == {"late"}
    with pytest.raises(UserError, match="no phase 'middle'"):
        BlendLoader(tmp_path, 16, 12, 5, phase="middle")
    with pytest.raises(UserError, match="cursor of sources"):
        late.go_on_from({"low": 3})


def drawn(directory: Path) -> str:
    """sha256 over the tokens of ten batches."""
    loader, total = BlendLoader(directory, seq_len=16, total_sequences=80, seed=5), hashlib.sha256()
    for _ in range(10):
        total.update(loader.next_batch(8).input_ids_BL.numpy().astype("<i8").tobytes())
    return total.hexdigest()


def test_how_a_stream_is_divided_into_files_does_not_change_what_is_drawn(tmp_path: Path) -> None:
    make_blend(tmp_path)
    # What the loader drew of these files when a source could only be one: runs from before then go on the same.
    before = "81d7cf492074856733408a1fc590f1f07bea9bbdd433714bd0b2cacab421be9f"
    assert drawn(tmp_path) == before
    held_out = [batch.labels_BL for _, batch in validation_batches(tmp_path, 16, 5)]
    blend = json.loads((tmp_path / "blend.json").read_text())
    for name, documents in (("low", numbered(0, [50] * 8)), ("high", numbered(1000, [30] * 9))):
        for split in ("train", "valid"):
            parts = [documents[:3], [], documents[3:4], documents[4:]]
            blend["sources"][name][split] = [f"{name}/{split}-{i}" for i in range(len(parts))]
            for part, prefix in zip(parts, blend["sources"][name][split], strict=True):
                (tmp_path / name).mkdir(exist_ok=True)
                token_files.write_indexed(tmp_path / prefix, part)
            for suffix in (".bin", ".idx"):
                (tmp_path / f"{name}_{split}{suffix}").unlink()
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    assert drawn(tmp_path) == before
    divided = [batch.labels_BL for _, batch in validation_batches(tmp_path, 16, 5)]
    assert all(torch.equal(one, other) for one, other in zip(held_out, divided, strict=True))


def test_ranks_share_out_the_same_global_batch(tmp_path: Path) -> None:
    make_blend(tmp_path)
    alone = BlendLoader(tmp_path, 16, 80, seed=5)
    ranks = [BlendLoader(tmp_path, 16, 80, 5, Ranks(r, 2, torch.device("cpu"))) for r in range(2)]
    for _ in range(3):
        whole, parts = alone.next_batch(8), [rank.next_batch(8) for rank in ranks]
        assert torch.equal(whole.labels_BL[0::2], parts[0].labels_BL)
        assert torch.equal(whole.labels_BL[1::2], parts[1].labels_BL)
    assert ranks[0].state_dict() == alone.state_dict()


def test_source_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    token_files.write_blend(tmp_path, {"small": [[1, 2, 3]]}, {"small": 1.0})
    with pytest.raises(UserError, match="'small' has 3 tokens"):
        BlendLoader(tmp_path, 16, 80, seed=0)


def test_validation_windows_are_fixed_and_spread_over_the_stream(tmp_path: Path) -> None:
    make_blend(tmp_path)
    low = [batch for source, batch in validation_batches(tmp_path, 16, 5) if source == "low"]
    labels = torch.cat([batch.labels_BL for batch in low])
    assert labels.flatten().tolist() == list(range(1, 24 * 16 + 1))
    few = torch.cat([b.input_ids_BL[:, 0] for s, b in validation_batches(tmp_path, 16, 3, max_batches=1) if s == "low"])
    assert few.tolist() == [0, 8 * 16, 16 * 16]
    streams = validation_streams(tmp_path, 16)
    assert list(streams) == list(dict.fromkeys(source for source, _ in validation_batches(tmp_path, 16, 5)))
    longest = max(stream.num_tokens for stream in streams.values())
    assert validation_streams(tmp_path, longest - 1) and not validation_streams(tmp_path, longest)
    assert not list(validation_batches(tmp_path, longest, 5))
    blend = json.loads((tmp_path / "blend.json").read_text())
    blend["sources"]["low"]["valid"] = []  # nothing of it is held out
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    assert list(validation_streams(tmp_path, 16)) == [source for source in streams if source != "low"]


def write_pack(path: Path, rows: list[list[list[int]]]) -> None:
    """Rows of conversations; of each conversation all tokens after the first are trained."""
    table: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for row in rows:
        table["input_ids"].append([token for conversation in row for token in conversation])
        table["loss_mask"].append([int(i < len(c) - 1) for c in row for i in range(len(c))])
        table["seq_start_id"].append([sum(map(len, row[:i])) for i in range(len(row))])
    types = [("input_ids", pa.int32()), ("loss_mask", pa.uint8()), ("seq_start_id", pa.int32())]
    schema = pa.schema({name: pa.list_(kind) for name, kind in types})
    pq.write_table(pa.table(table, schema=schema), path, row_group_size=2)


ROWS = [[[11, 12, 13], [21, 22]], [[31, 32, 33, 34, 35, 36, 37, 38]], [[41, 42]], [[51, 52], [61, 62], [71, 72, 73]]]


def test_packed_rows_carry_labels_masks_and_sequence_indices(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack.parquet", ROWS)
    loader = PackedLoader(tmp_path / "pack.parquet", seq_len=8, seed=0)
    (batch,) = loader.all_batches(4)
    assert batch.seq_idx_BL is not None
    assert batch.input_ids_BL[0].tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert batch.seq_idx_BL[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert batch.seq_idx_BL[1].tolist() == [0] * 8
    assert batch.seq_idx_BL[3].tolist() == [0, 0, 1, 1, 2, 2, 2, -1]
    trained = batch.labels_BL[batch.loss_mask_BL.bool()].tolist()
    assert trained == [12, 13, 22, *range(32, 39), 42, 52, 62, 72, 73]  # never the first token of a conversation
    assert loader.trained_tokens == len(trained)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (2, [1, 1]), (5, [3, 2])])
def test_halves_are_the_batch_and_weights_do_not_count_as_labels(rows: int, sizes: list[int]) -> None:
    ids_BL = torch.arange(rows * 4).view(rows, 4)
    batch = Batch(ids_BL, ids_BL + 1, torch.tensor([[0.0, 0.5, 2.0, 0.0]]).expand(rows, -1), ids_BL // 2)
    halves = batch.halves()
    assert [len(half.input_ids_BL) for half in halves] == sizes
    for name, tensor in vars(batch).items():
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), tensor)
    assert batch.num_trained == sum(half.num_trained for half in halves) == 2 * rows


def test_trimmed_rows_end_behind_the_last_label(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack.parquet", ROWS[:1])  # labels at 0, 1 and 3, padding from 5 on
    (batch,) = PackedLoader(tmp_path / "pack.parquet", seq_len=8, seed=0).all_batches(1)
    for multiple, length in ((1, 4), (3, 6), (32, 8)):
        trimmed = batch.trimmed(multiple)
        for name, tensor in vars(trimmed).items():
            assert tensor.equal(getattr(batch, name)[:, :length]), (multiple, name)


def masked_pack(path: Path, kind: pa.DataType, mask: list[float | None]) -> Path:
    values = {"input_ids": list(range(len(mask))), "loss_mask": mask, "seq_start_id": [0]}
    types = [("input_ids", pa.int32()), ("loss_mask", kind), ("seq_start_id", pa.int32())]
    columns = {name: pa.array([values[name]], pa.list_(of)) for name, of in types}
    pq.write_table(pa.table(columns), path)
    return path


def test_weights_in_place_of_the_mask(tmp_path: Path) -> None:
    loader = PackedLoader(masked_pack(tmp_path / "a.parquet", pa.float32(), [0, 0.5, 2, 0]), seq_len=6, seed=0)
    (batch,) = loader.all_batches(1)
    assert batch.loss_mask_BL.dtype == torch.float32 and batch.loss_mask_BL.tolist() == [[0, 0.5, 2, 0, 0, 0]]
    assert loader.trained_tokens == 2


def test_the_files_of_a_pack_may_differ_in_their_types(tmp_path: Path) -> None:
    """A mask of 0 and 1 beside weights, lists with other names or wider offsets: all are the same rows."""
    masked_pack(tmp_path / "a.parquet", pa.uint8(), [1, 1, 0, 0])
    masked_pack(tmp_path / "b.parquet", pa.float32(), [0.5, 1, 0, 0])
    wide = {name: [[0, 1, 2, 3]] for name in ("input_ids", "loss_mask", "seq_start_id")}
    wide |= {"loss_mask": [[1, 1, 0, 0]], "seq_start_id": [[0]]}
    schema = pa.schema({name: pa.large_list(pa.field("token", pa.int64())) for name in wide})
    pq.write_table(pa.table(wide, schema=schema), tmp_path / "c.parquet")
    (batch,) = PackedLoader(tmp_path, seq_len=4, seed=0).all_batches(3)
    assert batch.loss_mask_BL.tolist() == [[1, 1, 0, 0], [0.5, 1, 0, 0], [1, 1, 0, 0]]
    assert batch.input_ids_BL[0].tolist() == batch.input_ids_BL[2].tolist() and batch.input_ids_BL.dtype == torch.int64


def test_a_pack_takes_as_much_memory_as_its_types_say(tmp_path: Path) -> None:
    """4 bytes for the id of a token and 1 for its mask, and int64 in a batch."""
    path, size = masked_pack(tmp_path / "a.parquet", pa.uint8(), [1] * 999_999 + [0]), 1_000_000
    tracemalloc.start()
    loader = PackedLoader(path, seq_len=size, seed=0)
    held, _ = tracemalloc.get_traced_memory()  # arrays of NumPy; the file is read into memory of Arrow's
    tracemalloc.stop()
    assert 5 * size <= held < 7 * size
    batch = loader.next_batch(1)
    assert {t.dtype for t in (batch.input_ids_BL, batch.labels_BL, batch.loss_mask_BL)} == {torch.int64}


@pytest.mark.parametrize(
    ("kind", "mask", "complaint"),
    [
        (pa.uint8(), [0, 2, 1, 3], "loss_mask 2 in 2 of 4 tokens"),  # a mean by sums of it would be another mean
        (pa.int8(), [0, -1, 1, 0], "loss_mask -1 in 1 of 4 tokens"),
        (pa.float32(), [0, -0.5, 1, 0], "loss_mask -0.5 in 1 of 4 tokens"),
        (pa.float64(), [0, float("inf"), 1, 0], "loss_mask inf"),
        (pa.uint8(), [0, None, 1, 0], "loss_mask nan"),
    ],
)
def test_a_mask_that_is_neither_0_and_1_nor_weights_is_refused(
    kind: pa.DataType, mask: list[float | None], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint):
        PackedLoader(masked_pack(tmp_path / "a.parquet", kind, mask), seq_len=6, seed=0)


def test_packed_epochs_cover_all_rows_and_resume_exactly(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack.parquet", ROWS)
    loader = PackedLoader(tmp_path, seq_len=8, seed=3)
    drawn, cursors = [], []
    for _ in range(8):  # batches of 3 over 4 rows: six epochs
        cursors.append(json.dumps(loader.state_dict()))
        drawn.append(loader.next_batch(3).input_ids_BL)
    first = torch.cat(drawn)[:, 0].tolist()
    orders = [first[i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(order) == [11, 31, 41, 51] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert loader.epochs == 6.0
    resumed = PackedLoader(tmp_path, seq_len=8, seed=3)
    resumed.load_state_dict(json.loads(cursors[5]))
    assert torch.equal(resumed.next_batch(3).input_ids_BL, drawn[5])
    halves = [PackedLoader(tmp_path, 8, 3, Ranks(r, 2, torch.device("cpu"))) for r in range(2)]
    parts = [half.next_batch(3).input_ids_BL for half in halves]
    assert torch.equal(parts[0], drawn[0][0::2]) and torch.equal(parts[1], drawn[0][1::2])


def test_bad_packs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no packed Parquet"):
        PackedLoader(tmp_path, 8, 0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"a\.parquet: not a packed"):
        PackedLoader(tmp_path / "a.parquet", 8, 0)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: not a packed"):
        PackedLoader(tmp_path / "b.parquet", 8, 0)
    write_pack(tmp_path / "c.parquet", ROWS)
    with pytest.raises(UserError, match="8 tokens, more than"):
        PackedLoader(tmp_path / "c.parquet", 7, 0)
    write_pack(tmp_path / "d.parquet", [])
    with pytest.raises(UserError, match="no packed sequence"):
        PackedLoader(tmp_path / "d.parquet", 8, 0)
    for kind in (pa.uint8(), pa.float32()):  # the loss of nothing would be 0
        masked_pack(tmp_path / "e.parquet", kind, [0, 0, 0])
        with pytest.raises(UserError, match=r"e\.parquet: no token is trained: loss_mask is 0 for all 3 tokens"):
            PackedLoader(tmp_path / "e.parquet", 8, 0)


def test_the_first_rows_must_have_a_trained_token(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack.parquet", [[[1]], [[2], [3]], [[4, 5]]])
    loader = PackedLoader(tmp_path / "pack.parquet", 8, 0)
    complaint = r"pack\.parquet: no token is trained in the first 2 of 3 rows, all that eval\.rows reads"
    with pytest.raises(UserError, match=complaint):
        loader.check_first_rows(2, "eval.rows")
    loader.check_first_rows(3, "eval.rows")
    loader.check_first_rows(64, "eval.rows")


def test_steps_of_two_lengths_draw_from_one_phase_each(tmp_path: Path) -> None:
    """A loader of the long ones alone would never come to a phase that ends at the end of all steps."""
    make_blend(tmp_path)
    blend = json.loads((tmp_path / "blend.json").read_text())
    blend["phases"] = [
        {"name": name, "until": until, "weights": {"low": 1.0}} for name, until in (("a", 0.8), ("b", 1))
    ]
    (tmp_path / "blend.json").write_text(json.dumps(blend))

    def loaders(phase: str | None, of_short: str | None) -> PhaseLoaders:
        short = ShortConfig(seq_length=8, share=0.5, phase=of_short)
        return PhaseLoaders(DatasetConfig(path=tmp_path, seq_length=16, phase=phase, short=short), 80, 5, ALONE)

    both = loaders("a", "b")
    for step, rows, length in ((0, 2, 16), (1, 4, 8)):
        assert both.of_step(step).next_batch(rows).input_ids_BL.shape == (rows, length)
    assert len(both.trained_tokens()) == 2 * 32
    for phases, key in (((None, "b"), "dataset.phase"), (("a", None), "dataset.short.phase")):
        with pytest.raises(UserError, match=f"^{key}: steps of two lengths draw from one phase each"):
            loaders(*phases)
