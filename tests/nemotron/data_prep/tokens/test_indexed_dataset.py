"""Megatron's .bin/.idx: round trip, the bytes of the format, damaged files, and Megatron-Core as the reference."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype

DOCUMENTS = [[5, 6, 2], [7, 2], [8, 9, 10, 11, 2]]


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 2048) -> Path:
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_documents(np.array(document, np.int64), [len(document)])
    return prefix


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 65499), max_size=8), max_size=6), st.sampled_from([2048, 131072]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int) -> None:
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("idx") / "x", documents, vocab_size))
    assert [document.tolist() for document in dataset] == documents
    assert dataset.tokens.tolist() == [token for document in documents for token in document]
    assert dataset.dtype == (np.uint16 if vocab_size == 2048 else np.int32)


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", DOCUMENTS)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<10H", 5, 6, 2, 7, 2, 8, 9, 10, 11, 2)
    index = prefix.with_name("x.idx").read_bytes()
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    assert index == header + struct.pack("<3i", 3, 2, 5) + struct.pack("<3q", 0, 6, 10) + struct.pack("<4q", 0, 1, 2, 3)


def test_an_interrupted_writer_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.array([1]), [1])
        raise RuntimeError
    assert not (tmp_path / "x.idx").exists()


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
        pytest.raises(ValueError, match="token id outside uint16"),
    ):
        writer.add_documents(np.array([65536]), [1])


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", DOCUMENTS)
    index, tokens = tmp_path / "x.idx", tmp_path / "x.bin"
    good = index.read_bytes()
    index.write_bytes(b"X" + good[1:])
    with pytest.raises(ValueError, match=r"x\.idx is not a Megatron index"):
        IndexedDataset(prefix)
    index.write_bytes(good[:-1])
    with pytest.raises(ValueError, match=r"x\.idx is truncated"):
        IndexedDataset(prefix)
    index.write_bytes(good)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"x\.bin has 18 bytes, its index says 20"):
        IndexedDataset(prefix)


@pytest.mark.slow  # to import Megatron-Core
@settings(max_examples=20)
@given(st.lists(st.lists(st.lists(st.integers(0, 65499), max_size=6), max_size=5), max_size=5), st.sampled_from([2, 4]))
def test_batches_write_what_megatron_core_writes(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[list[int]]], itemsize: int
) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    folder = tmp_path_factory.mktemp("idx")
    dtype = {2: np.uint16, 4: np.int32}[itemsize]
    builder = megatron.IndexedDatasetBuilder(str(folder / "x.bin"), dtype=dtype)
    with IndexedDatasetWriter(folder / "y", dtype) as writer:
        for batch in batches:
            for document in batch:
                builder.add_document(np.array(document, np.int64), [len(document)])
            tokens = np.array([token for document in batch for token in document], np.int32)
            writer.add_documents(tokens, [len(document) for document in batch])
    builder.finalize(str(folder / "x.idx"))
    for suffix in ("bin", "idx"):
        assert (folder / f"x.{suffix}").read_bytes() == (folder / f"y.{suffix}").read_bytes()


@pytest.mark.slow  # to import Megatron-Core
def test_dtype_is_chosen_as_megatron_core_does() -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for size in (1, 65_499, 65_500, 65_501, 131_072):
        assert token_dtype(size) is megatron.DType.optimal_dtype(size)


def test_batches_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="lengths of 3 tokens for 2"),
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add_documents(np.array([1, 2]), [1, 2])
    with (
        pytest.raises(ValueError, match=r"outside uint16: 1\.\.70000"),
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add_documents(np.array([1, 70_000], np.int32), [2])
    assert not (tmp_path / "x.idx").exists()
