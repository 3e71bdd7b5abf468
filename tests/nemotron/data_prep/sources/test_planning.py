"""Plans: every piece once and in order, shards alike, and nothing but inputs and settings decides."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.planning import (
    MIN_CAPPED_TOKENS,
    MIN_SHARD_BYTES,
    SourceInput,
    evenly,
    group_pieces,
    make_plan,
    share_out,
)
from nemotron.data_prep.work.shards import InputFile

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=60)


def piece(number: int, size: int) -> Piece:
    return Piece(SourceFile(f"/data/{number:03d}.jsonl.gz", size, "1", "jsonl", "gzip"), 0, 1, size)


def jsonl(number: int, size: int) -> SourceFile:
    return SourceFile(f"/data/{number:03d}.jsonl", size, "1", "jsonl")


@settings(max_examples=200)
@given(SIZES, st.integers(1, 70))
def test_groups_hold_every_piece_once_in_order_and_are_alike(sizes: list[int], count: int) -> None:
    pieces = [piece(i, size) for i, size in enumerate(sizes)]
    groups = group_pieces(pieces, count)
    assert list(chain.from_iterable(groups)) == pieces
    assert all(groups) and len(groups) <= count
    even = sum(sizes) / count
    assert all(sum(p.size for p in group) <= even + max(sizes) for group in groups)
    if len(set(sizes)) == 1 and len(sizes) % count == 0:
        assert {len(group) for group in groups} == {len(sizes) // count}


@settings(max_examples=200)
@given(st.integers(0, 10_000), SIZES)
def test_a_cap_is_shared_out_whole_and_in_proportion(cap: int, sizes: list[int]) -> None:
    shares = share_out(cap, sizes)
    assert sum(shares) == cap
    if sum(sizes):
        assert all(abs(share - cap * size / sum(sizes)) < 1 for share, size in zip(shares, sizes, strict=True))


@given(st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_evenly_spread_indices_are_different_and_inside(numbers: tuple[int, int]) -> None:
    count, length = numbers
    chosen = evenly(count, length)
    assert len(set(chosen)) == count and chosen == sorted(chosen)
    assert chosen[0] >= 0 and chosen[-1] < length
    assert max(b - a for a, b in zip([-1, *chosen], [*chosen, length], strict=True)) <= length / count + 1


@settings(max_examples=50)
@given(st.lists(st.integers(1, 200_000_000), min_size=1, max_size=8), st.sampled_from([None, 1, 7, 128]))
def test_plain_files_are_cut_without_gap_or_overlap(sizes: list[int], num_shards: int | None) -> None:
    files = [jsonl(i, size) for i, size in enumerate(sizes)]
    limit = 64 * 2**20
    plan = make_plan({}, [SourceInput("web", files)], shard_bytes=limit, num_shards=num_shards)
    pieces = [piece for shard in plan.shards for piece in shard.work.pieces]
    for file in files:
        spans = [(piece.begin, piece.end) for piece in pieces if piece.file.uri == file.uri]
        begins, ends = zip(*spans, strict=True)
        assert begins[0] == 0 and ends[-1] in (file.size, -1)
        assert begins[1:] == ends[:-1]
    shard_sizes = [shard.work.stored_bytes for shard in plan.shards]
    if num_shards is None:
        assert max(shard_sizes) <= 1.5 * limit
        if sum(sizes) > 40 * MIN_SHARD_BYTES:
            assert len(shard_sizes) >= 24  # work for many processes
    else:
        assert len(plan.shards) <= num_shards
        if sum(sizes) / num_shards > 2**20:
            assert len(plan.shards) == num_shards
            assert max(shard_sizes) <= 1.6 * sum(sizes) / num_shards
    assert len({shard.name for shard in plan.shards}) == len(plan.shards)


def test_caps_are_met_by_shards_from_all_over_the_source() -> None:
    files = [jsonl(i, 10_000_000) for i in range(40)]  # 400 MB: 32 shards
    [uncapped, few, documents, tokens] = [
        make_plan({}, [SourceInput("web", files, *caps)], shard_bytes=64 * 2**20).shards
        for caps in ((None, None), (5, None), (1000, None), (None, 3 * MIN_CAPPED_TOKENS))
    ]
    assert len(uncapped) == len(documents) == 32
    assert [shard.work.max_documents for shard in few] == [1] * 5
    assert sum(shard.work.max_documents for shard in documents) == 1000
    assert [shard.work.max_tokens for shard in tokens] == [MIN_CAPPED_TOKENS] * 3
    first = [shard.work.pieces[0].file.uri for shard in tokens]
    assert len(set(first)) == 3 and first[0] < "/data/015" and first[2] > "/data/025"


def test_sources_have_their_own_shards_and_files_of_both_are_one_input() -> None:
    files = [jsonl(0, 3_000_000)]
    plan = make_plan({"seed": 1}, [SourceInput("a", files), SourceInput("a-00000", files)], shard_bytes=2**20)
    assert [shard.work.source for shard in plan.shards] == ["a"] * 3 + ["a-00000"] * 3
    assert plan.inputs == [InputFile("/data/000.jsonl", 3_000_000, "1")]
    assert len({shard.name for shard in plan.shards}) == 6
