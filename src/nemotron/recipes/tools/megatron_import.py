"""Make a Megatron checkpoint of a model in Hugging Face layout, for `model import`, which starts this script.

Megatron-Bridge 0.6.2 does it, on the CPU, in its image: it builds the model by config.json, and fills it tensor by
tensor. This is a tool and no step of a recipe: it reads no config, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge import AutoBridge

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.inputs import is_place
from nemo_runspec.errors import RunFailed
from nemotron.kit import Checkpoint
from nemotron.kit.megatron import MegatronCheckpoint, last_checkpoint
from nemotron.kit.model_folder import adopt_model
from nemotron.recipes.tools.options import run_tool


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY model import`. `model`: an artifact's reference, a directory or an hf:// address."""

    model: str
    name: str


def main(options: Options) -> None:
    """Find, convert, publish."""
    registry = Registry.default()
    version = adopt_model(options.model, registry) if is_place(options.model) else registry.resolve(options.model)
    assert version is not None  # what is adopted is published
    model = Checkpoint.load(path=version.path)
    beside = registry.local_root.parent  # on the same file system, from where the files are moved
    with tempfile.TemporaryDirectory(prefix="nemotron-megatron-", dir=beside) as folder:
        AutoBridge.import_ckpt(str(model.path), folder)
        checkpoint = last_checkpoint(Path(folder))
        if checkpoint is None:
            raise RunFailed(f"Megatron-Bridge wrote no whole checkpoint of {model.ref}")
        published = MegatronCheckpoint(
            path=checkpoint, num_steps=model.num_steps, tokens=model.tokens, dataset_path=model.dataset_path,
            tokenizer_path=model.tokenizer_path or model.path, chat_template=model.chat_template,
            reasoning=model.reasoning,
        ).save(options.name, registry=registry, move=True)  # fmt: skip
    print(published.ref)
    print(f"train it: nemotron FAMILY sft run.model={published.ref} …", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
