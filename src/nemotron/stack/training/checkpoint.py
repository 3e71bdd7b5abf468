"""Training checkpoints: everything that a killed run needs to end with the weights of an unbroken one.

    checkpoints/step-00000200/model.safetensors       weights and buffers
                              optimizer.safetensors   AdamW moments and step counts, by parameter name
                              best.safetensors        the best weights so far, where a run tracks them
                              rng.safetensors         random states, as byte tensors
                              state.json              step, loop state (cursor, counters), config, sizes
    checkpoints/latest                                name of the newest complete one

A checkpoint is written into a directory aside, fsynced file by file, then renamed: whoever sees `step-N` sees all of
it. `latest` is replaced after that, the same way, and only then old ones are removed. No pickle is written or read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from nemo_runspec.errors import UserError

# Keys that may differ between the run that wrote a checkpoint and the one that goes on: they do not touch the numbers.
# Names and places of the inputs among them, because `open_run` compares the inputs themselves, by digest.
NEUTRAL_KEYS = ("run", "dataset.path", "data.path", "policy.model_name", "resume", "logger", "checkpoint")


@dataclass
class Restored:
    """What `load_checkpoint` gives back beside filling model and optimiser: steps done, loop state, best weights."""

    step: int
    state: dict[str, Any]
    best_model: dict[str, torch.Tensor] = field(default_factory=dict)


def save_checkpoint(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    best_model: Mapping[str, torch.Tensor] | None = None,
    keep_last: int = 2,
) -> Path:
    """Write the checkpoint of `step` finished steps under `root` and return its directory.

    `state` is the loop's own (data cursor, counters) and, like `config`, must be JSON-able. All but the newest
    `keep_last` (at least 1) are deleted afterwards. An error half-way (disk full) leaves the older ones untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    _remove_partial(root)
    final, aside = root / f"step-{step:08d}", root / f".partial-{step:08d}"
    aside.mkdir()
    try:
        _save_tensors(aside / "model.safetensors", model.state_dict())
        _save_tensors(aside / "optimizer.safetensors", _optimizer_tensors(model, optimizer))
        _save_tensors(aside / "rng.safetensors", _rng_tensors())
        if best_model:
            _save_tensors(aside / "best.safetensors", best_model)
        record = {"step": step, "state": dict(state), "config": dict(config)}
        _write_text(aside / "state.json", json.dumps(record, indent=1) + "\n")
        _fsync_directory(aside)
        if final.exists():  # complete, but `latest` did not name it: killed between the two renames
            shutil.rmtree(final)
        aside.rename(final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _fsync_directory(root)
    _write_text(root / ".latest", final.name + "\n")
    (root / ".latest").replace(root / "latest")
    _fsync_directory(root)
    for old in sorted(root.glob("step-*"))[: -max(keep_last, 1)]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """Directory of the newest complete checkpoint under `root`, None before the first.

    Raises UserError if `latest` names one that is not there (somebody deleted it by hand).
    """
    pointer = root / "latest"
    if not pointer.is_file():
        return None
    path = root / pointer.read_text(encoding="utf-8").strip()
    if not (path / "state.json").is_file():
        raise UserError(f"{pointer} names {path.name}, which is not there", f"delete {root} to start this run afresh")
    return path


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]
) -> Restored:
    """Fill `model`, `optimizer` and the random states from the checkpoint directory `path`.

    Refuses (UserError, naming the keys and both values) if `config` differs from the one it was written with, apart
    from NEUTRAL_KEYS; and if a file is missing or damaged. Tensors land on the device of the parameter they belong to.
    """
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'state.json'}: cannot be read as a checkpoint: {error}") from error
    changes = config_changes(record["config"], config)
    if changes:
        raise UserError(
            f"checkpoint {path} was written with another config: " + "; ".join(changes),
            "put the old values back, or start without resume=",
        )
    model.load_state_dict(_load_tensors(path / "model.safetensors"))
    _restore_optimizer(model, optimizer, _load_tensors(path / "optimizer.safetensors"))
    _restore_rng(_load_tensors(path / "rng.safetensors"))
    best = path / "best.safetensors"
    return Restored(record["step"], record["state"], _load_tensors(best) if best.exists() else {})


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key old -> new` for every leaf that differs between two nested configs, NEUTRAL_KEYS left out, sorted by key."""
    before, after = _leaves(old), _leaves(new)
    return [
        f"{key} {_show(before, key)} -> {_show(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if _show(before, key) != _show(after, key)
        and not any(key == neutral or key.startswith(neutral + ".") for neutral in NEUTRAL_KEYS)
    ]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _show(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "(absent)"


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}:{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        name, _, field_name = key.rpartition(":")
        by_name.setdefault(name, {})[field_name] = value
    current = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: by_name[names[id(p)]] for i, p in enumerate(parameters) if names[id(p)] in by_name}
    # load_state_dict moves every tensor to where its parameter is; hyper-parameters stay those of the config.
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _rng_tensors() -> dict[str, torch.Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors.update({f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return tensors


def _restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda{i}"], i)


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged: {error}") from error


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_partial(root: Path) -> None:
    for leftover in root.glob(".partial-*"):
        shutil.rmtree(leftover)
