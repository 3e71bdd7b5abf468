"""Register a Hugging Face directory as a model artifact, for `nemotron FAMILY model import`, which starts this script.

Config, tensors and tokenizer are checked, then the files are published as they are; the model is never in memory. This
is a tool and no step of a recipe: it reads no config, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which Ctrl-C is to end in one line, too
    from nemo_runspec.errors import end_on_signals

    end_on_signals()

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_runspec.artifacts.naming import check_name
from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemotron.kit import Model, Source
from nemotron.kit.chat_templates import TEMPLATES
from nemotron.recipes.tools.model_files import check_manifest, is_model_file
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import load_config, read_config, unknown_keys
from nemotron.stack.models.published.hub import checked_weights


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY model import`: the model answers under that family's template."""

    source: str
    family: str
    name: str | None
    revision: str | None


def find_source(source: str, revision: str | None) -> tuple[Path, str]:
    """The directory to import, and what to call it in the record. A Hub model comes from its cache or the network.

    Raises:
        UserError: there is no such directory, and the Hub cannot be asked or knows no such model.
    """
    if Path(source).is_dir():
        if revision is not None:
            raise UserError("--revision is for models of the Hub", f"{source} is a directory")
        return Path(source).absolute(), str(Path(source).absolute())
    if Path(source).exists():
        raise UserError(f"{source} is a file, a directory expected", "give the one that holds its config.json")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise UserError(f"no directory {source}", "give a directory, or ORG/MODEL for a model of the Hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"no directory {source}; models of the Hub need huggingface_hub", install_line("hf")) from None
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "README.md"]
    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as error:  # offline, its HTTP library raises what has no base class in common with the Hub's own
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no directory {source}, and not from the Hub: {reason}") from error
    return folder, f"https://huggingface.co/{source}/tree/{folder.name}"  # a snapshot is named after its commit


def check(folder: Path) -> tuple[int, int]:
    """Check everything that can be checked; returns the number of parameters, total and active.

    Raises:
        UserError: what `load_config`, `checked_weights` and `check_manifest` refuse; a tensor whose bytes are
            not those of its sha256; no tokenizer.json, or one with more tokens than the model.
    """
    config = load_config(folder)
    check_manifest(folder)
    with torch.device("meta"):
        model = NemotronH(config)
    for tensor in checked_weights(folder, model.state_dict()).values():
        if tensor.sha256 is not None:
            tensor.read()
    size = load_tokenizer(folder).get_vocab_size()
    if size > config.vocab_size:
        raise UserError(f"{folder / 'tokenizer.json'} has {size} tokens, the model only {config.vocab_size}")
    if unknown := unknown_keys(read_config(folder)):
        print(f"config.json: of no meaning here: {', '.join(unknown)}", file=sys.stderr)
    return model.num_parameters()


def publish(folder: Path, name: str, where: str, family: str) -> Model:
    """Publish the model's files, and no others, as the next version of `name`; it answers as models of `family` do."""
    total, active = check(folder)
    names = sorted(entry.name for entry in folder.iterdir() if is_model_file(entry.name))
    with tempfile.TemporaryDirectory(prefix="nemotron-import-") as area:
        payload = Path(area) / "payload"
        payload.mkdir()
        for each in names:
            (payload / each).symlink_to((folder / each).resolve())
        return Model(
            path=payload,
            step=0,
            tokenizer_path=payload,
            num_parameters=total,
            chat_template=family if family in TEMPLATES else None,
            metrics={"active_parameters": active},
            sources=[Source(name=where, detail="a model from elsewhere")],
        ).save(name)


def main(options: Options) -> None:
    """Find, check, publish."""
    default = re.sub(r"[^A-Za-z0-9._-]", "-", Path(options.source).absolute().name).lstrip("._-")
    name = check_name(options.name or default)
    folder, where = find_source(options.source, options.revision)
    model = publish(folder, name, where, options.family)
    print(model.ref)
    print(f"talk to it: nemotron {options.family} chat --model {model.ref}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
