"""Part of `make lint`: command files are copies on purpose, and differ only as written down here.

A command whose script is a torchrun script is compared with `nano3/pretrain.py`, one whose script also runs on a Ray
cluster with `nano3/data/prep/pretrain.py`. A fork that rewrites its command files drops this script from its Makefile.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

COMMANDS = Path(__file__).resolve().parents[1] / "src/nemotron/cli/commands"
TORCHRUN, RAY = "nano3/pretrain.py", "nano3/data/prep/pretrain.py"

# File -> its model, and what the model has -> what the file has instead.
INTENDED: dict[str, tuple[str, dict[str, str]]] = {
    "nano3/sft.py": (
        TORCHRUN,
        {
            "nano3 pretrain: stage 0, the base model": "nano3 sft: stage 1, supervised fine-tuning",
            "nano3/stage0_pretrain": "nano3/stage1_sft",
            "Pretrain the base model (stage 0)": "Fine-tune the base model on conversations (stage 1)",
            "def pretrain": "def sft",
            "_execute_pretrain": "_execute_sft",
        },
    ),
    "nano3/rl/rlvr.py": (
        TORCHRUN,
        {
            "nano3 pretrain: stage 0, the base model": (
                "nano3 rl rlvr: stage 2, reinforcement learning with verifiable rewards"
            ),
            "nano3/stage0_pretrain": "nano3/stage2_rl",
            'STAGE / "train.py"': 'STAGE / "rlvr.py"',
            "Pretrain the base model (stage 0)": "GRPO with verifiable rewards on all environments at once (stage 2)",
            "def pretrain": "def rlvr",
            "_execute_pretrain": "_execute_rlvr",
        },
    ),
    "nano3/eval.py": (
        RAY,
        {
            "nano3 data prep pretrain: documents to token streams": "nano3 eval: stage 3, what every stage has reached",
            "nano3/stage0_pretrain": "nano3/stage3_eval",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Evaluate the models of all stages (stage 3)"
            ),
            "def pretrain": "def evaluate",
            "_execute_pretrain": "_execute_evaluate",
            "data_prep.py": "evaluate.py",
        },
    ),
    "nano3/data/prep/sft.py": (
        RAY,
        {
            "data prep pretrain: documents to token streams": "data prep sft: conversations to packed sequences",
            "nano3/stage0_pretrain": "nano3/stage1_sft",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Render conversations with the chat template and pack them, loss mask included"
            ),
            "def pretrain": "def sft",
            "_execute_pretrain": "_execute_sft",
        },
    ),
    "nano3/data/prep/rl.py": (
        RAY,
        {
            "data prep pretrain: documents to token streams": "data prep rl: verifiable tasks to prompts",
            "nano3/stage0_pretrain": "nano3/stage2_rl",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Write the prompts of the RL environments"
            ),
            "def pretrain": "def rl",
            "_execute_pretrain": "_execute_rl",
        },
    ),
    "data/pack.py": (
        RAY,
        {
            "nano3 data prep pretrain: documents to token streams": "data pack: conversations to packed rows",
            "nano3/stage0_pretrain": "data/pack",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Render conversations with a chat template and pack them, loss mask included"
            ),
            "def pretrain": "def pack",
            "_execute_pretrain": "_execute_pack",
            "data_prep.py": "pack.py",
        },
    ),
    "data/tokenize.py": (
        RAY,
        {
            "nano3 data prep pretrain: documents to token streams": "data tokenize: documents to token streams",
            "nano3/stage0_pretrain": "data/tokenize",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Tokenise documents of any source into token streams and their blend"
            ),
            "def pretrain": "def tokenize",
            "_execute_pretrain": "_execute_tokenize",
            "data_prep.py": "tokenize_documents.py",
        },
    ),
    "data/curate_step.py": (
        RAY,
        {
            "nano3 data prep pretrain: documents to token streams": "data curate STEP: one step of the curation",
            "from nemotron.cli.recipe_dir import recipe_dir\n": (
                "from nemotron.cli.commands.data.curate import CURATION\n"
            ),
            'STAGE = recipe_dir("nano3/stage0_pretrain")\n\n\n': "\n",
            "Curate documents, train the tokenizer, write the token blend of the base model": (
                "Run the step of the curation that the command is called after"
            ),
            "def pretrain": "def curate_step",
            "parse_recipe_config(ctx))": "parse_recipe_config(ctx), str(ctx.info_name))",
            "cfg: RecipeConfig)": "cfg: RecipeConfig, step: str)",
            "_execute_pretrain": "_execute_curate_step",
            'STAGE / "data_prep.py"': 'CURATION / f"{step}.py"',
            "STAGE / train": "CURATION / train",
        },
    ),
}
# What a torchrun script has instead of the branch for a Ray cluster.
RAY_TO_TORCHRUN = {
    "nano3 data prep pretrain: documents to token streams": "nano3 pretrain: stage 0, the base model",
    "Curate documents, train the tokenizer, write the token blend of the base model": (
        "Pretrain the base model (stage 0)"
    ),
    "data_prep.py": "train.py",
    "a subprocess.": "a subprocess, torchrun if there are several GPUs.",
    "Ray's own client hands them to a Ray cluster ...": "NeMo-Run submits to Slurm, here or over SSH.",
}
RAY_IMPORTS = re.compile(r"^from nemo_runspec\.execution\.ray.*\n", re.MULTILINE)
RAY_BRANCH = re.compile(
    r'^    if env\.executor == "ray":\n.*?^    # \.\.\. and NeMo-Run.*?\n', re.MULTILINE | re.DOTALL
)


def changed(text: str, changes: dict[str, str]) -> str:
    """`text` with every change made; a change of what is not there is reported as a difference."""
    for old, new in changes.items():
        text = text.replace(old, new) if old in text else f"{text}\nnot in the model: {old}\n"
    return text


def expected(file: str) -> str:
    """The text that a command file should have."""
    if file == TORCHRUN:
        without_ray = RAY_BRANCH.sub("", RAY_IMPORTS.sub("", (COMMANDS / RAY).read_text(encoding="utf-8")))
        return changed(without_ray, RAY_TO_TORCHRUN)
    model, changes = INTENDED[file]
    return changed((COMMANDS / model).read_text(encoding="utf-8"), changes)


def main() -> int:
    """Print every unintended difference; 1 if there is one."""
    listed = {TORCHRUN, RAY, *INTENDED}
    texts = {path.relative_to(COMMANDS).as_posix(): path.read_text(encoding="utf-8") for path in COMMANDS.rglob("*.py")}
    there = {file for file, text in texts.items() if "execute_local(spec, " in text}
    problems = [f"{file}: not compared; list it in {Path(__file__).name}" for file in sorted(there - listed)]
    problems += [f"{file}: listed in {Path(__file__).name}, and not there" for file in sorted(listed - there)]
    for file in sorted((listed & there) - {RAY}):
        lines = difflib.unified_diff(
            expected(file).splitlines(), texts[file].splitlines(), "expected", file, lineterm=""
        )
        problems += lines
    print("\n".join(problems) if problems else f"{len(listed)} command files are alike, as intended")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
