"""What goes to Megatron-Bridge and comes back: the blend of a data artifact, and folders of checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit import payloads
from nemotron.kit.artifact import Checkpoint, PretrainBlend
from nemotron.kit.schemas.megatron import ParallelConfig, TrainConfig

METADATA_FILE = ".metadata"  # of a folder of torch_dist files, written last


class MegatronCheckpoint(Checkpoint):
    """One iteration as Megatron saves it: a folder of torch_dist files, with the optimiser."""

    def _check(self) -> None:
        payloads.check_not_empty("MegatronCheckpoint.path", self.path)
        if not (self.path / METADATA_FILE).is_file() or not any(self.path.glob("*.distcp")):
            raise UserError(
                f"{self.path}: no whole Megatron checkpoint", f"it holds *.distcp files and {METADATA_FILE}"
            )


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


def last_iteration(folder: Path) -> int:
    """The iteration of the newest whole checkpoint `iter_NNNNNNN` in a folder; 0 where there is none.

    The library's own note of it, `latest_train_state.pt`, is a pickle, which is not read here.
    """
    whole = [file.parent.name.removeprefix("iter_") for file in folder.glob(f"iter_*/{METADATA_FILE}")]
    return max((int(number) for number in whole if number.isdecimal()), default=0)


def check_world_size(model: ParallelConfig, train: TrainConfig, world_size: int) -> None:
    """UserError where so many GPUs cannot be laid out so, or a batch cannot be dealt out to them."""
    replica = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    experts = model.expert_tensor_parallel_size * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    for name, size in (("TP x PP x CP", replica), ("ETP x EP x PP", experts)):
        if world_size % size:
            raise UserError(
                f"{world_size} GPUs are no multiple of {name} = {size}", "another number of nodes, or another layout"
            )
    data_parallel = world_size // replica
    if train.global_batch_size % (data_parallel * train.micro_batch_size):
        raise UserError(
            f"train.global_batch_size {train.global_batch_size} is no multiple of {data_parallel} replicas x "
            f"train.micro_batch_size {train.micro_batch_size}"
        )
