"""lm-eval with a model of ours, for `nemotron lm-eval`, which starts this script.

Everything but the model is lm-eval's own: its tasks, to which ours are added (lm_eval_tasks/), its options, its tables.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing library are one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from nemo_runspec.errors import RunFailed, UserError, did_you_mean
from nemotron.kit.found_model import find_model
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.lm_eval_model import NemotronLM
from nemotron.stack.quantization.export import load_model

TASKS = Path(__file__).parent / "lm_eval_tasks"


@dataclass(frozen=True)
class Options:
    """Of `nemotron lm-eval`; `words` are lm-eval's."""

    model: str
    words: list[str]


@register_model("nemotron")
class NamedModel(NemotronLM):
    """A model by its name, as lm-eval's `--model nemotron`.

    Args:
        pretrained: a name, a directory or hf://ORG/NAME.
        thinking: reasoning on or off; None: as the model was trained.
        batch_size, device, and max_batch_size, which is not looked at: as lm-eval hands them over. Without a device it
            is the GPU, if there is one.
        dtype: of the weights, float32 as `nano3 eval` has it, or bfloat16.
        others: as `NemotronLM`.
    """

    def __init__(
        self,
        pretrained: str,
        thinking: bool | None = None,
        batch_size: int | str = 64,
        device: str | None = None,
        dtype: str = "float32",
        max_batch_size: int | None = None,
        **others: int,
    ) -> None:
        known = ("max_length", "max_gen_toks")
        if unknown := next((name for name in others if name not in known), None):
            raise UserError(f"--model_args {unknown}", did_you_mean(unknown, ("thinking", "dtype", *known)))
        for name, number in others.items():
            if type(number) is not int or number < 1:
                raise UserError(f"--model_args {name}={number}: a number of tokens expected")
        if not isinstance(thinking, bool | None):
            raise UserError(f"--model_args thinking={thinking}: True or False expected")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"--batch_size {batch_size}: a number of rows expected")
        found = find_model(pretrained)
        place = device or "cuda"  # lm-eval's default as well, also without one
        model = load_model(found.folder, dtype, place if torch.cuda.is_available() else "cpu")
        super().__init__(
            model, found.tokenizer, None if found.is_base else found.template,
            thinking=found.reasons if thinking is None else thinking, batch_size=int(batch_size), **others,
        )  # fmt: skip


def main(options: Options) -> None:
    """Become lm-eval's command line. UserError: no such task. RunFailed: data of a task cannot be had."""
    sys.argv = ["lm-eval", "run", "--model", "nemotron", "--model_args", f"pretrained={options.model}"]
    sys.argv += ["--include_path", str(TASKS), "--batch_size", "64", *options.words]  # of two, argparse takes the last
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith(("Tasks not found", "No tasks specified")):
            raise
        raise UserError(str(error), "ours: nemotron, nemotron_base, nemotron_letters; all: lm-eval ls tasks") from error
    except ModuleNotFoundError as error:  # of another --model
        raise UserError(f"lm-eval needs {error.name}, which is not installed", f"pip install {error.name}") from error
    except ConnectionError as error:  # of datasets
        raise RunFailed(str(error), "lm-eval downloads the data of its own tasks; nemotron's are generated") from error


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
