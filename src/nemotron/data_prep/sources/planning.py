"""What each task reads of some sources: shards that follow from the inputs and the settings, and from nothing else.

Neither the engine nor the number of its workers decides anything here, so that the same inputs give the same files on a
laptop and on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.reader import pieces_of
from nemotron.data_prep.work.shards import InputFile, Json, Plan, Shard

MIN_SHARD_BYTES = 2**20
# Of all input together: so many shards at least, that many workers end at about the same time and little is lost when
# they are killed.
MIN_SHARDS = 32
# Pieces that a shard is made of: the finer, the more alike the shards; each is opened on its own.
PIECES_PER_SHARD = 4
# With a cap on tokens a shard should give so many, as each leaves out half a document on average.
MIN_CAPPED_TOKENS = 2**16
_BYTES_PER_TOKEN = 8  # at most, of nearly every text: a shard then has the tokens for its share of a cap


@dataclass(frozen=True, slots=True)
class SourceInput:
    """A source: its files, in order, and how much of it is used at most (None: all)."""

    name: str
    files: Sequence[SourceFile]
    max_documents: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SourceWork:
    """What a task reads: pieces of one source, and its share of the source's caps (None: all)."""

    source: str
    pieces: Sequence[Piece]
    max_documents: int | None
    max_tokens: int | None

    @property
    def stored_bytes(self) -> int:
        """Of its pieces."""
        return sum(piece.size for piece in self.pieces)


def make_plan(
    settings: Mapping[str, Json], sources: Sequence[SourceInput], *, shard_bytes: int, num_shards: int | None = None
) -> Plan[SourceWork]:
    """The shards of all sources, source by source, named `SOURCE-00000`.

    Args:
        settings: all else that decides about the output; goes into the plan as it is.
        shard_bytes: stored bytes of a shard at most (a file that cannot be cut may be longer); smaller where there is
            so little that workers would have nothing to do.
        num_shards: in place of `shard_bytes`: shards of every source, fewer only where it has fewer pieces.
    """
    total = sum(file.size for source in sources for file in source.files)
    target = min(shard_bytes, max(MIN_SHARD_BYTES, -(-total // MIN_SHARDS)))
    shards: list[Shard[SourceWork]] = []
    for source in sources:
        size = sum(file.size for file in source.files)
        wanted = size / num_shards if num_shards else target
        piece_bytes = max(2**16, int(wanted / PIECES_PER_SHARD))
        pieces = [piece for file in source.files for piece in pieces_of(file, piece_bytes)]
        count = num_shards or -(-size // target)
        shards += _shards_of(source, group_pieces(pieces, max(1, count)))
    files = {file.uri: file for source in sources for file in source.files}
    return Plan(settings, inputs_of(file for _, file in sorted(files.items())), shards)


def inputs_of(files: Iterable[SourceFile]) -> list[InputFile]:
    """What a plan says of the files that it reads."""
    return [InputFile(file.uri, file.size, file.version) for file in files]


def group_pieces(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Neighbouring pieces together, in `count` groups of about the same bytes; fewer where there are not so many.

    A piece goes where its middle falls in an even division of all bytes, so that no group has more than its even share
    and one piece.
    """
    total = sum(piece.size for piece in pieces)
    groups: list[list[Piece]] = [[] for _ in range(count)]
    before = 0
    for number, piece in enumerate(pieces):
        if total:
            place = (2 * before + piece.size) * count // (2 * total)
        else:
            place = number * count // len(pieces)
        groups[min(place, count - 1)].append(piece)
        before += piece.size
    return [group for group in groups if group]


def share_out(cap: int, sizes: Sequence[float]) -> list[int]:
    """`cap` in whole numbers in proportion to `sizes`: largest remainders first, the first of equals first."""
    total = sum(map(Fraction, sizes))
    exact = [cap * Fraction(size) / total if total else Fraction(cap, len(sizes)) for size in sizes]
    shares = [int(value) for value in exact]
    order = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: cap - sum(shares)]:
        shares[i] += 1
    return shares


def evenly(count: int, length: int) -> list[int]:
    """`count` different indices below `length`, evenly over it."""
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


def _shards_of(source: SourceInput, groups: list[list[Piece]]) -> Iterable[Shard[SourceWork]]:
    sizes = [sum(piece.size for piece in group) for group in groups]
    if source.max_tokens is not None and groups:
        # From all over the source, and yet from few enough shards.
        fewest = -(-source.max_tokens * _BYTES_PER_TOKEN * len(sizes) // max(1, sum(sizes)))
        count = min(len(groups), max(1, fewest, source.max_tokens // MIN_CAPPED_TOKENS))
        chosen = evenly(count, len(groups))
        groups, sizes = [groups[i] for i in chosen], [sizes[i] for i in chosen]
    documents = shares_of(source.max_documents, sizes)
    tokens = shares_of(source.max_tokens, sizes)
    for number, group in enumerate(groups):
        if documents[number] == 0 or tokens[number] == 0:
            continue
        yield Shard(f"{source.name}-{number:05d}", SourceWork(source.name, group, documents[number], tokens[number]))


def shares_of(cap: int | None, sizes: Sequence[int]) -> Sequence[int | None]:
    """The share of each in a cap, by `share_out`; None for all where there is no cap."""
    return [None] * len(sizes) if cap is None else share_out(cap, sizes)
