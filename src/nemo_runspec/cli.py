"""The `nemo-runspec` command: show, validate and run any script with a `[tool.runspec]` block, in any project."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import typer

from nemo_runspec import __version__, job
from nemo_runspec.bundle import create_bundle
from nemo_runspec.config.loader import list_configs, load_config
from nemo_runspec.config.resolve import resolve_config
from nemo_runspec.config.schema import load_schema
from nemo_runspec.display import display_job
from nemo_runspec.errors import INTERRUPTED, UserError, run_main
from nemo_runspec.execution.interrupts import handling
from nemo_runspec.execution.local import execute_local
from nemo_runspec.installation import own_distribution
from nemo_runspec.job import CONTEXT_SETTINGS, VALUED
from nemo_runspec.options import parse_words
from nemo_runspec.pipeline import submit_to_ray, submit_to_slurm
from nemo_runspec.runspec import parse
from nemo_runspec.words import shown

app = typer.Typer(
    name="nemo-runspec",
    help="Show, validate and run scripts that describe themselves in a [tool.runspec] block.",
    epilog="The format: docs/runspec/v1/spec.md",
    no_args_is_help=True,
    rich_markup_mode=None,  # brackets in a help text are brackets
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    """Callback of `--version`: print what is installed, and leave."""
    if asked:
        own = own_distribution()
        print(f"{own.name if own else 'nemo-runspec'} {__version__}")
        raise typer.Exit()


VERSION = typer.Option(False, "--version", help="Show the version and exit.", callback=show_version, is_eager=True)


@app.callback()
def options(version: bool = VERSION) -> None:
    """Take the options that stand before a command."""


@app.command()
def show(
    path: Path = typer.Argument(..., help="the script"),
    as_json: bool = typer.Option(False, "--json", help="one JSON object with every field"),
) -> None:
    """Print what a script says about itself, defaults filled in."""
    spec = parse(path)
    if as_json:
        print(json.dumps(spec.to_dict(), indent=2))
        return
    for key, value in spec.to_dict().items():
        if isinstance(value, dict):
            for inner, item in value.items():
                print(f"{key + '.' + inner:<24} {_text(item)}")
        else:
            print(f"{key:<24} {_text(value)}")
    print(f"{'configs':<24} {', '.join(list_configs(spec.config_dir, spec.config.format)) or '-'}")


def _text(value: object) -> str:
    return "-" if value in (None, "") else str(value)


@app.command(context_settings=CONTEXT_SETTINGS, options_metavar="PATH [-c CONFIG] [key=value …]")
def validate(ctx: typer.Context) -> None:
    """Check the block, the schema and the configs of a script.

    All of its configs, or the one that -c names. Artifacts are not looked up, so that configs can be checked where
    nothing has been made yet; `nemo-runspec run --dry-run` looks them up.
    """
    spec = parse(_take_path(ctx))
    options = parse_words(ctx.args, valued={"-c": "config", "--config": "config"}, flags={"--debug": "debug"})
    chosen = options.values.get("config")
    for name in [chosen] if chosen else list_configs(spec.config_dir, spec.config.format):
        loaded = load_config(spec.config_dir, name, options.overrides, spec.config.format)
        script = vars(loaded.run).get("script")
        if not chosen and isinstance(script, str) and script and not spec.is_named(script):
            continue  # the folder is shared, and this config is for another script
        resolve_config(loaded, spec, look_up=False)
        print(f"ok  {shown(loaded.path)}")
    note = "" if load_schema(spec) else " (it declares no schema: the keys of its configs are not checked)"
    print(f"ok  {shown(spec.script_path)}: {spec.name}{note}")


@app.command(
    context_settings=CONTEXT_SETTINGS,
    options_metavar="PATH [-c CONFIG] [--run PROFILE | --batch PROFILE] [--dry-run] [key=value …]",
)
def run(ctx: typer.Context) -> None:
    """Run a script, here or where a profile of env.toml says.

    With the config that -c names, or its default one. --run PROFILE stays with the job, --batch PROFILE submits it and
    leaves.
    """
    raise typer.Exit(_execute(ctx))


def _execute(ctx: typer.Context) -> int:
    spec = parse(_take_path(ctx))
    cfg = job.parse_recipe_config(ctx)
    loaded = job.parse_config(cfg, spec)
    env = job.parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=loaded)
    job_config = job.build_job_config(loaded, spec, env, dry_run=cfg.dry_run, argv=cfg.argv)
    display_job(job_config, spec, env)
    # Here: a subprocess, torchrun if the script asks for it.
    if env.executor == "local":
        if cfg.dry_run:
            return 0
        job_dir = job.save_configs(job_config, spec)
        return execute_local(spec, job_dir, job.build_env_vars(job_config, env))
    # There: the code as it is, the configs and launch.sh travel. Ray's own client hands them to a Ray cluster ...
    with create_bundle(job_config, spec, env) as bundle:
        print(bundle.summary())
        if env.executor == "ray":
            return submit_to_ray(bundle, cfg)
        # ... and NeMo-Run to Slurm, here or over SSH.
        return submit_to_slurm(job_config.run.name, [bundle], cfg)


def _take_path(ctx: typer.Context) -> str:
    """Take the script's path, the one word that is no option, no option's value and no override, out of `ctx.args`."""
    for index, word in enumerate(ctx.args):
        is_value = index > 0 and ctx.args[index - 1] in VALUED
        if not word.startswith("-") and "=" not in word and not is_value:
            ctx.args.pop(index)
            return word
    raise UserError("which script? PATH is missing", f"as in {ctx.command_path} train.py")


def main() -> None:
    """Entry point of the `nemo-runspec` command."""
    sys.exit(run_main(lambda: run_app(app, "nemo-runspec", sys.argv[1:])))


def run_app(app: typer.Typer, name: str, words: list[str]) -> int:
    """Run the command line `words` of the program `name`, and return its exit code.

    Raises:
        UserError: what typer refuses.
        KeyboardInterrupt: Ctrl-C. typer would return 130 without a word, as it does for a script that has said it.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        with handling(() if ignored else (signal.SIGINT,), interrupt):
            code = app(words, prog_name=name, standalone_mode=False) or 0
        if interrupts and code == INTERRUPTED:
            raise KeyboardInterrupt
        return code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        message, context = error.format_message(), getattr(error, "ctx", None)
        if context is not None and message == context.get_help():  # a group without a sub-command
            typer.echo(message, err=True)
            return 2
        hint = f"see: {context.command_path} --help" if context is not None else None
        raise UserError(message, hint) from error
