"""What is in a file, folder or artifact of data, for `nemotron data inspect`, which starts this script.

It is named by a bin/idx prefix, a folder or a file of token streams, packed rows, documents or conversations, a glob,
an address (hf://, s3://, gs://, https://), the folder of a run that is not finished, or an artifact's name. Of large
data a sample is read. This is a tool and no step of a recipe: it publishes nothing and carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.registry import Version
from nemo_runspec.errors import UserError
from nemotron.kit.tables import aligned
from nemotron.recipes.tools.data_names import find
from nemotron.recipes.tools.inspection import Lengths, Report, Table, inspect, outcome, shown
from nemotron.recipes.tools.options import run_tool

BAR = 40  # columns of the longest bar
CELL = 60  # characters of a cell at most


@dataclass(frozen=True)
class Options:
    """Of `nemotron data inspect`."""

    path: str | None
    samples: int
    as_json: bool


def add_record(report: Report, version: Version) -> None:
    """Add what an artifact's record says and its payload does not."""
    metrics = version.record.get("metrics") or {}
    report.counts = {"artifact": version.ref, "type": str(version.record["type"]), **report.counts}
    if isinstance(metrics.get("table"), dict):
        report.tables["outcome"] = outcome([metrics["table"]])


def page(report: Report) -> str:
    """A report as lines."""
    counts = [(name, _count(name, value)) for name, value in report.counts.items()]
    blocks = [[f"{report.path}: {report.kind}", *_aligned(counts)]]
    if report.notes:
        blocks.append([shown(note) for note in report.notes])
    blocks += [[title, *_table(rows)] for title, rows in report.tables.items() if rows]
    if report.fields:
        blocks.append([f"fields ({report.read})", *_table(report.fields)])
    if report.lengths:
        blocks.append([f"{_heading(report.lengths)} ({report.read})", *_histogram(report.lengths)])
    for sample in report.samples:
        where = sample["where"].removeprefix(str(Path(report.path).absolute()) + "/").removeprefix(report.path + "/")
        blocks.append([shown(where), f"  {sample['text']}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def _heading(lengths: Lengths) -> str:
    return (
        f"length of {lengths.count:,} {lengths.of} in {lengths.unit}: {lengths.least:,} to {lengths.most:,}, "
        f"median {lengths.median:,}, mean {lengths.mean:,.0f}"
    )


def _histogram(lengths: Lengths) -> list[str]:
    """A line a bin: from which length on, a bar, how many."""
    most = max(count for _, _, count in lengths.bins)
    width = len(f"{lengths.bins[-1][0]:,}")
    return [f"  {low:>{width},}  {'█' * -(-BAR * count // most):<{BAR}}  {count:,}" for low, _, count in lengths.bins]


def _table(rows: Table) -> list[str]:
    """Rows as lines under their column names; a column that one row has, all have."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [tuple(columns), *(tuple(_cell(name, row.get(name)) for name in columns) for row in rows)]
    numeric = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    return [f"  {line}" for line in aligned(cells, "".join("<>"[right] for right in numeric))]


_SHARES = ("requested", "realised", "weight", "until", "in", "share_in_loss", "filled")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2%}" if name in _SHARES else f"{value:,.2f}"
    text = f"{value:,}" if isinstance(value, int) else shown(str(value))
    return text if len(text) <= CELL else text[: CELL - 2] + " …"


def _count(name: str, value: Any) -> str:
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value:,} ({human_size(value)})"
    return _cell(name, value)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {line}" for line in aligned([(name.replace("_", " "), text) for name, text in rows], "<<")]


def main(options: Options) -> None:
    """Look, print."""
    if options.path is None:
        raise UserError("inspect what? give a file, a folder, a bin/idx prefix, an address, or an artifact")
    location, version = find(options.path)
    if version is not None:
        for kind, called in (("Checkpoint", "a model"), ("Results", "results")):
            if kind in version.record["types"]:
                raise UserError(f"{version.ref} is {called}, not data", f"nemotron artifacts show {version.ref}")
        location = str(version.path)
    tokenizer_path = version.record["fields"].get("tokenizer_path") if version else None
    report = inspect(location, options.samples, Path(tokenizer_path) if tokenizer_path else None)
    if version is not None:
        add_record(report, version)
    print(json.dumps(asdict(report), indent=2) if options.as_json else page(report))


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
