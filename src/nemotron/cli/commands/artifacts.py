"""nemotron artifacts: look at what runs have published."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from nemo_runspec.artifacts.listing import describe, list_entries
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.errors import UserError, did_you_mean

artifacts = typer.Typer(help="Published artifacts: list, show, add, trace back, verify.", no_args_is_help=True)


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
) -> None:
    """Show the record of an artifact.

    Fields, metrics, who made it from what, its files and their checksums.
    """
    version = Registry.default().resolve(ref)
    if as_json:
        typer.echo(json.dumps(version.record, indent=2))
        return
    rows = describe(version)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        typer.echo(f"{label:<{width}}  {text}")


@artifacts.command("add")
def add(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="A directory; of a model also hf://ORG/NAME.")],
    kind: Annotated[str, typer.Option("--type", help="What it holds: model or dataset.")] = "model",
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the artifact (default: that of the directory).")
    ] = None,
) -> None:
    """Make an artifact of what lies in a directory.

    A model is checked first: config, every tensor, tokenizer. `run.model=NAME` then trains on from it.

    \b
    Examples:
      nemotron artifacts add ./my-model
      nemotron artifacts add hf://someone/their-model --name theirs
      nemotron artifacts add my-folder --type dataset
    """
    if kind == "model":
        from nemotron.cli.tool import become_tool

        become_tool("model_import.py", source=place, family=None, name=name, revision=None)
    if kind != "dataset":
        raise UserError(f"--type {kind}: unknown", did_you_mean(kind, ("model", "dataset")))
    from nemotron.kit.dataset_folder import add_dataset
    from nemotron.kit.model_folder import artifact_name

    typer.echo(add_dataset(place, name or artifact_name(place)).ref)


@artifacts.command("lineage")
def lineage(
    ref: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    digits: Annotated[int, typer.Option(min=8, max=64, help="Digits of each digest.")] = 12,
) -> None:
    """Walk from an artifact back to its raw sources.

    Every part with its digest. Exits 1 when a part is missing or corrupt.
    """
    from nemotron.kit.lineage import format_lineage, problems, raw_sources, walk

    node = walk(ref)
    for line in format_lineage(node, digits=digits):
        typer.echo(line)
    sources = raw_sources(node)
    typer.echo(f"{len(sources)} raw source{'' if len(sources) == 1 else 's'}")
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
    chosen = refs or [f"{name}:{version}" for name in registry.names() for version in registry.versions(name)]
    if not chosen:
        typer.echo(f"no artifacts in {registry.root}")
        return
    damaged = 0
    for ref in chosen:
        problems = registry.verify(ref)
        damaged += bool(problems)
        typer.echo(f"{ref}: {'ok' if not problems else 'corrupt'}")
        for problem in problems:
            typer.echo(f"  {problem}")
    if damaged:
        typer.echo(f"{damaged} of {len(chosen)} versions are corrupt", err=True)
        raise typer.Exit(1)
