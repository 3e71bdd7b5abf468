"""A model that is no artifact yet: a directory in Hugging Face layout, or a model of the Hub, and how it becomes one.

    my-model/, ./my-model, /a/model    a directory: whatever has a slash, or begins with a dot or a tilde
    hf://ORG/NAME[@REVISION]           a model of the Hub, from its cache or the network

Its files are published as they are, under the name of the directory. The same content again is the version that has it.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.artifacts.manifest import payload_digest, sha256_file
from nemo_runspec.errors import UserError, first_line
from nemo_runspec.installation import install_line
from nemo_runspec.user_files import expanded
from nemotron.kit.artifact import Model, Source
from nemotron.kit.chat_template import has_template
from nemotron.kit.hub import download_hint, what_failed

HUB = "hf://"
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
GENERATION_FILE = "generation_config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"  # of a quantised model, in ModelOpt's words: TensorRT-LLM reads it
CARD_FILE = "README.md"
ORIGIN_FILE = "nemotron.json"  # which artifact an exported model is, and what went into it
ADAPTER_FOLDER = "adapter"  # in a model that was trained by adapters: they alone, in the layout of PEFT
ADAPTER_CONFIG = f"{ADAPTER_FOLDER}/adapter_config.json"
ADAPTER_WEIGHTS = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
MANIFEST_FILE = "manifest.sha256"
# What the manifest of an exported model covers; the card is prose, and for people to edit.
LISTED_FILES = (
    CONFIG_FILE,
    INDEX_FILE,
    GENERATION_FILE,
    QUANT_CONFIG_FILE,
    ORIGIN_FILE,
    *TOKENIZER_FILES,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of one model to another, and its `generation_config.json` where it has one."""
    for name in (*TOKENIZER_FILES, GENERATION_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def is_model_file(name: str) -> bool:
    """Whether a file of this name is part of a model directory."""
    return name in (*LISTED_FILES, CARD_FILE, MANIFEST_FILE) or name.endswith(".safetensors")


def model_folder(place: str) -> tuple[Path, str]:
    """The directory that a path or an address stands for, and what to call it in a record.

    Raises:
        UserError: there is no such directory, or the Hub cannot be asked or knows no such model.
    """
    if place.startswith(HUB):
        return _from_hub(place)
    folder = expanded(place).absolute()
    if not folder.is_dir():
        what = f"{place} is a file, a directory expected" if folder.exists() else f"no directory {place}"
        raise UserError(what, "give a model directory, which holds config.json, or hf://ORG/NAME")
    return folder, str(folder)


def check_model_folder(folder: Path, tokenizer: Path | None = None) -> None:
    """UserError unless the directory holds a model that can be read here: config, safetensors, tokenizer.

    `tokenizer`: the folder of its tokenizer where that is another one.
    """
    for place, name in ((folder, CONFIG_FILE), (tokenizer or folder, "tokenizer.json")):
        if not (place / name).is_file():
            raise UserError(f"{place} is no model: it has no {name}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no weights: no .safetensors file", "pickled weights are not read; convert them")


def adopt_model(place: str, registry: Registry, publish: bool = True) -> Version | None:
    """The version that holds the model of a path or an address; published first where there is none.

    A path into a published artifact is that version.

    Args:
        publish: False only checks; then None stands for a version that is yet to be published.

    Raises:
        UserError: see `model_folder` and `check_model_folder`.
    """
    if not publish and place.startswith(HUB):  # a dry run downloads nothing
        hub_address(place)
        return None
    folder, where = model_folder(place)
    if folder.is_relative_to(registry.local_root):
        return registry.version_at(folder)
    check_model_folder(folder)
    return publish_folder(folder, artifact_name(place), where, registry) if publish else None


def artifact_name(place: str) -> str:
    """What an artifact made of this place is called: the last part of its path."""
    name = hub_address(place)[0] if place.startswith(HUB) else str(expanded(place).absolute())
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(name).name).lstrip("._-") or "model"


def publish_folder(folder: Path, name: str, where: str, registry: Registry, **fields: Any) -> Version:
    """Publish the model's files, and no others, as the next version of `name`, or find the one that has this content.

    Args:
        where: the raw source in the record.
        fields: of `Model`, where more is known than the files say.
    """
    names = [entry.name for entry in folder.iterdir() if is_model_file(entry.name)]
    names = sorted(names + [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (folder / name).is_file()])
    if registry.versions(name):
        digest = payload_digest({each: _sha256(folder / each) for each in names})
        for version in registry.readable(name):
            if version.digest == digest:
                return version
    with tempfile.TemporaryDirectory(prefix="nemotron-adopt-") as area:
        payload = Path(area) / "payload"
        payload.mkdir()
        for each in names:
            (payload / each).parent.mkdir(exist_ok=True)
            (payload / each).symlink_to((folder / each).resolve())
        origin, exported = read_origin(folder), None
        sources = [Source(name=where, detail="a model from elsewhere")]
        if origin is not None:
            ref, _, digest = origin.artifact.partition("@")
            sources = [Source(name=where, detail=f"an export of {ref}")]
            try:
                exported = registry.resolve(origin.artifact).path
            except UserError:  # of another registry
                sources += [Source(name=ref, sha256=digest, detail="as its export says"), *origin.sources]
            known = {"num_steps": origin.num_steps, "tokens": origin.tokens, "reasoning": origin.reasoning}
            fields = {**known, "exported_path": exported, **fields}
        is_base = not has_template(folder) or (origin is not None and origin.is_base)
        model = Model(
            path=payload,
            tokenizer_path=payload,
            chat_template=None if is_base else payload,
            **{"num_steps": 0, "num_parameters": num_parameters(folder), "sources": sources, **fields},
        )
        return model.save(name, registry=registry).version


def _sha256(file: Path) -> str:
    """The sha256 of a file, without reading it where it lies in the Hub's cache: a large one is named by it there."""
    blob = file.resolve()
    is_named = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name)
    return blob.name if is_named else sha256_file(file)


class Origin(BaseModel):
    """What an exported model says of the artifact that it was: `artifact` as `name:3@<digest>`."""

    artifact: str = Field(pattern=r"^[^:@]+:[0-9]+@[0-9a-f]{64}$")
    is_base: bool
    num_steps: int
    tokens: int | None
    reasoning: bool | None
    sources: list[Source]

    def write(self, folder: Path) -> None:
        """Put it beside the weights."""
        (folder / ORIGIN_FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin | None:
    """Where an exported model comes from; None for one that does not say. UserError: it cannot be read."""
    path = folder / ORIGIN_FILE
    try:
        return Origin.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise UserError(f"{path}: not what an export writes: {first_line(error)}") from error


def num_parameters(folder: Path) -> int:
    """The number of values in all tensors of a directory, from the headers of its safetensors files.

    Raises:
        UserError: a file is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not a safetensors file: {error}") from error
    return total


def hub_address(place: str) -> tuple[str, str | None]:
    """ORG/NAME and the revision of an address."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(.+))?", place.removeprefix(HUB))
    if match is None:
        raise UserError(f"{place}: not the address of a model", "write hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return match[1], match[2]


def _from_hub(place: str) -> tuple[Path, str]:
    name, revision = hub_address(place)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{place}: models of the Hub need huggingface_hub", install_line("hf")) from None
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "README.md"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # offline, its HTTP library raises what has no base class in common with the Hub's own
        raise UserError(f"{place}: {what_failed(error)}", download_hint(name)) from error
    return folder, f"https://huggingface.co/{name}/tree/{folder.name}"  # a snapshot is named after its commit
