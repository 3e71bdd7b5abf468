"""nemotron lm-eval: a model of ours on the benchmarks of lm-eval, and on our tasks among them."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.installation import check_imports
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.cli.tool import become_tool


def lm_eval(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME or NAME:VERSION of an artifact, a directory, hf://ORG/NAME.")
    ],
) -> None:
    """Score a model with lm-eval, whose options follow.

    Our tasks are the groups nemotron (models that answer) and nemotron_base, and nemotron_letters. All others are
    downloaded by lm-eval. Options: lm-eval run --help.

    \b
    Examples:
      nemotron lm-eval nano3-rl-model-tiny --tasks nemotron --apply_chat_template
      nemotron lm-eval nano3-pretrain-model-tiny --tasks nemotron_base,nemotron_letters --metadata num_tasks=50
      nemotron lm-eval ./my-model --tasks arc_easy --limit 100 --output_path scores
    """
    from nemotron.kit.found_model import find_model

    check_imports(recipe_dir("tools") / "lm_eval_run.py")  # before a model is downloaded
    find_model(model)  # lm-eval reads thousands of tasks before it asks for the model
    become_tool("lm_eval_run.py", model=model, words=ctx.args)
