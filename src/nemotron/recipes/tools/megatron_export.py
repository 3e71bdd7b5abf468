"""Write a Megatron checkpoint as a model in Hugging Face layout, for `model export`, which starts this script.

Megatron-Bridge 0.6.2 does it, on the CPU, in its image. A checkpoint has weights and no config.json: that, and the list
of tensors, are those of a model that it has the architecture of. This is a tool and no step of a recipe: it reads no
config, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge import AutoBridge

from nemo_runspec.errors import UserError
from nemotron.kit.megatron import MegatronCheckpoint
from nemotron.kit.model_folder import HUB, TOKENIZER_FILES
from nemotron.recipes.tools.options import run_tool
from nemotron.recipes.tools.whole_folder import in_one_step


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY model export` for a Megatron checkpoint. `like`: a directory or an hf:// address."""

    model: str
    output: str
    like: str


def main(options: Options) -> None:
    """Load, convert, give it the tokenizer that it was trained with."""
    folder = Path(options.output)
    if folder.exists():
        raise UserError(f"{folder} exists", "another directory: -o")
    checkpoint = MegatronCheckpoint.load(options.model)
    bridge = AutoBridge.from_hf_pretrained(options.like.removeprefix(HUB))
    tokenizer = checkpoint.tokenizer_path
    with in_one_step(folder.resolve(), [], "export") as filled:
        bridge.export_ckpt(str(checkpoint.path), str(filled))
        for name in TOKENIZER_FILES:  # and its chat template
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, filled / name)
    print(folder)
    print(f"check and publish it: nemotron artifacts add {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
