"""Command files are copies on purpose. This lists every line in which one differs from `pretrain.py`."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

COMMANDS = Path(__file__).resolve().parents[3] / "src/nemotron/cli/commands"
MODEL = "nano3/pretrain.py"

# Per file: the lines of the model that it lacks (-) and those that it has instead (+).
INTENDED: dict[str, list[str]] = {
    "nano3/sft.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 sft: stage 1, supervised fine-tuning."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("nano3/stage1_sft")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def sft(ctx: typer.Context) -> None:",
        '+    """Fine-tune the base model on conversations (stage 1)."""',
        "+    raise typer.Exit(_execute_sft(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        "+def _execute_sft(cfg: RecipeConfig) -> int:",
    ],
    "nano3/rl/rlvr.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 rl rlvr: stage 2, reinforcement learning with verifiable rewards."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("nano3/stage2_rl")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def rlvr(ctx: typer.Context) -> None:",
        '+    """GRPO with verifiable rewards on all environments at once (stage 2)."""',
        "+    raise typer.Exit(_execute_rlvr(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        "+def _execute_rlvr(cfg: RecipeConfig) -> int:",
    ],
    "nano3/eval.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 eval: stage 3, what every stage has reached."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("nano3/stage3_eval")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def evaluate(ctx: typer.Context) -> None:",
        '+    """Evaluate the models of all stages (stage 3)."""',
        "+    raise typer.Exit(_execute_evaluate(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "+def _execute_evaluate(cfg: RecipeConfig) -> int:",
        '+    train_config = parse_config(cfg, STAGE / "config", default="default", script="evaluate.py")',
    ],
    "nano3/data/prep/pretrain.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 data prep pretrain: documents to token streams."""',
        '-    """Pretrain the base model (stage 0)."""',
        '+    """Curate documents, train the tokenizer, write the token blend of the base model."""',
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        '+    train_config = parse_config(cfg, STAGE / "config" / "data_prep", default="default", script="data_prep.py")',
    ],
    "nano3/data/prep/sft.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 data prep sft: conversations to packed sequences."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("nano3/stage1_sft")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def sft(ctx: typer.Context) -> None:",
        '+    """Render conversations with the chat template and pack them, loss mask included."""',
        "+    raise typer.Exit(_execute_sft(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "+def _execute_sft(cfg: RecipeConfig) -> int:",
        '+    train_config = parse_config(cfg, STAGE / "config" / "data_prep", default="default", script="data_prep.py")',
    ],
    "nano3/data/prep/rl.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron nano3 data prep rl: verifiable tasks to prompts."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("nano3/stage2_rl")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def rl(ctx: typer.Context) -> None:",
        '+    """Write the prompts of the RL environments."""',
        "+    raise typer.Exit(_execute_rl(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "+def _execute_rl(cfg: RecipeConfig) -> int:",
        '+    train_config = parse_config(cfg, STAGE / "config" / "data_prep", default="default", script="data_prep.py")',
    ],
    "data/curate_step.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron data curate STEP: one step of the curation."""',
        "-from nemotron.cli.recipe_dir import recipe_dir",
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        "-",
        "+from nemotron.cli.commands.data.curate import CURATION, SCRIPTS",
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def curate_step(ctx: typer.Context) -> None:",
        '+    """Run the step of the curation that the command is called after."""',
        "+    raise typer.Exit(_execute_curate_step(parse_recipe_config(ctx), str(ctx.info_name)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "-    spec = parse_runspec(STAGE / train_config.run.script)",
        "+def _execute_curate_step(cfg: RecipeConfig, step: str) -> int:",
        '+    train_config = parse_config(cfg, CURATION / "config" / step, default="default", script=SCRIPTS[step])',
        "+    spec = parse_runspec(CURATION / train_config.run.script)",
    ],
    "data/pack.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron data pack: conversations to packed rows."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("data/pack")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def pack(ctx: typer.Context) -> None:",
        '+    """Render conversations with a chat template and pack them, loss mask included."""',
        "+    raise typer.Exit(_execute_pack(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "+def _execute_pack(cfg: RecipeConfig) -> int:",
        '+    train_config = parse_config(cfg, STAGE / "config", default="own", script="pack.py")',
    ],
    "data/tokenize.py": [
        '-"""nemotron nano3 pretrain: stage 0, the base model."""',
        '+"""nemotron data tokenize: documents to token streams."""',
        '-STAGE = recipe_dir("nano3/stage0_pretrain")',
        '+STAGE = recipe_dir("data/tokenize")',
        "-def pretrain(ctx: typer.Context) -> None:",
        '-    """Pretrain the base model (stage 0)."""',
        "-    raise typer.Exit(_execute_pretrain(parse_recipe_config(ctx)))",
        "+def tokenize(ctx: typer.Context) -> None:",
        '+    """Tokenise documents of any source into token streams and their blend."""',
        "+    raise typer.Exit(_execute_tokenize(parse_recipe_config(ctx)))",
        "-def _execute_pretrain(cfg: RecipeConfig) -> int:",
        '-    train_config = parse_config(cfg, STAGE / "config", default="default")',
        "+def _execute_tokenize(cfg: RecipeConfig) -> int:",
        '+    train_config = parse_config(cfg, STAGE / "config", default="own", script="tokenize_documents.py")',
    ],
}


def recipe_command_files() -> set[str]:
    """Every file under `commands/` that runs one recipe script, recognised by the import of `parse_config`."""
    found = set()
    for path in COMMANDS.rglob("*.py"):
        imported = {
            a.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) for a in n.names
        }
        if {"parse_config", "execute_local"} <= imported:
            found.add(path.relative_to(COMMANDS).as_posix())
    return found


def test_every_recipe_command_is_compared() -> None:
    assert recipe_command_files() == {MODEL, *INTENDED}


@pytest.mark.parametrize("file", INTENDED)
def test_a_command_file_differs_from_the_model_only_as_intended(file: str) -> None:
    ours, model = ((COMMANDS / name).read_text().splitlines() for name in (file, MODEL))
    changed = [line for line in difflib.ndiff(model, ours) if line[:2] in ("- ", "+ ")]
    assert sorted(line[0] + line[2:] for line in changed) == sorted(INTENDED[file])


def test_the_pipelines_are_submitted_alike() -> None:
    def submit(file: str) -> str:
        text = (COMMANDS / file).read_text()
        body = text[text.index("def _submit(") :].partition("\n\n\n")[0].rstrip()
        return body.replace('"nano3-rl-', '"nano3-pipe-').replace('"data-curate-', '"nano3-pipe-')

    assert submit("nano3/rl/published.py") == submit("data/curate.py") == submit("nano3/pipe.py")
