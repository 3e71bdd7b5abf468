"""nemotron artifacts: look at what runs have published."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from nemo_runspec.artifacts import removal
from nemo_runspec.artifacts.listing import compare, describe, list_entries
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.naming import check_name
from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.errors import RunFailed, UserError, did_you_mean, report
from nemotron.cli.groups import QuickGroup

# Of a value that `show` prints, in characters: the samples of what curation dropped are many thousands.
LONGEST_TEXT = 1000
# Of one that `diff` prints beside another.
LONGEST_CELL = 100

artifacts = typer.Typer(
    cls=QuickGroup,
    help="Published artifacts: list, show, compare, add, watch for, trace back, verify, remove.",
    no_args_is_help=True,
)


@artifacts.command("list")
def list_artifacts(
    name: Annotated[str | None, typer.Argument(help="Only this artifact, with all its versions.")] = None,
    all_versions: Annotated[bool, typer.Option("--all", "-a", help="Every version, not only the latest.")] = False,
) -> None:
    """List what has been published.

    Shows reference, type, size, time, and the first digits of the payload digest.
    """
    from nemotron.kit.tables import aligned

    registry = Registry.default()
    entries = list_entries(registry, name, all_versions=all_versions)
    if not entries:
        typer.echo(f"no artifacts in {registry.root}; `nemotron nano3 pipe -c tiny` makes some")
        return
    rows = []
    for ref, version in entries.items():
        if isinstance(version, str):
            rows.append((ref, version, "", "", ""))
        else:
            kind, created = (str(version.record.get(key, "")) for key in ("type", "created_at"))
            rows.append((ref, kind, human_size(version.size_bytes), created[:19], version.digest[:12]))
    typer.echo("\n".join(aligned(rows, "<<><<")))


@artifacts.command("show")
def show(
    ref: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    as_json: Annotated[bool, typer.Option("--json", help="The record as it is stored.")] = False,
    config: Annotated[bool, typer.Option("--config", help="The config of the run that made it, nothing else.")] = False,
) -> None:
    """Show the record of an artifact.

    Fields, metrics, who made it from what, its files and their checksums.
    """
    version = Registry.default().resolve(ref)
    if config:
        from nemotron.kit.run import CONFIG_FILE

        text = version.run_file(CONFIG_FILE)
        if text is None:
            raise UserError(f"{version.ref} carries no config", "it was published outside a run")
        typer.echo(text, nl=False)
        return
    if as_json:
        typer.echo(json.dumps(version.record, indent=2))
        return
    rows = describe(version)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]}… ({len(text):,} characters, all of them with --json)"
        typer.echo(f"{label:<{width}}  {text}")


@artifacts.command("add")
def add(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A directory; of a model also hf://ORG/NAME[@REVISION] (extra hf).")
    ],
    kind: Annotated[str, typer.Option("--type", help="What it holds: model or dataset.")] = "model",
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the artifact (default: that of the directory).")
    ] = None,
) -> None:
    """Make an artifact of what lies in a directory.

    A model is one that transformers reads: config.json, safetensors (one file or an index and its shards),
    tokenizer.json. All of it is checked first; pickles are never opened. `run.model=NAME` then trains on from it, and
    `nemotron nano3 chat --model NAME` talks to it.

    \b
    Examples:
      nemotron artifacts add ./my-model
      nemotron artifacts add hf://someone/their-model --name theirs
      nemotron artifacts add my-folder --type dataset
    """
    if kind == "model":
        from nemotron.cli.tool import become_tool

        become_tool("add_model.py", place=place, name=name)
    if kind != "dataset":
        raise UserError(f"--type {kind}: unknown", did_you_mean(kind, ("model", "dataset")))
    from nemotron.kit.dataset_folder import add_dataset
    from nemotron.kit.model_folder import artifact_name

    typer.echo(add_dataset(place, name or artifact_name(place)).ref)


@artifacts.command("watch")
def watch(
    folder: Annotated[Path, typer.Argument(help="Where a run of Megatron saves: it holds iter_… folders.")],
    name: Annotated[str, typer.Option("--name", "-n", help="Name of the artifact; a version a checkpoint.")],
    every: Annotated[float, typer.Option(min=1, help="Seconds between looks.")] = 60,
    once: Annotated[bool, typer.Option("--once", help="Look once, and leave.")] = False,
) -> None:
    """Publish the checkpoints of a Megatron run as they come, beside it.

    Each is published with its iteration as soon as the run notes it in latest_checkpointed_iteration.txt, which
    Megatron-LM and Megatron-Bridge write behind a whole one. The run itself knows nothing of it: any run will do.
    Files are linked, not copied. Until Ctrl-C: what goes wrong is said, once, and looked at again.

    \b
    Examples:
      nemotron artifacts watch checkpoints --name my-pretraining
      nemotron artifacts watch checkpoints --name my-pretraining --once
    """
    from nemotron.kit.megatron import is_checkpoint, register_checkpoint

    check_name(name)  # the first checkpoint may be hours away
    if is_checkpoint(folder):
        raise UserError(f"{folder} is one checkpoint", f"give the folder that holds it: {folder.absolute().parent}")
    if not folder.is_dir():
        raise UserError(f"no directory {folder}", "give the folder that the run saves to: checkpoint.save, or --save")
    registry = Registry.default()
    said = ""
    while True:
        try:
            checkpoint = register_checkpoint(folder, name, registry)
        except (UserError, RunFailed, OSError) as error:  # a disk that is full or away may be back at the next look
            if once:
                raise
            if str(error) != said:
                report(error)
            said = str(error)
        else:
            said = ""
            if checkpoint is not None:
                typer.echo(f"{checkpoint.ref}: iteration {checkpoint.num_steps}")
            elif once:
                typer.echo(f"{folder}: no checkpoint that is new", err=True)
        if once:
            return
        time.sleep(every)


@artifacts.command("diff")
def diff(
    first: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    second: Annotated[str, typer.Argument(help="As the first.")],
) -> None:
    """Show what differs between two artifacts.

    Payload, config, metrics, inputs, code, environment and who made them, a line a key.
    """
    from nemo_runspec.config.yaml_text import read_yaml
    from nemotron.kit.tables import aligned

    registry = Registry.default()
    versions = registry.resolve(first), registry.resolve(second)
    differences = compare(*versions, lambda text: read_yaml(text, "config.yaml")[0])
    cells = [(key, _around_difference(one, other), _around_difference(other, one)) for key, one, other in differences]
    rows = [("", versions[0].ref, versions[1].ref), *cells]
    typer.echo("\n".join(aligned(rows, "<<<")) if len(rows) > 1 else f"{rows[0][1]} and {rows[0][2]}: no difference")


def _around_difference(text: str, other: str) -> str:
    """A text that fits into a column: of a longer one the part where it begins to differ from the other."""
    if len(text) <= LONGEST_CELL:
        return text
    same = next((i for i, pair in enumerate(zip(text, other, strict=False)) if len(set(pair)) == 2), len(other))
    begin = max(0, same - LONGEST_CELL // 4)
    end = begin + LONGEST_CELL
    return "…" * (begin > 0) + text[begin:end] + "…" * (end < len(text))


@artifacts.command("rm")
def rm(
    refs: Annotated[list[str], typer.Argument(help="NAME:VERSION, or NAME for all of its versions.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also what other versions were made from, or a run reads.")
    ] = False,
) -> None:
    """Remove versions.

    Refuses those that others were made from, or that a run under the output root reads that is at work or could go on,
    or a job that waits in Slurm's queue, submitted on this machine.
    The number of a removed version is never given again.
    """
    from nemo_runspec.execution.slurm.waiting import inputs_of_waiting_jobs
    from nemotron.kit.runs import inputs_in_use

    registry = Registry.default()
    chosen = removal.chosen(registry, refs)
    if (in_use := sorted(inputs_in_use() & set(chosen))) and not force:
        raise UserError(
            f"{in_use[0]} is read by a run that is at work, or that the same command would go on with",
            "`nemotron runs list` shows it; --force removes it",
        )
    waiting = inputs_of_waiting_jobs()
    if (pinned := sorted(waiting.keys() & set(chosen))) and not force:
        raise UserError(
            f"{pinned[0]} is going to be read by a job that has not started: {waiting[pinned[0]]}",
            "--force removes it; of a job that was cancelled, remove the folder",
        )
    users = removal.needed_by(registry, chosen)
    if users and not force:
        ref, needing = next(iter(users.items()))
        more = f"; {len(users) - 1} more are needed" if len(users) > 1 else ""
        raise UserError(
            f"{ref} is needed by {', '.join(needing)}{more}", "--force removes it; their lineage then ends there"
        )
    _remove(registry, chosen)
    for ref, needing in users.items():
        typer.echo(f"the lineage of {', '.join(needing)} ends at {ref}, which is removed", err=True)


@artifacts.command("gc")
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List them, remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the versions that nothing needs.

    Those that are not the latest of their name, that no latest one was made from, and that no run under the output root
    reads that is at work or could go on, and no job that was submitted to Slurm on this machine and has not started:
    one that was cancelled before that counts until its folder is removed. Lists them and asks first. Not seen are runs
    under another output root, and jobs that wait behind an SSH login or for a Ray cluster.
    """
    from nemo_runspec.execution.slurm.waiting import inputs_of_waiting_jobs
    from nemo_runspec.words import counted
    from nemotron.kit.runs import inputs_in_use

    registry = Registry.default()
    refs = removal.unneeded(registry, [*inputs_in_use(), *inputs_of_waiting_jobs()])
    if not refs:
        typer.echo("nothing to remove: every version is the latest of its name, or one, a run or a job needs it")
        return
    if dry_run or not yes:
        for ref in refs:
            typer.echo(f"{ref}  {human_size(removal.size_of(registry, ref))}")
        count = counted(len(refs), "version")
        total = human_size(sum(removal.size_of(registry, ref) for ref in refs))
        if dry_run:
            typer.echo(f"{count}, {total}")
            return
        if not sys.stdin.isatty():
            raise UserError("nothing was removed: nobody is there to ask", "--yes removes what is listed above")
        if not typer.confirm(f"remove {count}, {total}?"):
            return
        # Something may have been made of them meanwhile.
        now = removal.unneeded(registry, [*inputs_in_use(), *inputs_of_waiting_jobs()])
        refs = [ref for ref in refs if ref in now]
    _remove(registry, refs)


def _remove(registry: Registry, refs: list[str]) -> None:
    freed = 0
    for ref in refs:
        name, _, number = ref.partition(":")
        size, before = removal.size_of(registry, ref), registry.versions(name)
        if int(number) not in before:
            continue  # another command was quicker
        registry.remove(ref)
        freed += size
        left = registry.versions(name)
        note = f"; the latest is now {name}:{left[-1]}" if left and before[-1] == int(number) else ""
        typer.echo(f"removed {ref} ({human_size(size)}){note}")
    if len(refs) > 1:
        typer.echo(f"{human_size(freed)} freed")


@artifacts.command("lineage")
def lineage(
    ref: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    digits: Annotated[int, typer.Option(min=8, max=64, help="Digits of each digest.")] = 12,
) -> None:
    """Walk from an artifact back to its raw sources.

    Every part with its digest. Exits 1 when a part is missing or corrupt.
    """
    from nemo_runspec.words import counted
    from nemotron.kit.lineage import format_lineage, problems, raw_sources, walk

    node = walk(ref)
    for line in format_lineage(node, digits=digits):
        typer.echo(line)
    sources = raw_sources(node)
    typer.echo(counted(len(sources), "raw source"))
    if found := problems(node):
        for problem in found:
            typer.echo(f"broken: {problem}", err=True)
        raise typer.Exit(1)


@artifacts.command("verify")
def verify(
    refs: Annotated[list[str] | None, typer.Argument(help="Versions to check; without any, all there are.")] = None,
) -> None:
    """Read every byte and compare it with the manifest.

    Exits 1 when a file is not as it was published.
    """
    registry = Registry.default()
    chosen = refs or []
    for ref in chosen:  # all are there, before hours are spent on the first
        registry.check_known(ref)
    for name in () if refs else registry.names():
        try:
            chosen += [f"{name}:{version}" for version in registry.versions(name)]
        except UserError:  # its folder cannot be read, and is one problem
            chosen.append(name)
    if not chosen:
        typer.echo(f"no artifacts in {registry.root}")
        return
    damaged = 0
    for ref in chosen:
        try:
            problems = registry.verify(ref)
        except UserError as error:
            problems = [error.message]
        damaged += bool(problems)
        typer.echo(f"{ref}: {'ok' if not problems else 'corrupt'}")
        for problem in problems:
            typer.echo(f"  {problem}")
    if damaged:
        typer.echo(f"{damaged} of {len(chosen)} versions are corrupt", err=True)
        raise typer.Exit(1)
