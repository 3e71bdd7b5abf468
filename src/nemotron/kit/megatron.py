"""What goes to Megatron-Bridge and comes back: blends and packed rows, values of a config, folders of checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.errors import Preempted, UserError, did_you_mean
from nemotron.kit import payloads
from nemotron.kit.artifact import Checkpoint, PretrainBlend, SFTPack, Source
from nemotron.kit.schemas.megatron import DatasetConfig, ParallelConfig, TrainConfig, check_replicas, warnings_of

METADATA_FILE = ".metadata"  # of a folder of torch_dist files, written last
TRACKER_FILE = "latest_checkpointed_iteration.txt"  # in a folder of checkpoints, written behind a whole one
FP32 = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")  # defaults of OptimizerConfig


class MegatronCheckpoint(Checkpoint):
    """One iteration as Megatron saves it: a folder of torch_dist files, with the optimiser."""

    phase: str | None = Field(default=None, description="phase of the blend in dataset_path, of pretraining")

    def _check(self) -> None:
        payloads.check_not_empty("MegatronCheckpoint.path", self.path)
        if not is_checkpoint(self.path):
            raise UserError(
                f"{self.path}: no whole Megatron checkpoint", f"it holds *.distcp files and {METADATA_FILE}"
            )


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a whole checkpoint of one iteration."""
    return (folder / METADATA_FILE).is_file() and any(folder.glob("*.distcp"))


@dataclass(frozen=True)
class MegatronBlend:
    """A blend as `GPTDatasetConfig.blend_per_split` takes it: prefixes of token streams, and their weights."""

    train: tuple[list[str], list[float]]
    valid: tuple[list[str], list[float]]
    tokenizer: Path


def megatron_blend(data: PretrainBlend, phase: str | None) -> MegatronBlend:
    """The streams of `data` in the weights of one phase of its blend.json.

    The weight of a source is dealt out to its streams by their sizes in bytes, as Megatron draws sequences from each
    stream by weight. Held-out streams have the same weights.

    Raises:
        UserError: no such phase, several of which none is named, no held-out stream, no tokenizer.
    """
    file = data.path / "blend.json"
    blend = json.loads(file.read_text(encoding="utf-8"))
    phases = {entry["name"]: entry["weights"] for entry in blend["phases"]}
    if phase is None and len(phases) > 1:
        raise UserError(f"{file} has the phases {', '.join(phases)}", "say which one: dataset.phase=NAME")
    name = phase if phase is not None else next(iter(phases))
    if name not in phases:
        raise UserError(f"{file} has no phase {name}", did_you_mean(name, phases))
    if data.tokenizer_path is None:
        raise UserError(f"{data.path} has no tokenizer")
    splits = []
    for split in ("train", "valid"):
        prefixes, weights = list[str](), list[float]()
        for source, weight in phases[name].items():
            streams = [data.path / prefix for prefix in blend["sources"][source][split]]
            sizes = [stream.with_name(f"{stream.name}.bin").stat().st_size for stream in streams]
            for stream, size in zip(streams, sizes, strict=True):
                if weight > 0 and size:
                    prefixes.append(str(stream))
                    weights.append(weight * size / sum(sizes))
        if not prefixes:
            raise UserError(f"{file}: phase {name} has no stream of the split {split}")
        splits.append((prefixes, weights))
    return MegatronBlend(splits[0], splits[1], data.tokenizer_path)


@dataclass(frozen=True)
class MegatronPack:
    """Packed rows as `PackedSequenceSpecs` takes them: folders of Parquet files."""

    train: str
    valid: str
    tokenizer: Path


def megatron_pack(data: SFTPack, seq_length: int, multiple: int, batch: int) -> MegatronPack:
    """The rows of `data`, as the library's reader takes them.

    It reads the columns input_ids, loss_mask and seq_start_id, of which the mask is aligned to labels, as here. It
    makes whole numbers of the mask. Under CP it wants conversations of k x `multiple` + 1 tokens, as the last one is no
    input; one row group shows whether they are. It wants rows for a `batch` of each split.

    Raises:
        UserError: rows of another length, too few of them, weights in the mask, no held-out rows, no tokenizer,
            conversations of other lengths.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    train, valid, tokenizer = data.train_path, data.valid_path, data.tokenizer_path
    if train is None or valid is None or tokenizer is None:
        what = "training rows" if train is None else "held-out rows" if valid is None else "tokenizer"
        raise UserError(f"{data.path} has no {what}")
    if data.seq_len != seq_length:
        raise UserError(f"the rows of {data.path} have up to {data.seq_len} tokens, dataset.seq_length is {seq_length}")
    for split, folder in (("training", train), ("held-out", valid)):
        files = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
        rows = sum(pq.read_metadata(file).num_rows for file in files)
        if rows < batch:
            hint = "more conversations, or a larger share of them in splits.valid, or a smaller train.global_batch_size"
            raise UserError(f"{data.path} has {rows} {split} rows, and a global batch takes {batch}", hint)
    first = pq.ParquetFile(train if train.is_file() else min(train.glob("*.parquet")))
    if pa.types.is_floating(first.schema_arrow.field("loss_mask").type.value_type):
        raise UserError(
            f"{data.path} has weights in its loss_mask, of which Megatron-Bridge makes whole numbers",
            "pack it without loss_weights",
        )
    group = first.read_row_group(0, columns=["input_ids", "seq_start_id"])
    for ids, starts in zip(group.column("input_ids"), group.column("seq_start_id").to_pylist(), strict=True):
        if any((np.diff([*starts, len(ids)]) - 1) % multiple):
            raise UserError(
                f"conversations of {data.path} are not padded to multiples of lcm(2 CP, CP TP) = {multiple} tokens",
                f"nemotron data pack … packing.pad_seq_to_mult={multiple}",
            )
    return MegatronPack(str(train), str(valid), tokenizer)


def first_iteration(load: str | None, dataset: DatasetConfig, registry: Registry) -> int | None:
    """The iteration that a phase begins with: that of the checkpoint `load`, if it comes of another blend or phase.

    None: the data of `load` go on, or nobody knows of which it comes, as of a folder that is no artifact.
    """
    if load is None or not Path(load).is_relative_to(registry.local_root):
        return None
    fields = registry.version_at(Path(load)).record["fields"]
    same = (fields.get("dataset_path"), fields.get("phase")) == (str(dataset.path), dataset.phase)
    return None if same else int(fields["num_steps"])


def hand_on(values: Mapping[str, Any], target: object, group: str) -> None:
    """Set fields of an object of the library. Raises UserError for one that its version does not have."""
    for key, value in values.items():
        if not hasattr(target, key):
            raise UserError(f"{group}.{key}: {type(target).__name__} of this Megatron-Bridge has no such field")
        setattr(target, key, value)


def keep_in_fp32(optimizer: Any) -> None:
    """Gradients of the step, master weights and moments as the library's class has them; a recipe may have 16 bits."""
    optimizer.use_precision_aware_optimizer = False
    for key in FP32:
        setattr(optimizer, key, getattr(type(optimizer), key))


@contextmanager
def preemptible(saves: Path) -> Iterator[None]:
    """Around the library's loop: where it leaves early, with a checkpoint, the job is requeued.

    The library listens to SIGTERM alone; Slurm warns by SIGUSR1. Having saved, on a signal or because time is up, it
    leaves by exit code 0, as if all were done.

    Raises:
        Preempted: it left so.
    """
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    except SystemExit as leave:
        if leave.code or not (iteration := last_iteration(saves)):
            raise
        raise Preempted(saves / f"iter_{iteration:07d}") from None


def last_iteration(folder: Path) -> int:
    """The iteration of the newest whole checkpoint `iter_NNNNNNN` in a folder; 0 where there is none.

    The library's own note of it, `latest_train_state.pt`, is a pickle, which is not read here.
    """
    whole = [file.parent.name.removeprefix("iter_") for file in folder.glob(f"iter_*/{METADATA_FILE}")]
    return max((int(number) for number in whole if number.isdecimal()), default=0)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, None where there is none. An imported one is that of iteration 0."""
    whole = [file.parent for file in folder.glob(f"iter_*/{METADATA_FILE}")]
    return max(whole, key=lambda each: each.name, default=None)


def noted_iteration(folder: Path) -> int | None:
    """The iteration that Megatron notes in a folder of checkpoints as its newest whole one; None before the first."""
    try:
        text = (folder / TRACKER_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        raise UserError(f"{folder / TRACKER_FILE} holds {text!r}, not the number of an iteration")
    return int(text)


def register_checkpoint(folder: Path, name: str, registry: Registry) -> MegatronCheckpoint | None:
    """Publish the newest checkpoint in a folder that a run of Megatron writes to; None if there is nothing new.

    An iteration that a version of `name` has is not published again. The files become hard links: they take no second
    place, and stay when the run deletes its oldest checkpoints.

    Raises:
        UserError: the folder notes no number; what it notes is no whole checkpoint; the file system has no hard links.
    """
    iteration = noted_iteration(folder)
    published = [version.record["fields"].get("num_steps") for version in registry.readable(name)]
    if iteration is None or iteration in published:
        return None
    checkpoint = folder / f"iter_{iteration:07d}"
    if not is_checkpoint(checkpoint):
        raise UserError(
            f"{folder / TRACKER_FILE} notes iteration {iteration}, and {checkpoint} is no whole Megatron checkpoint",
            f"one holds *.distcp files and {METADATA_FILE}",
        )
    with tempfile.TemporaryDirectory(prefix=".register-", dir=folder) as area:
        links = Path(area, checkpoint.name)
        try:
            shutil.copytree(checkpoint, links, copy_function=os.link)
        except (OSError, shutil.Error) as error:
            raise UserError(f"{checkpoint} cannot be read, or not be linked to: {error}") from None
        source = Source(name=str(folder.absolute()), detail="a folder of checkpoints of Megatron")
        return MegatronCheckpoint(path=links, num_steps=iteration, sources=[source]).save(
            name, registry=registry, move=True
        )


def check_world_size(model: ParallelConfig, train: TrainConfig, world_size: int) -> None:
    """UserError where so many GPUs cannot be laid out so, or a batch cannot be dealt out to them."""
    try:
        check_replicas(model, world_size, train.global_batch_size, train.micro_batch_size, "train.")
    except ValueError as error:
        raise UserError(str(error), "another number of nodes, or another layout") from None


def warn_of_context_parallelism(model: ParallelConfig) -> None:
    """Say on stderr what is known of CP with Mamba, where there is any; a submission has said it, too."""
    for warning in warnings_of(model):
        print(f"warning: {warning}", file=sys.stderr)
