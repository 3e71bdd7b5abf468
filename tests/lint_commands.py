"""Part of `make lint`: command files are copies on purpose, and differ only as written down here.

They are compared with one whose script also runs on a Ray cluster; a command whose script is a torchrun script has no
branch for that. A fork that rewrites its command files drops this script from its Makefile.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

COMMANDS = Path(__file__).resolve().parents[1] / "src/nemotron/cli/commands"
MODEL = "nano3/data/prep/pretrain.py"


class Command(NamedTuple):
    """What is a command file's own; `others`: what the model has -> what the file has instead."""

    title: str
    stage: str
    function: str
    about: str
    script: str
    ray: bool = True
    others: dict[str, str] = {}  # noqa: RUF012  read only


INTENDED = {
    MODEL: Command(
        "nano3 data prep pretrain: documents to token streams",
        "nano3/stage0_pretrain",
        "pretrain",
        "Curate documents, train the tokenizer, write the token blend of the base model.",
        "data_prep.py",
    ),
    "nano3/data/prep/sft.py": Command(
        "nano3 data prep sft: conversations to packed sequences",
        "nano3/stage1_sft",
        "sft",
        "Render conversations with the chat template and pack them, loss mask included.",
        "data_prep.py",
    ),
    "nano3/data/prep/rl.py": Command(
        "nano3 data prep rl: verifiable tasks to prompts",
        "nano3/stage2_rl",
        "rl",
        "Write the prompts of the RL environments.",
        "data_prep.py",
    ),
    "nano3/pretrain.py": Command(
        "nano3 pretrain: stage 0, the base model",
        "nano3/stage0_pretrain",
        "pretrain",
        "Pretrain the base model (stage 0).",
        "train.py",
        ray=False,
    ),
    "nano3/sft.py": Command(
        "nano3 sft: stage 1, supervised fine-tuning",
        "nano3/stage1_sft",
        "sft",
        "Fine-tune the base model on conversations (stage 1).",
        "train.py",
        ray=False,
    ),
    "nano3/rl/rlvr.py": Command(
        "nano3 rl rlvr: stage 2, reinforcement learning with verifiable rewards",
        "nano3/stage2_rl",
        "rlvr",
        "GRPO with verifiable rewards on all environments at once (stage 2).",
        "rlvr.py",
        ray=False,
    ),
    "nano3/eval.py": Command(
        "nano3 eval: stage 3, what every stage has reached",
        "nano3/stage3_eval",
        "evaluate",
        "Evaluate the models of all stages (stage 3).",
        "evaluate.py",
    ),
    "data/pack.py": Command(
        "data pack: conversations to packed rows",
        "data/pack",
        "pack",
        "Render conversations with a chat template and pack them, loss mask included.",
        "pack.py",
    ),
    "data/tokenize.py": Command(
        "data tokenize: documents to token streams",
        "data/tokenize",
        "tokenize",
        "Tokenise documents of any source into token streams and their blend.",
        "tokenize_documents.py",
    ),
    "data/curate_step.py": Command(
        "data curate STEP: one step of the curation",
        "",
        "curate_step",
        "Run the step of the curation that the command is called after.",
        "",
        others={
            "from nemotron.cli.recipe_dir import recipe_dir\n": (
                "from nemotron.cli.commands.data.curate import CURATION\n"
            ),
            'STAGE = recipe_dir("")\n\n\n': "\n",
            'STAGE / ""': 'CURATION / f"{step}.py"',
            "find_script(STAGE": "find_script(CURATION",
            "parse_recipe_config(ctx))": "parse_recipe_config(ctx), str(ctx.info_name))",
            "cfg: job.RecipeConfig)": "cfg: job.RecipeConfig, step: str)",
        },
    ),
}
# What a torchrun script has instead of the branch for a Ray cluster.
WITHOUT_RAY = {
    "from nemo_runspec.pipeline import submit_to_ray\n": "",
    "a subprocess.": "a subprocess, torchrun if there are several GPUs.",
    "Ray's own client hands them to a Ray cluster ...": "NeMo-Run submits to Slurm, here or over SSH.",
}
RAY_PARTS = re.compile(r'^        if env\.executor == "ray":\n[\s\S]*?^        # \.\.\. and NeMo-Run.*?\n', re.M)


def expected(command: Command) -> str:
    """The text that a command file should have. A change of what is not in the model is reported as a difference."""
    text, model = (COMMANDS / MODEL).read_text(encoding="utf-8"), INTENDED[MODEL]
    changes = {
        model.title: command.title,
        model.about: command.about,
        f'"{model.stage}"': f'"{command.stage}"',
        f"def {model.function}(": f"def {command.function}(",
        f"_execute_{model.function}(": f"_execute_{command.function}(",
        f'"{model.script}"': f'"{command.script}"',
        **({} if command.ray else WITHOUT_RAY),
        **command.others,
    }
    if not command.ray:
        text = RAY_PARTS.sub("", text)
    for old, new in changes.items():
        text = text.replace(old, new) if old in text else f"{text}\nnot in the model: {old}\n"
    return text


def main() -> int:
    """Print every unintended difference; 1 if there is one."""
    texts = {path.relative_to(COMMANDS).as_posix(): path.read_text(encoding="utf-8") for path in COMMANDS.rglob("*.py")}
    present = {file for file, text in texts.items() if "execute_local(spec, " in text}
    problems = [f"{file}: not compared; list it in {Path(__file__).name}" for file in sorted(present - set(INTENDED))]
    problems += [f"{file}: listed in {Path(__file__).name}, and not there" for file in sorted(set(INTENDED) - present)]
    for file in sorted(present & set(INTENDED)):
        lines = expected(INTENDED[file]).splitlines(), texts[file].splitlines()
        problems += difflib.unified_diff(*lines, "expected", file, lineterm="")
    print("\n".join(problems) if problems else f"{len(INTENDED)} command files are alike, as intended")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
