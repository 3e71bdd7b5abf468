"""What all shards of a tokenisation made together: the files where they are published, and the sums of the counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron.data_prep.sources.planning import SourceWork
from nemotron.data_prep.sources.reading import ReadReport
from nemotron.data_prep.tokens.blend_file import SourceFiles, empty_source
from nemotron.data_prep.tokens.task import (
    SPLITS,
    TokenizeCounts,
    TokenizeJob,
    stream_name,
    tokenize_shard,
)
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Receipt, publish_file, run_shards


@dataclass
class SourceStreams:
    """One source. `files` goes into blend.json; `lengths` is a histogram for each split, as in `SplitCounts`.

    `capped`: shards that ended at their share of max_documents or max_tokens.
    """

    files: SourceFiles = field(default_factory=empty_source)
    read: ReadReport = field(default_factory=ReadReport)
    lengths: dict[str, dict[str, int]] = field(default_factory=lambda: {split: {} for split in SPLITS})
    shards: int = 0
    capped: int = 0

    def add(self, work: SourceWork, receipt: Receipt[TokenizeCounts]) -> None:
        """Take in a shard; in the plan's order."""
        files: dict[str, Any] = self.files  # type: ignore[assignment]  # keys are put together
        for split in SPLITS:
            name, counts = stream_name(work.source, receipt.shard, split), receipt.counts.splits[split]
            if f"{name}.idx" in receipt.outputs:
                files[split].append(name)
            for key in ("tokens", "bytes", "documents"):
                files[key if split == "train" else f"{split}_{key}"] += getattr(counts, key)
            for upper, count in counts.lengths.items():
                self.lengths[split][upper] = self.lengths[split].get(upper, 0) + count
        self.read.add(receipt.counts.read)
        self.shards += 1
        self.capped += receipt.counts.capped

    def sorted_lengths(self) -> dict[str, dict[str, int]]:
        """The histograms, shortest first."""
        return {
            split: {upper: counts[upper] for upper in sorted(counts, key=int)} for split, counts in self.lengths.items()
        }


def tokenize_sources(
    plan: Plan[SourceWork], folder: Path, job: TokenizeJob, engine: Engine
) -> dict[str, SourceStreams]:
    """Do a frozen plan's shards in `folder`, and return its sources in its order. Shows on stderr how far it is."""
    streams: dict[str, SourceStreams] = {}
    total_bytes = sum(shard.work.stored_bytes for shard in plan.shards)
    with Progress("tokenize", total_bytes, "documents") as progress:
        receipts = run_shards(plan, folder, tokenize_shard, job, engine, TokenizeCounts)
        for shard, (receipt, was_done) in zip(plan.shards, receipts, strict=True):
            streams.setdefault(shard.work.source, SourceStreams()).add(shard.work, receipt)
            splits = receipt.counts.splits.values()
            progress.add(
                rows=sum(counts.documents for counts in splits),
                tokens=sum(counts.tokens for counts in splits),
                bytes=shard.work.stored_bytes,
                was_done=was_done,
            )
    return streams


def link_streams(streams: dict[str, SourceStreams], folder: Path, output_dir: Path) -> None:
    """Give the files a second name in `output_dir`, so that they stay where a run that is stopped now would look."""
    for source in streams.values():
        for split in SPLITS:
            for prefix in source.files[split]:  # type: ignore[literal-required]
                for suffix in (".bin", ".idx"):
                    publish_file(folder / f"{prefix}{suffix}", output_dir / f"{prefix}{suffix}")


def skipped_table(streams: dict[str, SourceStreams]) -> str:
    """What was read and what was not, source by source, for people; with an example of each reason."""
    lines = [f"{'documents of source':<24} {'train':>12} {'valid':>10} {'test':>10} {'MB of text':>11}  not used"]
    for name, source in streams.items():
        train, valid, test = (source.files[key] for key in ("documents", "valid_documents", "test_documents"))
        num_bytes = sum(source.files[key] for key in ("bytes", "valid_bytes", "test_bytes"))
        notes = [", ".join(f"{count} {reason}" for reason, count in sorted(source.read.skipped.items()))]
        if source.capped:
            notes.append(f"{source.capped} of {source.shards} shards end at their share of the cap")
        skipped = "; ".join(filter(None, notes)) or "-"
        counts = f"{train:>12,} {valid:>10,} {test:>10,} {num_bytes / 1e6:>11.1f}"
        lines.append(f"{name:<24} {counts}  {skipped}")
    shown: set[str] = set()
    for source in streams.values():
        for sample in source.read.samples:
            reason = sample["reason"].partition(": ")[0]
            if reason not in shown and sample["where"]:
                shown.add(reason)
                lines.append(f"  e.g. {sample['where']}: {sample['reason']}")
    return "\n".join(lines)
