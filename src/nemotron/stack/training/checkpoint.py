"""Training checkpoints: everything that a killed run needs to end with the weights of an unbroken one.

    checkpoints/step-00000200/model.safetensors       weights and buffers (expert bias), whole tensors; frozen weights
                                                      are not in it: a run has them from where it began
                              optimizer.safetensors   AdamW moments and step counts, by parameter name
                              loop.safetensors        the loop's own tensors, where it has some: the best weights so far
                              rng.safetensors         random states of every rank, as byte tensors
                              state.json              step, loop state (cursor, counters), fingerprint, sha256 of files
    checkpoints/latest                                name of the newest complete one

A checkpoint is written into a directory aside, fsynced file by file, then renamed: whoever sees `step-N` sees all of
it. `latest` is replaced after that, the same way, and only then old ones are removed. No pickle is written or read.
Tensors are whole on disk however they were spread over ranks, so a run may go on with another number of processes,
sharded or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from nemo_runspec.artifacts.aside import fsync_directory
from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.errors import UserError
from nemo_runspec.write import write_in_one_step
from nemotron.stack.training.distributed import from_rank_0, full_tensor, message_device
from nemotron.stack.training.sharding import reshard_parameters, shard_like, trained_state

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass
class Restored:
    """What a checkpoint gives back beside filling model and optimiser: steps done, the loop's state and tensors."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run; a context manager that ends when the last one is on disk.

    Every rank makes one and calls `save` and `load_latest` together with all others; rank 0 writes.

    Args:
        root: the directory that holds them.
        fingerprint: the run's, of its config, script and inputs; a run with another one cannot go on from them.
        keep_last: all but the newest so many (at least 1) are deleted.
        async_save: write in a background thread. `save` then returns as soon as everything is copied to CPU memory,
            which holds one such copy until `give_copies_back`. At most one is being written: the next `save` waits for
            it. An error while writing (disk full) is raised by the next `save`, by `wait`, or at exit.
    """

    def __init__(self, root: Path, fingerprint: str, keep_last: int = 2, async_save: bool = False) -> None:
        self.root, self.fingerprint, self.keep_last, self.async_save = root, fingerprint, keep_last, async_save
        self.last = root  # the checkpoint saved or loaded last, for messages
        self._copies: dict[str, torch.Tensor] = {}
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writes = not dist.is_initialized() or dist.get_rank() == 0

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Path:
        """Save the checkpoint of `step` finished steps; returns its directory, which async_save fills a little later.

        `state` is the loop's own (data cursor, counters), JSON-able. `tensors`: the loop's own, on the CPU; the caller
        must not change them afterwards, since they are written without a copy. A step saved already is not saved again.
        An error half-way leaves the older checkpoints untouched.
        """
        self.wait()
        path = _directory(self.root, step)
        if path == self.last:
            return path
        files = {
            "model.safetensors": self._snapshot("model", trained_state(model)),
            OPTIMIZER_FILE: self._snapshot("optimizer", optimizer_tensors(model, optimizer)),
            "rng.safetensors": rng_tensors(),
        }
        if tensors:
            files["loop.safetensors"] = dict(tensors)
        if torch.cuda.is_available():
            # Copies to pinned memory are asynchronous, too. Not all streams of the GPU: another thread may be recording
            # its decoding steps on one (`decoding/replay.py`), and waiting for that is an error to both.
            torch.cuda.current_stream().synchronize()
        self.last = path
        if not self._writes:
            return path
        # The loop's state changes while the thread writes; its text does not.
        text = json.dumps({"step": step, "state": dict(state), "fingerprint": self.fingerprint})
        if self.async_save:
            # A daemon: a second Ctrl-C does not wait for the disk.
            self._writer = threading.Thread(target=self._write, args=(path, files, text), daemon=True)
            self._writer.start()
        else:
            write_checkpoint(path, files, json.loads(text), self.keep_last)
        return path

    def load_latest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Restored | None:
        """Go on from the newest complete checkpoint, see `load_checkpoint`; None where there is none."""
        # Rank 0 looks: a shared file system may show the others an older state for a while.
        latest = latest_checkpoint(self.root) if self._writes else None
        step = from_rank_0(int(latest.name.removeprefix("step-")) if latest else -1)
        if step < 0:
            return None
        path = _directory(self.root, step)
        restored = load_checkpoint(path, model, optimizer, self.fingerprint)
        self.last = path
        return restored

    def latest_state(self) -> Mapping[str, Any]:
        """The `state` of the newest complete checkpoint, on rank 0; empty where there is none, and on other ranks."""
        latest = latest_checkpoint(self.root) if self._writes else None
        return _read_record(latest)["state"] if latest else {}

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background just now."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Return when nothing is being written any more; raise what went wrong in the background."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def give_copies_back(self) -> None:
        """Hold no copy for the next `save` any more; those that are being written go with the writing."""
        self._copies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            self.wait()

    def _write(self, path: Path, files: dict[str, dict[str, torch.Tensor]], text: str) -> None:
        try:
            write_checkpoint(path, files, json.loads(text), self.keep_last)
        except BaseException as error:
            self._error = error

    def _snapshot(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors in CPU memory. In the background they must not change, so they are copied; the copies are used
        again by the next save, since fresh memory is several times slower to fill."""
        snapshot = {}
        for name, tensor in tensors.items():
            whole = full_tensor(tensor.detach())  # all ranks take part
            if not self._writes:
                continue
            if self.async_save:
                copy = self._copies.get(f"{kind}/{name}")
                if copy is None or copy.shape != whole.shape or copy.dtype != whole.dtype:
                    copy = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                    self._copies[f"{kind}/{name}"] = copy
                snapshot[name] = copy.copy_(whole, non_blocking=True)
            else:
                snapshot[name] = whole.cpu().contiguous()
        return snapshot


def write_checkpoint(
    path: Path, files: Mapping[str, Mapping[str, torch.Tensor]], record: Mapping[str, Any], keep_last: int
) -> None:
    """Write the checkpoint directory `path` in one step, make `latest` name it, and delete all but `keep_last`."""
    root = path.parent
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".partial-*"):
        shutil.rmtree(leftover)
    aside = root / f".partial-{path.name}"
    aside.mkdir()
    try:
        sizes = {}
        for name, tensors in files.items():
            _save_tensors(aside / name, tensors)
            sizes[name] = {"bytes": (aside / name).stat().st_size, "sha256": sha256_file(aside / name)}
        whole = {**record, "files": sizes}
        write_in_one_step(aside / STATE_FILE, json.dumps({**whole, "sha256": _digest(whole)}, indent=1) + "\n")
        fsync_directory(aside)
        if path.exists():  # complete, but `latest` did not name it: killed between the two renames
            shutil.rmtree(path)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_directory(root)
    write_in_one_step(root / "latest", path.name + "\n")
    fsync_directory(root)
    # This one stays whatever the others are: a kill may have left one of a later step that `latest` never named.
    others = [other for other in _complete(root) if other != path]
    for old in others[: max(0, len(others) + 1 - max(keep_last, 1))]:
        shutil.rmtree(old)


def latest_checkpoint(root: Path) -> Path | None:
    """Directory of the newest complete checkpoint under `root`, None before the first.

    Where somebody deleted the one that `latest` names, it is the newest of the others. UserError where none is left.
    """
    pointer = root / "latest"
    if not pointer.is_file():
        return None
    named = root / pointer.read_text(encoding="utf-8", errors="replace").strip()
    complete = _complete(root)
    if named in complete:
        return named
    if not complete:
        raise UserError(f"{pointer} names {named.name}, which is not there", f"rm -r {root} to start this run afresh")
    return complete[-1]


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: str) -> Restored:
    """Fill `model`, `optimizer` and the random states from the checkpoint directory `path`.

    Tensors land where, and sharded as, the parameters are that they belong to. A rank that the saving run did not have
    keeps its random state.

    Raises:
        UserError: it was written by a run of another `fingerprint`; a file is missing, damaged, or does not belong
            there; a tensor is missing, unknown, or of another shape or type than the model's. The hint names the older
            checkpoint to fall back on.
    """
    record = _read_record(path)
    if record["fingerprint"] != fingerprint:
        raise _refusal(path, STATE_FILE, f"is of run {record['fingerprint']}, not of this one, {fingerprint}")
    _verify_files(path, record["files"])
    current = trained_state(model)
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in current.items()}
    with torch.no_grad():
        for name, tensor in _read_tensors(path, "model.safetensors", expected):
            current[name].copy_(shard_like(tensor, current[name]))
    _restore_optimizer(path, model, optimizer)
    _restore_rng(dict(_read_tensors(path, "rng.safetensors")))
    tensors = dict(_read_tensors(path, "loop.safetensors")) if "loop.safetensors" in record["files"] else {}
    return Restored(record["step"], record["state"], tensors)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state by `parameter name:field`, for AdamW `step`, `exp_avg` and `exp_avg_sq`."""
    reshard_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}:{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def save_moments(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, writes: bool) -> None:
    """Leave the optimiser's state in the folder of a model that is to be published; the rank that `writes` does.

    All ranks call it: tensors of a sharded model are gathered. A file of an attempt before is replaced.
    """
    whole = {name: full_tensor(t.detach()) for name, t in optimizer_tensors(model, optimizer).items()}
    if writes:
        aside = folder / f".{OPTIMIZER_FILE}"
        _save_tensors(aside, {name: tensor.cpu().contiguous() for name, tensor in whole.items()})
        aside.rename(folder / OPTIMIZER_FILE)


def load_moments(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on with what `save_moments` left in `folder`: moments and step counts; rates and decay stay the optimiser's.

    UserError where the model was published without, or a tensor is not of this model.
    """
    if not (folder / OPTIMIZER_FILE).is_file():
        raise UserError(
            f"{folder}: no {OPTIMIZER_FILE}, the model was published without its moments",
            "checkpoint.save_optim=true in the run that makes it, or here checkpoint.load_optim=false",
        )
    _restore_optimizer(folder, model, optimizer)


def _restore_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = {names[id(parameter)]: parameter for parameter in parameters}
    file = OPTIMIZER_FILE
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _read_tensors(path, file):
        name, _, kind = key.rpartition(":")
        if name not in by_name:
            raise _refusal(path, file, f"{key} is unknown to this optimiser")
        like = by_name[name]
        if kind == "step":
            _check_tensor(path, file, key, tensor, (torch.Size(()), torch.float32))
            state.setdefault(name, {})[kind] = tensor
        else:
            _check_tensor(path, file, key, tensor, (like.shape, like.dtype))
            state.setdefault(name, {})[kind] = shard_like(tensor, like)
    kinds = {kind for values in state.values() for kind in values}
    for name, values in state.items():
        if missing := sorted(kinds - values.keys()):
            raise _refusal(path, file, f"{name}:{missing[0]} is missing")
    # Hyper-parameters stay those of the config; load_state_dict puts `step` where the optimiser wants it.
    numbered = {i: state[names[id(p)]] for i, p in enumerate(parameters) if names[id(p)] in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def rng_tensors() -> dict[str, torch.Tensor]:
    """The random states of all ranks, `rank0.cpu`, `rank0.cuda` and so on; all ranks take part."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if not dist.is_initialized():
        return {f"rank0.{kind}": state for kind, state in states.items()}
    device, gathered = message_device(), {}
    for kind, state in states.items():
        every = [torch.empty_like(state, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(every, state.to(device))
        gathered.update({f"rank{rank}.{kind}": of_rank.cpu() for rank, of_rank in enumerate(every)})
    return gathered


def _restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if (state := tensors.get(f"rank{rank}.cpu")) is not None:
        torch.set_rng_state(state)
    if (state := tensors.get(f"rank{rank}.cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def _directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _complete(root: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / STATE_FILE).is_file())


def _refusal(path: Path, file: str, problem: str) -> UserError:
    """The error for a checkpoint that cannot be used, with what to do."""
    others = [other for other in _complete(path.parent) if other != path]
    hint = (
        f"rm -r {path}; the same command then goes on from {others[-1].name}"
        if others
        else f"rm -r {path.parent}; the same command then starts afresh"
    )
    return UserError(f"{path / file}: {problem}", hint)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        digest = record.pop("sha256")
    except OSError as error:
        raise _refusal(path, STATE_FILE, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refusal(path, STATE_FILE, "damaged: not the record of a checkpoint") from None
    if digest != _digest(record):
        raise _refusal(path, STATE_FILE, "damaged: its content is not what was written (sha256)")
    return dict(record)


def _verify_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every file with size and sha256 in the record; nothing else may lie there."""
    present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - {STATE_FILE}
    for name in sorted(present - files.keys()):
        raise _refusal(path, name, "is no file of this checkpoint, and nothing of the kind is ever read")
    for name, written in files.items():
        file = path / name
        if name not in present:
            raise _refusal(path, name, "is missing")
        if (size := file.stat().st_size) != written["bytes"]:
            raise _refusal(path, name, f"damaged: {size} bytes, {written['bytes']} expected")
        if sha256_file(file) != written["sha256"]:
            raise _refusal(path, name, "damaged: its content is not what was written (sha256)")


def _read_tensors(
    path: Path, file: str, expected: Mapping[str, tuple[torch.Size, torch.dtype]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, one at a time, after checking that there are those expected, of that shape and type."""
    try:
        with safe_open(path / file, framework="pt") as tensors:
            names = list(tensors.keys())
            if expected is not None:
                for name in sorted(expected.keys() - set(names)):
                    raise _refusal(path, file, f"{name} is missing")
                for name in sorted(set(names) - expected.keys()):
                    raise _refusal(path, file, f"{name} is unknown to this model")
            for name in names:
                tensor = tensors.get_tensor(name)
                if expected is not None:
                    _check_tensor(path, file, name, tensor, expected[name])
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise _refusal(path, file, f"damaged: {error}") from error


def _check_tensor(
    path: Path, file: str, name: str, tensor: torch.Tensor, expected: tuple[torch.Size, torch.dtype]
) -> None:
    if (tensor.shape, tensor.dtype) != expected:
        actual, wanted = (
            f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"
            for shape, dtype in ((tensor.shape, tensor.dtype), expected)
        )
        raise _refusal(path, file, f"{name} is {actual}, {wanted} expected")


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
