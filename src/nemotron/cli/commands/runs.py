"""nemotron runs: look at runs, at work or not, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_runspec.errors import UserError
from nemotron.cli.groups import QuickGroup
from nemotron.cli.tool import become_tool

runs = typer.Typer(cls=QuickGroup, help="Runs, at work or not: list, show, plot, watch, remove.", no_args_is_help=True)

_RUN = "A folder, the end of a name that `runs list` shows, the first 4 characters of a fingerprint, or nano3/sft."


@runs.command("list")
def list_runs(
    word: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only runs whose name has this in it.")] = None,
) -> None:
    """List the runs, the newest last.

    Shows name, state, step, the newest loss or reward, and when it was logged.
    """
    from nemo_runspec.env.roots import output_root
    from nemotron.kit.runs import headline, recorded_runs, time_since
    from nemotron.kit.tables import aligned

    rows = []
    for run in recorded_runs():
        if word and word not in run.name:
            continue
        last = run.last_metrics()
        metric = headline(last)
        value = f"{metric} {last[metric]:.4g}" if metric else ""
        step = f"{last['step']:.0f}" if last else ""
        if step and "last_step" in run.state:
            step += f"/{run.state['last_step']}"
        started = run.state.get("started_at")
        moment = last.get("time", started)
        rows.append((run.name, run.condition, step, value, time_since(moment) if moment else ""))
    if not rows:
        what = f"no run with {word!r} in its name" if word else "no runs"
        typer.echo(f"{what} in {output_root()}; `nemotron nano3 pipe -c tiny` makes some")
        return
    typer.echo("\n".join(aligned(rows, "<<><>")))


@runs.command("show")
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help=_RUN)],
    config: Annotated[bool, typer.Option("--config", help="The resolved config instead.")] = False,
) -> None:
    """Show one run.

    State, step, the newest value of every metric, inputs, what it published, time, checkpoints, size.
    """
    from nemo_runspec.artifacts.manifest import human_size
    from nemotron.kit.metrics import format_seconds, numbers_in
    from nemotron.kit.run import CONFIG_FILE
    from nemotron.kit.runs import find_run, size_of, time_since

    shown = find_run(run, logged=not config)
    if config:
        path = shown.directory / CONFIG_FILE
        try:
            typer.echo(path.read_text(encoding="utf-8"), nl=False)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        return
    state, values = shown.state, dict[str, float]()
    for line in shown.metrics():
        values |= numbers_in(line)
    condition, attempts = shown.condition, int(state.get("attempts", 1))
    if condition in ("failed", "stopped") and state.get("why"):
        condition += f": {state['why'].removeprefix('stopped ')}"
    if attempts > 1:
        condition += f" (attempt {attempts})"
    rows = [("run", shown.name), ("folder", str(shown.directory)), ("state", condition)]
    rows.append(("fingerprint", str(state.get("fingerprint", "unknown"))))
    if started := state.get("started_at"):
        rows.append(("started", time_since(started)))
    if "step" in values:
        step = f"{values.pop('step'):.0f}" + (f" of {state['last_step']}" if "last_step" in state else "")
        rows.append(("step", f"{step}, logged {time_since(values.pop('time'))}"))
    rows += [("reads", f"{role} = {pinned.partition('@')[0]}") for role, pinned in state.get("inputs", {}).items()]
    rows += [("published", version) for version in shown.published()]
    rows += [("phase", f"{name} {format_seconds(seconds)}") for name, seconds in shown.seconds_by_phase().items()]
    rows += [("checkpoint", path.name) for path in sorted(shown.directory.glob("checkpoints/step-*"))]
    rows.append(("size", human_size(size_of(shown.directory))))
    rows += [("metric", f"{name} {value:.6g}") for name, value in values.items()]
    label = ""
    for name, text in rows:
        typer.echo(f"{name if name != label else '':<11}  {text}")
        label = name


@runs.command("plot")
def plot(
    names: Annotated[list[str], typer.Argument(metavar="RUN…", help=_RUN)],
    metric: Annotated[
        str | None, typer.Option("--metric", "-m", help="What to plot (default: the loss, else the reward).")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with all metrics to this file.")] = None,
) -> None:
    """Plot what runs logged.

    One metric in the terminal, or with --html all of them as a page.

    \b
    Examples:
      nemotron runs plot nano3/pretrain
      nemotron runs plot nano3/pretrain nano3/sft --metric lr
      nemotron runs plot nano3/sft --html sft.html
    """
    from nemotron.kit.runs import find_run

    chosen = [find_run(name, logged=True) for name in names]
    runs_to_plot = {run.name: str(run.directory) for run in chosen}
    become_tool("runs_plot.py", runs=runs_to_plot, metric=metric, html=html)


@runs.command("watch")
def watch(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=_RUN)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On this machine alone; 0: any that is free.")] = 8090,
) -> None:
    """Watch a run in the browser.

    A page that follows what the run records: progress, time left, curves, the end of its log. Without RUN the run at
    work, and the next one when it has ended. Ctrl-C ends it, and not the run.

    \b
    Examples:
      nemotron runs watch
      nemotron runs watch nano3/pretrain --port 8091
    """
    from nemotron.kit.runs import find_run

    become_tool("runs_watch.py", run=str(find_run(run).directory) if run else None, port=port)


@runs.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="RUN…", help=_RUN)],
    force: Annotated[bool, typer.Option("--force", help="Also runs that have not finished.")] = False,
) -> None:
    """Remove runs: logs, checkpoints, records.

    What they published stays. A run at work is not removed, and one that could go on only with --force.
    """
    from nemo_runspec.artifacts.manifest import human_size
    from nemotron.kit.runs import find_run, remove_run, size_of

    chosen = list({run.directory: run for run in map(find_run, names)}.values())
    for run in chosen:
        if run.condition == "running":
            raise UserError(f"{run.name}: a process is at work there", "stop it first")
        if run.condition != "finished" and not force:
            raise UserError(
                f"{run.name}: {run.condition}, and the same command would go on there", "--force removes it"
            )
    for run in chosen:
        size, versions = size_of(run.directory), run.published()
        try:
            remove_run(run.directory)
        except OSError as error:
            raise UserError(f"cannot remove {error.filename}: {error.strerror}") from None
        kept = f"; stays: {', '.join(versions)}" if versions else ""
        typer.echo(f"removed {run.name}, {human_size(size)} freed{kept}")
