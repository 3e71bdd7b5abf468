"""`nemotron data curate`: the plan of all steps, one step, what is refused, and the table at the end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_runspec.pipeline import Step, StepResult
from nemotron.cli.commands.data import curate

Nemotron = Callable[..., subprocess.CompletedProcess[str]]


def test_a_dry_run_plans_all_steps_in_the_published_order(here: Nemotron) -> None:
    done = here("data curate -c tiny --dry-run")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[\d+/\d+\] (\w+)", done.stdout, re.MULTILINE) == list(curate.STEPS)[:-1]
    assert done.stdout.splitlines()[-1].startswith("left out: rephrase")  # it needs an endpoint
    # Each step reads what the one before it writes, and nothing of it exists yet.
    written = re.findall(r"writes +(\S+)", done.stdout)
    read = re.findall(r"reads +data = (\S+):latest \(resolved at start\)", done.stdout)
    assert read == written[:-1]
    assert written[0] == "nemotron_cc-crawl-data-tiny"
    assert written[-1] == "nemotron_cc-data-tiny"
    done = here("data curate -c tiny --dry-run rephrase:endpoint.base_url=http://localhost:8000/v1")
    assert re.findall(r"^\[\d+/\d+\] (\w+)", done.stdout, re.MULTILINE) == list(curate.STEPS)
    assert "left out" not in done.stdout


def test_own_pages_need_no_demo_crawl(here: Nemotron, tmp_path: Path) -> None:
    pages = tmp_path / "a.warc.gz"
    pages.touch()
    files = [f"quality:training.{which}=[{pages}]" for which in ("positive", "negative")]
    files += [f"extract:warc=[{pages}]", f"decontaminate:evaluation=[{pages}]"]
    done = here("data curate --dry-run", *files)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^\[\d+/\d+\] (\w+)", done.stdout, re.MULTILINE)
    assert steps == list(curate.STEPS)[1:]


def test_a_part_of_the_steps(here: Nemotron) -> None:
    done = here("data curate -c tiny --dry-run --to language")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[\d+/\d+\] (\w+)", done.stdout, re.MULTILINE) == ["crawl", "extract", "language"]
    assert "rephrase" not in done.stdout


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("data curate -c tiny keep=[en]", "keep=[en]: of which step?", "write STEP:keep=[en]"),
        ("data curate -c tiny langage:threshold=0.5", "unknown step 'langage'", "did you mean language?"),
        ("data curate -c tiny --from qualty", "unknown step 'qualty'", "did you mean quality?"),
        ("data curate -c tiny language:treshold=0.5", "unknown key treshold", "did you mean threshold?"),
        ("data curate extract", "warc.0: no file matches crawl/*.warc.gz", "name yours: 'warc=[…]'"),
        (
            "data curate",
            "warc.0: no file matches crawl/*.warc.gz",
            "of all steps 'extract:warc=[…]'; the demo: -c tiny",
        ),
        (
            "data curate extract -c tiny",
            "no artifact 'nemotron_cc-crawl-data-tiny'",
            "nemotron data curate crawl -c tiny",
        ),
        (
            "data curate language -c tiny",
            "no artifact 'nemotron_cc-extract-data-tiny'",
            "nemotron data curate extract -c tiny",
        ),
        ("data curate -c tiny --from=", "option --from needs a value", "as in --from quality"),
        ("data curate -c tiny --from language --from quality", "option --from is given twice", ""),
        ("data curate -c tiny --to quallity", "unknown step 'quallity'", "did you mean quality?"),
        (
            "data curate -c tiny --to language quality:threshold=0.5",
            "quality:threshold=0.5: --from and --to leave out the step quality",
            "the steps that run: ",
        ),
        (
            "data curate -c tiny --from quality --to extract",
            "--to extract comes before --from quality",
            "the order is ",
        ),
    ],
)
def test_what_is_refused_and_how(refused: Callable[[str], str], line: str, error: str, hint: str) -> None:
    said = refused(line)
    assert error in said
    assert hint in said
    assert len(said.strip().split("\n")) <= 2


def result(name: str, table: dict[str, Any] | None, status: Any = "done") -> StepResult:
    record = {"metrics": {} if table is None else {"table": table}, "fields": {"num_examples": 1830}}
    step = Step(name, Path(), Path())
    return StepResult(step, status, 0, 1.0, Path(), {name: SimpleNamespace(record=record)})  # type: ignore[dict-item]


def tally(documents: int) -> dict[str, int]:
    return {"documents": documents, "bytes": documents * 1000}


def test_the_table_names_the_most_frequent_reasons() -> None:
    from rich.console import Console

    dropped = {
        "language de": tally(55),
        "language ru": tally(57),
        "too short": tally(3),
        "unsure": tally(4),
        "la": tally(1),
    }
    counts = {"read": tally(1000), "kept": tally(880), "dropped": dropped, "noted": {}, "samples": {}}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(curate._table([result("crawl", None), result("language", counts)]))
    text = console.export_text()
    assert "1,830" in text
    assert re.search(
        r"language .* 1,000 .* 880 .* 0\.88 .*language ru: 57, language de: 55, unsure: 4, other reasons: 4", text
    )


@pytest.mark.parametrize(
    ("code", "said"), [(130, "interrupted"), (143, "stopped by a signal"), (1, "failed with exit code 1")]
)
def test_the_table_says_how_a_step_ended(code: int, said: str) -> None:
    from rich.console import Console

    step = StepResult(Step("language", Path(), Path()), "failed", code, 1.0, Path())
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(curate._table([result("crawl", None), step]))
    assert re.search(rf"language .* {said} ", console.export_text())
