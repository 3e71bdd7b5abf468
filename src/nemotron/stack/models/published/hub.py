"""Model directories in the layout of the published checkpoints, written and read one tensor at a time.

    config.json                       the architecture; transformers' AutoConfig reads it
    model.safetensors                 or, above the shard size, model-00001-of-0000N.safetensors
    model.safetensors.index.json      tensor -> file; and the sha256 of every tensor, in its metadata

Names are `backbone.*`, `lm_head.weight` and `mtp.*`. On disk every expert is a tensor of its own
(`experts.7.up_proj.weight`), in memory all experts of a block are one parameter (`experts.up_proj`, [E, F, D]). A file
is filled, or read, straight from or into the place in that parameter, so neither way needs the model twice in memory.

What is read is checked: names, shapes and dtypes against the config before anything is allocated, and every tensor
against its sha256 where the index has them. A directory from elsewhere has none, and safetensors itself has no
checksum: a flipped bit inside its weights goes unnoticed. Pickles are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nemo_runspec.artifacts.aside import fsync_directory
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.write import write_in_one_step
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.config_json import CONFIG_FILE, FIXED, MODEL_TYPE

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_SIZE = 5_000_000_000
# Weights as pickles, which run code when they are loaded. Others, as training_args.bin, are no weights and stay closed.
PICKLES = (
    "pytorch_model*.bin",
    "model*.bin",
    "model*.pt",
    "model*.pth",
    "model*.pkl",
    "model*.ckpt",
    "consolidated*.pt*",
)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What codes and scales of quantised weights are stored in (`stack/quantization/export.py`).
PACKED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
# And how a layer's scales are called: of its weight, of its input, of the keys and values that it makes.
SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
_ALL_DTYPES = DTYPES | PACKED_DTYPES
_DTYPE_NAMES = {dtype: name for name, dtype in _ALL_DTYPES.items()}
_ASIDE = ".partial"
_MAX_HEADER = 100_000_000  # of the safetensors format
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
# transformers' NemotronH limits dt from below by `time_step_min`, in prefill and training but not in decoding; nothing
# else does. The smallest normal fp32 number switches that off, and unlike 0 has the logarithm that its initialisation
# takes. (Who initialises a NEW model from such a config in transformers should put the published 1e-3 back first: step
# sizes are drawn log-uniformly from there on.)
_NO_LOWER_LIMIT = 2.0**-126
_STACKED = re.compile(r"(.*\.experts)\.(up_proj|down_proj)")


# ---- layout ----------------------------------------------------------------------------------------------------------


def hub_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names of a checkpoint: `experts.up_proj` [E, F, D] becomes E views [F, D]; no copies."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := _STACKED.fullmatch(name):
            out |= {f"{match[1]}.{index}.{match[2]}.weight": expert for index, expert in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def dtype_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a model of this dtype. The correction bias of the experts is always fp32 or wider.

    It moves by 1e-3 a step, which bf16 would lose; transformers keeps it in fp32 too.
    """
    return torch.promote_types(dtype, torch.float32) if name.endswith("e_score_correction_bias") else dtype


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """`float32`, `bfloat16` or `float16`; `auto` is None: as stored; a dtype is itself. UserError for another word."""
    if not isinstance(name, str):
        return name
    choices = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in choices:
        raise UserError(f"unknown dtype '{name}'", did_you_mean(name, choices))
    return choices[name]


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `800MB`, `50KB` (powers of ten) or a plain number. UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    if size < 1:
        raise UserError(f"bad size '{text}'", "a number and B, KB, MB, GB or TB, as in 5GB")
    return size


def hub_config(config: NemotronHConfig, dtype: torch.dtype, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of `config.json`: the architecture as transformers and inference engines expect it.

    `others` are keys that are no part of the architecture, such as max_position_embeddings and token ids. Without the
    latter transformers takes pad 0, bos 1 and eos 2, which are those of Nemotron 3 and of the recipes' tokenizer.
    """
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": MODEL_TYPE,
        "mamba_ssm_cache_dtype": "float32",  # as published; without it an engine may take 16 bits
        **(others or {}),
        "num_hidden_layers": len(config.hybrid_override_pattern),
        **config.to_dict(),
        **FIXED,
        "time_step_min": _NO_LOWER_LIMIT,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# ---- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A tensor to be written, from memory or from another file, and the dtype to write it in."""

    source: Tensor | Stored
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.source.shape) * self.dtype.itemsize

    def fetch(self) -> Tensor:
        """The tensor in this dtype, contiguous and on the CPU."""
        tensor = self.source.read() if isinstance(self.source, Stored) else self.source.detach()
        return tensor.to("cpu", self.dtype).contiguous()


def save_model(
    folder: Path,
    config: NemotronHConfig,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Write a model directory from a state dict. An earlier model in `folder` is replaced, other files are left alone.

    Args:
        state: as `NemotronH.state_dict()` returns it; may lie on any device.
        dtype: convert to it, one tensor at a time; None writes every tensor as it is.
        max_shard_size: bytes a file; a larger model is split.
        others: as `hub_config`.

    Raises:
        UserError: a dtype that is none of DTYPES.
    """
    tensors = {
        name: Written(tensor, dtype_in(name, dtype) if dtype else tensor.dtype)
        for name, tensor in hub_layout(state).items()
    }
    if unknown := {str(tensor.dtype) for tensor in tensors.values()} - {str(known) for known in DTYPES.values()}:
        raise UserError(f"weights are not written as {min(unknown)}", f"one of {', '.join(map(str, DTYPES.values()))}")
    main_dtype = dtype or state["lm_head.weight"].dtype
    write_directory(folder, hub_config(config, main_dtype, others), tensors, max_shard_size)


def write_directory(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Written], max_shard_size: int = MAX_SHARD_SIZE
) -> None:
    """Write `config.json`, weights and index: into a folder aside, then renamed, `config.json` last.

    Killed half-way, the folder has either its old model or no `config.json`, and is then refused by every reader.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)  # of a writer that was killed
    aside.mkdir()
    try:
        shards = _plan(tensors, max_shard_size)
        digests: dict[str, str] = {}
        for file, names in shards.items():
            digests |= _write_safetensors(aside / file, {name: tensors[name] for name in names})
            if len(shards) > 1:  # minutes, where there are several
                print(f"{file} written", file=sys.stderr)
        index = {
            "metadata": {
                "total_size": sum(tensor.num_bytes for tensor in tensors.values()),
                "sha256": {name: digests[name] for name in tensors},
            },
            "weight_map": {name: file for file, names in shards.items() for name in names},
        }
        write_in_one_step(aside / INDEX_FILE, json.dumps(index, indent=2) + "\n")
        write_in_one_step(aside / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for old in (*folder.glob("model*.safetensors"), folder / INDEX_FILE):
            old.unlink(missing_ok=True)
        for file in (*shards, INDEX_FILE, CONFIG_FILE):
            (aside / file).rename(folder / file)
        fsync_directory(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _plan(tensors: Mapping[str, Written], max_shard_size: int) -> dict[str, list[str]]:
    """File -> its tensors, in order; a new file begins where the next tensor would make one larger than allowed."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _write_safetensors(path: Path, tensors: Mapping[str, Written]) -> dict[str, str]:
    """Write one file tensor by tensor and return their sha256. (`safetensors.save_file` wants all of them at once.)

    The format: the header's length in 8 bytes, the header in JSON, the raw data. Wide dtypes stand first, so that each
    tensor is aligned to its own item size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    position = 0
    for name, tensor in ordered:
        end = position + tensor.num_bytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.source.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests = {}
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            data = _bytes_of(tensor.fetch())
            digests[name] = hashlib.sha256(data).hexdigest()
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return digests


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `dtype` has the format's name, as BF16; `sha256` is that of its bytes if the index has it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    sha256: str | None

    def read_into(self, target: Tensor) -> None:
        """Fill `target`, which has this shape; where dtype or device differ, through one tensor's worth of memory.

        Raises:
            UserError: the file ends too early, or the bytes are not those of the sha256.
        """
        dtype = _ALL_DTYPES[self.dtype]
        direct = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        buffer = target if direct else torch.empty(self.shape, dtype=dtype)
        data = _bytes_of(buffer)
        num_read = 0
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start)
            while num_read < len(data):  # one read gives at most 2 GB
                count = stream.readinto(data[num_read:])
                if not count:
                    raise UserError(f"{self.file}: ends within {self.name}")
                num_read += count
        if self.sha256 is not None and hashlib.sha256(data).hexdigest() != self.sha256:
            raise UserError(
                f"{self.file}: {self.name} is damaged: its content differs from its sha256 in {INDEX_FILE}",
                "fetch or export the directory again",
            )
        if not direct:
            target.copy_(buffer)

    def read(self) -> Tensor:
        """The tensor in newly allocated memory; raises as `read_into`."""
        tensor = torch.empty(self.shape, dtype=_ALL_DTYPES[self.dtype])
        self.read_into(tensor)
        return tensor


def load_weights(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
    dequantized: Mapping[str, Tensor] | None = None,
) -> None:
    """Give a model that was built on the meta device its weights, each read straight into its parameter.

    Args:
        dtype: of all parameters (but see `dtype_in`); None keeps the dtypes of the files.
        device: where the parameters are to lie.
        dequantized: parameters whose codes somebody else has read, by their names in the model; empty where a quantised
            model has keys and values in FP8 alone, None of one that is not quantised.

    Raises:
        UserError: see `checked_weights` and `Stored.read_into`; a GPU has no room for them.
    """
    wanted = model.state_dict()
    packed = None if dequantized is None else hub_layout(dequantized)
    stored = checked_weights(folder, wanted, packed)
    dequantized, packed = dequantized or {}, packed or {}
    target_dtypes: dict[str, torch.dtype] = {}
    for name, meta in wanted.items():
        if name in dequantized:
            target_dtypes[name] = dtype_in(name, dtype or dequantized[name].dtype)
            continue
        dtypes = {stored[piece].dtype for piece in hub_layout({name: meta})}
        if len(dtypes) > 1:
            raise UserError(f"{folder}: experts of {name} have different dtypes: {', '.join(sorted(dtypes))}")
        target_dtypes[name] = dtype_in(name, dtype or DTYPES[dtypes.pop()])
    if torch.device(device).type == "cuda":
        needed = sum(meta.numel() * target_dtypes[name].itemsize for name, meta in wanted.items())
        _check_room(folder, needed, device, dtype)
    state = {
        name: dequantized[name].to(device, target_dtypes[name])
        if name in dequantized
        else torch.empty(meta.shape, dtype=target_dtypes[name], device=device)
        for name, meta in wanted.items()
    }
    for name, target in hub_layout(state).items():
        if name not in packed:
            stored[name].read_into(target)
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        # Buffers that are no part of a checkpoint, such as the loads of the experts, begin at zero. (`zeros_like` of a
        # tensor on the meta device imports SymPy.)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def _check_room(folder: Path, needed: int, device: torch.device | str, dtype: torch.dtype | None) -> None:
    """UserError where a GPU cannot hold so many bytes: better now than when most of them have been read."""
    # What PyTorch keeps of tensors that are gone, of the model before, is free as well.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > (free := torch.cuda.mem_get_info(device)[0] + kept):
        raise UserError(
            f"{folder}: its weights take {human_size(needed)} of a GPU's memory, and {human_size(free)} are free",
            "dtype=bfloat16 takes half" if dtype == torch.float32 else None,
        )


def checked_weights(
    folder: Path, state: Mapping[str, Tensor], packed: Collection[str] | None = None
) -> dict[str, Stored]:
    """The tensors of a model directory, checked against a model's state dict (which may be on the meta device).

    Of a quantised model, where `packed` is not None, its quantised weights, those in `packed`, and all scales
    (`….weight_scale`, `….k_scale`) are left out: others check them.

    Weights of multi-token prediction (`mtp.*`) are left out where the config has num_nextn_predict_layers 0, as
    transformers leaves them out always.

    Raises:
        UserError: a file is missing, damaged or a pickle; a tensor is missing, unexpected, of another shape, or not of
            a floating-point dtype.
    """
    stored = open_weights(folder)
    if packed is not None:
        stored = {
            name: tensor
            for name, tensor in stored.items()
            if name not in packed and name.rpartition(".")[2] not in SCALES
        }
    layout = hub_layout(state).items()
    expected = {name: tuple(tensor.shape) for name, tensor in layout if name not in (packed or ())}
    if not any(name.startswith("mtp.") for name in expected):
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    if missing := [name for name in expected if name not in stored]:
        where = folder / (SINGLE_FILE if (folder / SINGLE_FILE).exists() else INDEX_FILE)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = None
        if missing[0].startswith("mtp.") and not any(name.startswith("mtp.") for name in stored):
            hint = f"without its mtp.* weights a model needs num_nextn_predict_layers 0 in {CONFIG_FILE}"
        raise UserError(f"{where}: {missing[0]} is missing{more}", hint)
    for name, tensor in stored.items():
        if name not in expected:
            raise UserError(f"{tensor.file}: {name} is a tensor that this config has no place for")
        if tensor.shape != expected[name]:
            raise UserError(f"{tensor.file}: {name} is {_shape(tensor.shape)}, {_shape(expected[name])} expected")
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{tensor.file}: {name} is of dtype {tensor.dtype}, one of {', '.join(DTYPES)} expected",
                "quantised weights cannot be read" if tensor.dtype.startswith(("F8", "F4", "U8", "I8")) else None,
            )
    return {name: stored[name] for name in expected}


def open_weights(folder: Path) -> dict[str, Stored]:
    """All tensors of a directory: its index and the headers of its files, without their data.

    Raises:
        UserError: there are no safetensors or there are pickles; the index is damaged or not that of the files; a file
            is missing or damaged.
    """
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"{folder / pickles[0]}: a pickle, which can run code when it is loaded, is never read",
            "give the weights as safetensors, and without this file",
        )
    weight_map, digests = _read_index(folder)
    stored: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]:
        for tensor in _read_header(folder / file, digests):
            if weight_map is not None and weight_map.get(tensor.name) != file:
                says = weight_map.get(tensor.name, "no file")
                raise UserError(f"{folder / file} holds {tensor.name}, for which {INDEX_FILE} names {says}")
            stored[tensor.name] = tensor
    for name, file in (weight_map or {}).items():
        if name not in stored:
            raise UserError(f"{folder / INDEX_FILE}: names {file} for {name}, which is not in it")
    return stored


def _read_index(folder: Path) -> tuple[dict[str, str] | None, dict[str, str]]:
    """`weight_map` (None without an index) and sha256 by tensor (empty where there are none)."""
    path = folder / INDEX_FILE
    if not path.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise UserError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        return None, {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map, digests = index["weight_map"], (index.get("metadata") or {}).get("sha256") or {}
        if not weight_map or not all(isinstance(each, str) for each in (*weight_map.values(), *digests.values())):
            raise ValueError("weight_map is not a map from tensors to files")
        if digests and digests.keys() != weight_map.keys():
            raise ValueError("weight_map and sha256 are not of the same tensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path}: damaged: {what}") from error
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path}: names {file!r} for {name}; a .safetensors file in the same folder expected")
        if not (folder / file).is_file():
            raise UserError(f"{path}: names {file} for {name}, but there is no such file")
    return weight_map, digests


def _read_header(path: Path, digests: Mapping[str, str]) -> Iterator[Stored]:
    """The tensors of one safetensors file. The library checks its header: sizes, no gap, no overlap up to the end."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: {_damage(path) or error}") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield Stored(
            name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin, digests.get(name)
        )


def _damage(path: Path) -> str | None:
    """What is wrong with a file that safetensors does not open, where it can be told more precisely than there."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(9)
            length = int.from_bytes(head[:8], "little")
            if head[:2] == b"PK" or (head[:1] == b"\x80" and length > _MAX_HEADER):
                return "not safetensors but a pickle, which can run code when it is loaded and is never read"
            if head[8:] != b"{" or length > _MAX_HEADER:
                return "not a safetensors file"
            stream.seek(8)
            header = json.loads(stream.read(length)) if size >= 8 + length else None
        if header is None:
            return f"truncated: its header is {length} bytes long, the whole file {size}"
        header.pop("__metadata__", None)
        ends = sorted((8 + length + entry["data_offsets"][1], name) for name, entry in header.items())
        if ends[-1][0] > size:
            first = next(name for end, name in ends if end > size)
            return f"truncated at byte {size} of {ends[-1][0]}, within {first}"
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return None


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
