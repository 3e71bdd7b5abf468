"""nemotron data curate: all steps from a raw crawl to a curated corpus, and a table of what each has dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from nemo_runspec.config.loader import list_configs
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.job import RecipeConfig, parse_recipe_config
from nemo_runspec.pipeline import (
    Step,
    StepResult,
    ended,
    first_failure,
    part_of,
    run_pipeline,
    submit_each_to_ray,
    submit_pipeline,
    submit_to_slurm,
    with_overrides,
)
from nemo_runspec.profile import executor_of
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.kit.steps import read_recipe

if TYPE_CHECKING:
    from rich.table import Table

CURATION = recipe_dir("data/curation/nemotron_cc")
RECIPE = read_recipe(CURATION)
STEPS = tuple(step.name for step in RECIPE.steps)
_REASONS = 3  # that the table names for each step
_NO_ENDPOINT = (
    "left out: rephrase, which needs a model behind an endpoint; with one: "
    "nemotron data curate rephrase -c tiny endpoint.base_url=… endpoint.model=…"
)


def curate(ctx: typer.Context) -> None:
    """From a raw crawl to a curated corpus, in the order of Nemotron-CC.

    Without a step: all of them. A step whose config, script and inputs were run before is skipped. At the end stands a
    table of what each step has dropped and why.

    \b
    Reads WARC files; writes nemotron_cc-STEP-data-CONFIG, the last one nemotron_cc-data-CONFIG. With -c tiny that is
    decontaminate: rephrase needs an endpoint, and runs where rephrase:endpoint.base_url=… names one.

    \b
    Options, anywhere on the line:
      -c, --config NAME  the config of every step: tiny (a laptop CPU, offline), or default, also if none is given
      --from STEP        begin with a step
      --to STEP          end with a step
      --run PROFILE      run under a profile of env.toml; on Slurm all steps as one experiment, on Ray one by one
      --batch PROFILE    submit them and leave
      --dry-run          check all steps and print what would run
      --force            run what is published already, and nothing half-way
      --debug            show tracebacks
      STEP:key=value     set a key of one step

    \b
    Examples:
      nemotron data curate -c tiny              all steps, skipping those that are published
      nemotron data curate language -c tiny     one step; its --help lists configs, artifacts and options
      nemotron data curate -c tiny language:threshold=0.5
    """
    if ctx.invoked_subcommand is None:
        # Of a group that runs, typer reads no options.
        start, end = (_take_step(option, ctx.args) for option in ("--from", "--to"))
        raise typer.Exit(_execute_curate(parse_recipe_config(ctx), start, end))


def _take_step(option: str, words: list[str]) -> str | None:
    """Take `--from STEP` or `--from=STEP` out of the words of the command line; None where there is none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            if not equals and index + 1 < len(words):
                value = words.pop(index + 1)
            if not value or value.startswith("-"):
                raise UserError(f"option {option} needs a value", f"as in {option} quality")
            del words[index]
            if any(word.partition("=")[0] == option for word in words):
                raise UserError(f"option {option} is given twice")
            return value
    return None


def _execute_curate(cfg: RecipeConfig, start: str | None, end: str | None) -> int:
    # 1. The steps, in order. Each has its own script and config; `-c tiny` is the tiny config of each.
    steps = [Step(step.name, step.script) for step in RECIPE.steps]
    if (cfg.config_name or "default") not in list_configs(CURATION / "config" / "crawl"):
        steps = steps[1:]
    steps = with_overrides(steps, cfg.overrides)
    is_offline = cfg.config_name == "tiny" and "rephrase" not in (start, end) and not steps[-1].overrides
    if is_offline:
        steps = steps[:-1]
    names = [step.name for step in steps]
    for name in (start, end):
        if name is not None and name not in names:
            raise UserError(f"unknown step '{name}'", did_you_mean(name, names, "steps"))
    first, last = names.index(start or names[0]), names.index(end or names[-1])
    if last < first:
        raise UserError(f"--to {end} comes before --from {start}", f"the order is {', '.join(names)}")
    steps = list(part_of(steps, slice(first, last + 1)))
    # 2. Run them, here or there. All are validated before the first one starts; what is published already is skipped.
    executor = executor_of(cfg.profile)
    if executor == "ray":
        return submit_pipeline("data-curate", steps, cfg, submit_each_to_ray, executor="ray")
    if executor != "local":
        return submit_pipeline("data-curate", steps, cfg, submit_to_slurm)
    results = run_pipeline(steps, cfg)
    # 3. What came of it.
    if results:
        _show_table(results)
    if is_offline and end is None:
        typer.echo(_NO_ENDPOINT)
    return first_failure(results)


def _show_table(results: list[StepResult]) -> None:
    """Print documents in and out of each step and its most frequent reasons, and the wall time of each."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(results))
    times = [f"{r.step.name} {'skipped' if r.status == 'skipped' else f'{r.seconds:.0f} s'}" for r in results]
    console.print(f"wall time {sum(r.seconds for r in results):.0f} s: {', '.join(times)}", soft_wrap=True)


def _table(results: list[StepResult]) -> Table:
    from rich.table import Table

    table = Table("step", "in", "out", "MB out", "dropped, and why", title="What each step has dropped")
    for column in table.columns[1:4]:
        column.justify = "right"
    for result in results:
        for version in result.versions.values():
            counts = version.record["metrics"].get("table")
            if counts is None:  # the crawl: nothing is dropped there
                table.add_row(result.step.name, "", f"{version.record['fields']['num_examples']:,}", "", "")
                continue
            read, kept = counts["read"]["documents"], counts["kept"]["documents"]
            megabytes = f"{counts['kept']['bytes'] / 1e6:.2f}"
            table.add_row(result.step.name, f"{read:,}", f"{kept:,}", megabytes, _reasons(counts["dropped"]))
        if not result.versions:
            table.add_row(result.step.name, "", "", "", ended(result.exit_code))
    return table


def _reasons(dropped: dict[str, dict[str, int]]) -> str:
    """`language de: 55, language fr: 55, too short to tell: 40, other reasons: 120`: the most frequent first."""
    counts = sorted(((tally["documents"], reason) for reason, tally in dropped.items()), reverse=True)
    if rest := counts[_REASONS:]:
        counts = [*counts[:_REASONS], (sum(count for count, _ in rest), "other reasons")]
    return ", ".join(f"{reason}: {count:,}" for count, reason in counts)
