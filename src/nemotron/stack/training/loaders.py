"""Batches for training, as pure functions of (seed, position): whoever knows the cursor can go on exactly.

`BlendLoader` mixes token sources by weight in phases (pretraining); `PackedLoader` reads packed conversations (SFT).
Nothing is prefetched or shuffled through a buffer, so a cursor of a few integers is the whole state.

Shapes: B sequences of this rank, L = seq_len.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from nemo_runspec.errors import UserError, first_line
from nemotron.kit.schemas.training import LossReduction
from nemotron.stack.training.blend import Blend, MixtureRow, read_blend
from nemotron.stack.training.distributed import ALONE, Ranks
from nemotron.stack.training.indexed_tokens import IndexedTokens, JoinedTokens


@dataclass(frozen=True)
class Batch:
    """Inputs and next-token labels, int64 [B, L]; what to train on, [B, L]; and which sub-sequence a token is of.

    `loss_mask_BL` is 0 or 1, int64, or float32 weights with which the labels count in the loss.
    `seq_idx_BL` is None where every row counts as one document (pretraining streams, as in Megatron by default).
    """

    input_ids_BL: torch.Tensor
    labels_BL: torch.Tensor
    loss_mask_BL: torch.Tensor
    seq_idx_BL: torch.Tensor | None = None

    @property
    def num_trained(self) -> int:
        """Labels that are trained on, whatever their weights."""
        return int(self.loss_mask_BL.count_nonzero())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return self._map(methodcaller("to", device))

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Slices of `size` rows; the last may be smaller."""
        for i in range(0, len(self.input_ids_BL), size):
            yield self._map(itemgetter(slice(i, i + size)))

    def halves(self) -> list[Batch]:
        """The first half of the rows and the second, one more in the first where they are odd; one row is one batch."""
        return list(self.micro_batches(-(-len(self.input_ids_BL) // 2)))

    def trimmed(self, multiple: int = 32) -> Batch:
        """The same batch without its last columns, where no row has a label to learn; a `multiple` of them stays.

        What stands behind the last label changes nothing before it. IndexError: there is no label.
        """
        length = int(self.loss_mask_BL.ne(0).any(0).nonzero()[-1]) + 1
        width = min(-(-length // multiple) * multiple, self.input_ids_BL.shape[1])
        return self._map(itemgetter((slice(None), slice(width))))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch of its changed tensors."""
        seq_idx = None if self.seq_idx_BL is None else change(self.seq_idx_BL)
        return Batch(change(self.input_ids_BL), change(self.labels_BL), change(self.loss_mask_BL), seq_idx)


class TokenStream:
    """An endless, shuffled sequence of windows of `seq_len`+1 tokens from one source.

    Epoch by epoch: documents permuted, joined, cut into windows that share their border token, windows permuted. Each
    epoch has its own permutation, so the few tokens lost at its end differ. `window(k)` depends on nothing but
    (seed, k). Raises UserError if the source has not one whole window.
    """

    def __init__(self, tokens: IndexedTokens | JoinedTokens, seq_len: int, seed: tuple[int, ...], name: str) -> None:
        self.windows_per_epoch = (tokens.num_tokens - 1) // seq_len
        if self.windows_per_epoch < 1:
            raise UserError(
                f"source {name!r} has {tokens.num_tokens} tokens, less than one sequence of {seq_len + 1}",
                "give it more text, or make seq_length smaller",
            )
        self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
        self._epoch = -1
        self._documents: NDArray[np.int64] = np.empty(0, np.int64)
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)
        self._windows: NDArray[np.int64] = np.empty(0, np.int64)

    def window(self, k: int) -> NDArray[np.int64]:
        """int64 [seq_len + 1]: window `k` (0, 1, ...) of the stream."""
        epoch, within = divmod(k, self.windows_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([*self._seed, epoch])
            self._documents = rng.permutation(len(self._tokens))
            lengths = self._tokens.lengths[self._documents].astype(np.int64)
            self._starts = np.concatenate([[0], np.cumsum(lengths)])
            self._windows = rng.permutation(self.windows_per_epoch)
            self._epoch = epoch
        return self._read(int(self._windows[within]) * self._seq_len, self._seq_len + 1)

    def first_windows(self, n: int) -> NDArray[np.int64]:
        """The tokens of windows 0..n-1 joined, those of one epoch in stream order: neighbours stay neighbours."""
        pieces = []
        for first in range(0, n, self.windows_per_epoch):
            self.window(first)  # sets up the epoch
            for index in np.sort(self._windows[: n - first]):
                pieces.append(self._read(int(index) * self._seq_len, self._seq_len))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _read(self, start: int, count: int) -> NDArray[np.int64]:
        return _read_joined(self._tokens, self._documents, self._starts, start, count)


class BlendLoader:
    """Training batches of the blend in `directory`/blend.json, for a run of `total_sequences` sequences.

    Which source sequence number n comes from is decided by `Blend.draw`; rank r of world_size reads rows r,
    r+world_size, ... of every global batch, and keeps the same books as all others. `state_dict` is the cursor.

    With `phase` all sequences are drawn from the phase of that name; the sources' streams are those of the whole blend,
    so runs of one phase after another read what a run of all phases reads, where each begins with `go_on_from` the
    windows that the one before had drawn.
    """

    def __init__(
        self,
        directory: Path,
        seq_len: int,
        total_sequences: int,
        seed: int,
        ranks: Ranks = ALONE,
        phase: str | None = None,
    ) -> None:
        blend_file = read_blend(directory)
        self.blend = Blend(blend_file.phases if phase is None else blend_file.only(phase), total_sequences)
        self.seq_len, self._ranks = seq_len, ranks
        used = sorted({source for phase in blend_file.phases for source, weight in phase.weights.items() if weight > 0})
        self._streams = {
            source: TokenStream(_joined(directory, blend_file.sources[source].train), seq_len, (seed, i), source)
            for i, source in enumerate(used)
        }
        self.vocab_size = blend_file.vocab_size
        self._drawn = dict.fromkeys(used, 0)

    def next_batch(self, global_batch_size: int) -> Batch:
        """This rank's rows of the next global batch. Rows are windows; labels are the inputs shifted by one."""
        rows = []
        for i in range(global_batch_size):
            source = self.blend.draw()
            if i % self._ranks.world_size == self._ranks.rank:
                rows.append(self._streams[source].window(self._drawn[source]))
            self._drawn[source] += 1
        tokens = torch.from_numpy(np.stack(rows))
        inputs = tokens[:, :-1].contiguous()
        return Batch(inputs, tokens[:, 1:].contiguous(), torch.ones_like(inputs))

    @property
    def drawn(self) -> dict[str, int]:
        """Windows drawn so far of each source, those of the runs before included."""
        return dict(self._drawn)

    def go_on_from(self, drawn: Mapping[str, int]) -> None:
        """Leave out the windows that a run before drew, `drawn` of it. Raises UserError if it is of other sources."""
        if set(drawn) != set(self._drawn):
            raise UserError(f"cursor of sources {sorted(drawn)}, but the blend has {sorted(self._drawn)}")
        self._drawn = {source: int(n) for source, n in drawn.items()}

    def mixture(self) -> list[MixtureRow]:
        """The realised mixture: a row for each phase and source, with the weight asked for and the one drawn so far."""
        return self.blend.realised(self.seq_len)

    def trained_tokens(self) -> NDArray[np.int64]:
        """All tokens drawn so far, by source: what a baseline has to count that is compared with the trained model."""
        return np.concatenate([stream.first_windows(self._drawn[s]) for s, stream in self._streams.items()])

    def epochs(self) -> dict[str, float]:
        """How often each source has been read through so far."""
        return {source: n / self._streams[source].windows_per_epoch for source, n in self._drawn.items()}

    def state_dict(self) -> dict[str, Any]:
        """The cursor: JSON-able."""
        return {"drawn": dict(self._drawn), "blend": self.blend.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor of `state_dict`. Raises UserError if it is of other sources."""
        self.go_on_from(state["drawn"])
        self.blend.load_state_dict(state["blend"])


def _read_joined(
    tokens: IndexedTokens | JoinedTokens,
    documents: NDArray[np.int64],
    starts: NDArray[np.int64],
    start: int,
    count: int,
) -> NDArray[np.int64]:
    """int64 [count]: tokens from `start` on of `documents` joined in their order; `starts`: where each begins there."""
    out = np.empty(count, np.int64)
    filled = 0
    i = int(np.searchsorted(starts, start, side="right")) - 1
    while filled < count:
        skip = start + filled - int(starts[i])
        piece = tokens.tokens(int(documents[i]), skip, skip + count - filled)
        out[filled : filled + len(piece)] = piece
        filled, i = filled + len(piece), i + 1
    return out


def _joined(directory: Path, prefixes: Sequence[str]) -> JoinedTokens:
    return JoinedTokens([directory / prefix for prefix in prefixes])


def held_out_documents(directory: Path) -> dict[str, list[NDArray[np.integer]]]:
    """Token ids of the held-out documents of each source of a blend, in file order; only sources that have some."""
    documents = {}
    for source, entry in sorted(read_blend(directory).sources.items()):
        if entry.valid:
            tokens = _joined(directory, entry.valid)
            documents[source] = [tokens.tokens(i) for i in range(len(tokens))]
    return documents


def validation_streams(directory: Path, seq_len: int) -> dict[str, JoinedTokens]:
    """The held-out streams of a blend that have at least one window of `seq_len`+1 tokens; no token is read."""
    sources = sorted(read_blend(directory).sources.items())
    streams = {source: _joined(directory, entry.valid) for source, entry in sources if entry.valid}
    return {source: stream for source, stream in streams.items() if stream.num_tokens > seq_len}


def validation_batches(
    directory: Path, seq_len: int, batch_size: int, max_batches: int | None = None
) -> Iterator[tuple[str, Batch]]:
    """(source, batch) over the held-out streams of a blend: windows of `seq_len`+1 tokens, always the same ones.

    At most `max_batches` batches a source, taken evenly over its length; a tail shorter than a window is left out, and
    so is a source that has not one. Only what is yielded is read.
    """
    for source, tokens in validation_streams(directory, seq_len).items():
        documents = np.arange(len(tokens))
        places = np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)])
        count = (tokens.num_tokens - 1) // seq_len
        wanted = count if max_batches is None else min(count, max_batches * batch_size)
        starts = [(j * count // wanted) * seq_len for j in range(wanted)]
        for i in range(0, wanted, batch_size):
            rows = np.stack(
                [_read_joined(tokens, documents, places, s, seq_len + 1) for s in starts[i : i + batch_size]]
            )
            inputs = torch.from_numpy(rows[:, :-1].copy())
            yield source, Batch(inputs, torch.from_numpy(rows[:, 1:].copy()), torch.ones_like(inputs))


class PackedLoader:
    """Batches of packed conversations from Parquet rows `input_ids`, `loss_mask`, `seq_start_id`.

    `loss_mask` is label-aligned on disk (position i says whether token i+1 is trained, never across a sub-sequence): 0
    or 1 in a column of integers, weights in one of floats. `seq_start_id` lists where sub-sequences start. Rows are
    padded with id 0 to `seq_len` (None: the longest row); padding has the index -1, is not trained on and is no load of
    the experts. Rows are reshuffled every epoch from (seed, epoch), and all held in memory, as flat arrays of the types
    that the file has.

    With `reduction` "conversation" the mask of a token is divided by the number of trained tokens of its conversation,
    which the column `conversation_tokens` has for each sub-sequence. Then the masks of a conversation sum to 1 (to its
    weight in the loss, where it has one), in whatever rows it lies, and the sum of a global batch's masks is the number
    of its conversations, where one of which only a part lies in the batch counts as that part.

    UserError, with the file: it is missing, lacks a column, has no row or one longer than `seq_len`, a mask that is
    neither 0 and 1 nor weights, or one that is 0 everywhere.
    """

    def __init__(
        self, path: Path, seq_len: int | None, seed: int, ranks: Ranks = ALONE, reduction: LossReduction = "token"
    ) -> None:
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise UserError(f"{path}: no packed Parquet file there")
        tables, columns = [], ["input_ids", "loss_mask", "seq_start_id"]
        if reduction == "conversation":
            columns.append("conversation_tokens")
            check_conversation_tokens(files)
        for file in files:
            try:
                tables.append(pq.read_table(file, columns=columns))
            except (pa.ArrowException, KeyError) as error:
                raise UserError(f"{file}: not a packed Parquet file ({first_line(error)})") from error
        table = pa.concat_tables(tables, promote_options="permissive")  # files of one folder may differ in their types
        if table.num_rows == 0:
            raise UserError(f"{path}: holds no packed sequence")
        self.path, self.num_rows, self._seed, self._ranks = path, table.num_rows, seed, ranks
        self._ids, self._offsets = _flat_lists(table, "input_ids")
        self._mask, mask_offsets = _flat_lists(table, "loss_mask")
        self._starts, self._start_offsets = _flat_lists(table, "seq_start_id")
        longest = int(np.diff(self._offsets).max())
        self.seq_len = longest if seq_len is None else seq_len
        if longest > self.seq_len:
            raise UserError(f"{path}: a row has {longest} tokens, more than seq_length {seq_len}")
        if not np.array_equal(mask_offsets, self._offsets):
            raise UserError(f"{path}: loss_mask and input_ids differ in length")
        self._mask = _checked_mask(self._mask, path)
        self.trained_tokens = int(np.count_nonzero(self._mask))
        if self.trained_tokens == 0:
            raise UserError(
                f"{path}: no token is trained: loss_mask is 0 for all {len(self._mask):,} tokens",
                "prepare the data again, from conversations with an answer and a weight above 0",
            )
        if reduction == "conversation":
            totals, _ = _flat_lists(table, "conversation_tokens")
            if len(totals) != len(self._starts) or totals.min() < 1:
                raise UserError(f"{path}: conversation_tokens is not a number from 1 on for each sequence")
            begins = self._starts + np.repeat(self._offsets[:-1], np.diff(self._start_offsets))
            lengths = np.diff(begins, append=self._offsets[-1])
            self._mask = (self._mask / np.repeat(totals, lengths)).astype(np.float32)
        self._drawn, self._epoch = 0, -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def next_batch(self, global_batch_size: int) -> Batch:
        """This rank's rows of the next global batch."""
        rows = [self._row_at(self._drawn + i) for i in range(global_batch_size)]
        self._drawn += global_batch_size
        return self._collate(rows[self._ranks.rank :: self._ranks.world_size])

    def all_batches(self, batch_size: int) -> Iterator[Batch]:
        """Every row once, in file order, for validation; leaves the cursor alone."""
        for i in range(0, self.num_rows, batch_size):
            yield self._collate(list(range(i, min(i + batch_size, self.num_rows))))

    def check_first_rows(self, count: int, key: str) -> None:
        """UserError: no token is trained in the first `count` rows, which are all that `key` of the config has read."""
        if not self._mask[: self._offsets[min(count, self.num_rows)]].any():
            first = f"the first {count:,} of {self.num_rows:,} rows"
            raise UserError(
                f"{self.path}: no token is trained in {first}, all that {key} reads",
                f"raise {key}, or prepare the data again",
            )

    @property
    def epochs(self) -> float:
        """How often the data has been read through so far."""
        return self._drawn / self.num_rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor: JSON-able."""
        return {"drawn": self._drawn, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor of `state_dict`. Raises UserError if it is of a pack with another number of rows."""
        if state["num_rows"] != self.num_rows:
            raise UserError(f"cursor of a pack with {state['num_rows']} rows, but this one has {self.num_rows}")
        self._drawn = int(state["drawn"])

    def _row_at(self, k: int) -> int:
        epoch, within = divmod(k, self.num_rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)
            self._epoch = epoch
        return int(self._order[within])

    def _collate(self, rows: list[int]) -> Batch:
        shape = (len(rows), self.seq_len)
        ids, labels, seq_idx = (np.zeros(shape, np.int64) for _ in range(3))
        mask = np.zeros(shape, self._mask.dtype if np.issubdtype(self._mask.dtype, np.floating) else np.int64)
        for out, row in enumerate(rows):
            begin, end = self._offsets[row], self._offsets[row + 1]
            length = int(end - begin)
            ids[out, :length] = self._ids[begin:end]
            labels[out, : length - 1] = self._ids[begin + 1 : end]
            mask[out, :length] = self._mask[begin:end]
            starts = self._starts[self._start_offsets[row] : self._start_offsets[row + 1]]
            seq_idx[out, starts[starts > 0]] = 1
            seq_idx[out] = np.cumsum(seq_idx[out])
            seq_idx[out, length:] = -1
        return Batch(*(torch.from_numpy(array) for array in (ids, labels, mask, seq_idx)))


def check_conversation_tokens(files: Sequence[Path]) -> None:
    """UserError: one of the packed files does not say how many tokens are trained of each conversation."""
    for file in files:
        try:
            names = pq.read_schema(file).names
        except (pa.ArrowException, OSError):
            continue  # reading it says so better
        if "conversation_tokens" not in names:
            raise UserError(
                f"{file}: a mean over conversations needs the column conversation_tokens, which is not there",
                "prepare the data with packing.conversation_tokens=true, or train with train.loss_reduction=token",
            )


def _checked_mask(mask: NDArray[Any], path: Path) -> NDArray[Any]:
    """A mask of 0 and 1 as it is, or weights as float32. UserError: anything else."""
    if np.issubdtype(mask.dtype, np.floating):
        wrong = mask[~(np.isfinite(mask) & (mask >= 0))]
        allowed = "weights are finite and at least 0"
        mask = mask.astype(np.float32)
    else:
        wrong = mask[(mask != 0) & (mask != 1)]
        allowed = "integers are 0 or 1; weights are a column of floats"
    if len(wrong):
        raise UserError(f"{path}: loss_mask {wrong[0]:g} in {len(wrong):,} of {len(mask):,} tokens", allowed)
    return mask


def _flat_lists(table: pa.Table, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A list column as (values, offsets): row i is values[offsets[i]:offsets[i + 1]]."""
    chunks = table.column(column).chunks
    values = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks])
    lengths = np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks])
    return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
