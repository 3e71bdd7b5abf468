"""Make an artifact of a model in Hugging Face layout, for `artifacts add`, which starts this script.

Config, tensors and tokenizer are checked, then the files are published as they are; the model is never in memory. This
is a tool and no step of a recipe: it reads no config, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.naming import check_name
from nemo_runspec.errors import UserError
from nemotron.kit.model_folder import CONFIG_FILE, artifact_name, model_folder, publish_folder
from nemotron.recipes.tools.model_files import check_manifest
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import is_quantized, load_config, read_config, unknown_keys
from nemotron.stack.models.published.hub import checked_weights
from nemotron.stack.quantization.export import load_model


@dataclass(frozen=True)
class Options:
    """Of `artifacts add` for a model. `place`: a directory or an hf:// address."""

    place: str
    name: str | None


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
    if is_quantized(read_config(folder)):
        load_model(folder)
    else:
        for tensor in checked_weights(folder, model.state_dict()).values():
            if tensor.sha256 is not None:
                tensor.read()
    size = load_tokenizer(folder).get_vocab_size()
    if size > config.vocab_size:
        raise UserError(f"{folder / 'tokenizer.json'} has {size} tokens, the model only {config.vocab_size}")
    if unknown := unknown_keys(read_config(folder)):
        print(f"config.json: of no meaning here: {', '.join(unknown)}", file=sys.stderr)
    return model.num_parameters()


def main(options: Options) -> None:
    """Find, check, publish."""
    name = check_name(options.name or artifact_name(options.place))
    folder, where = model_folder(options.place)
    if not (folder / CONFIG_FILE).is_file():
        what = f"{options.place} is not a model directory: there is no {CONFIG_FILE}"
        raise UserError(what, f"data: nemotron artifacts add {options.place} --type dataset")
    total, active = check(folder)
    metrics = {"active_parameters": active}
    version = publish_folder(folder, name, where, Registry.default(), num_parameters=total, metrics=metrics)
    print(version.ref)
    print(f"talk to it: nemotron nano3 chat --model {version.ref}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
