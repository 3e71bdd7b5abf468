"""One number for an idea about training, for `nemotron bench research`: bits per byte after five minutes of one core.

An entry, a Python file with a function `train`, gets the training text and makes a tokenizer and a model of it. It runs
in a process of its own (`bench_research_entry.py`), of which this one reads the processor time and the model that it
wrote; the held-out text is scored here. The text is the code of the standard library, and held out of it are the
modules that the recipes hold out (`data_prep/sources/stdlib.py`).

Bits per byte are those of all tokens of the held-out documents and of the end of each, over the bytes of the documents:
any tokenizer will do that gives every byte back.

The leaderboard has a line for each entry, each better than the line before. The first is the baseline over ten seeds or
more; their standard deviation is the noise floor, with which every comparison is made.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import ast
import csv
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.execution.local import die_with_parent
from nemotron.data_prep.sources import stdlib
from nemotron.kit.environment import describe_environment
from nemotron.recipes.tools import bench_research_entry
from nemotron.recipes.tools.bench_research_entry import DOCUMENTS, FACTS, MODEL
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.language_model import model_bits_per_byte, token_byte_lengths
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH

BUDGET = 300.0  # seconds, of the leaderboard
LEADERBOARD = "leaderboard.csv"  # beside its entries
MIN_SEEDS, BASELINE_SEEDS = 3, 10  # of a line of it, and of its first
# Standard errors. A gain of 2 comes by chance once in 44 tries. A check looks at all lines, so that 2 would often fail.
NEEDED, ALLOWED = 2.0, 3.0
END = "</s>"  # stands behind every document
MAX_SEQ_LEN = 4096  # a window: attention over more would take the memory of a small machine


@dataclass(frozen=True)
class Options:
    """Of `nemotron bench research`. `record`: what the entry changes, for its line of the leaderboard."""

    entry: str
    seed: int
    seeds: int
    budget: float
    record: str | None
    check: bool


@dataclass(frozen=True)
class Text:
    """Documents to train on and to be scored on, and the digest of all of them."""

    train: list[str]
    held_out: list[str]
    digest: str


@dataclass(frozen=True)
class Row:
    """A line of the leaderboard. bits_per_byte, sd: of the scores; tokens: read in training, the mean of the runs."""

    entry: str
    changed: str
    bits_per_byte: float
    sd: float
    scores: list[float]
    seeds: list[int]
    tokens: int
    sha256: str
    text: str
    processor: str
    python: str
    torch: str


# ------------------------------------------------------------------------------------------------------ a run


def read_text() -> Text:
    """The code of the standard library of this interpreter, in documents of about 8,000 characters."""
    files = stdlib.module_files()
    texts: dict[str, list[str]] = {"train": [], "valid": []}
    for document in stdlib.code_documents(files):
        texts[document["split"]].append(document["text"])
    return Text(texts["train"], texts["valid"], stdlib.digest(files)[:16])


def check_entry(entry: Path) -> str:
    """The digest of an entry's file. UserError: it is none."""
    if not entry.is_file():
        raise UserError(f"no entry {entry}", "those of the leaderboard are in examples/research of the repository")
    content = entry.read_bytes()
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{entry} is not Python: {error}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "train" for node in tree.body):
        raise UserError(f"{entry} has no function train(task)", "examples/research/program.md says what an entry is")
    return hashlib.sha256(content).hexdigest()


def run_entry(entry: Path, seed: int, budget: float, text: Text) -> dict[str, Any]:
    """Train an entry in its own process, and score what it wrote.

    RunFailed: it failed, took more than its budget, or its model cannot be scored.
    """
    digest = check_entry(entry)
    with tempfile.TemporaryDirectory(prefix="bench-research-") as name:
        folder = Path(name)
        (folder / DOCUMENTS).write_text(json.dumps(text.train), "utf-8")
        seconds = _train(entry, seed, budget, folder)
        if seconds > budget:
            raise RunFailed(f"{entry} took {seconds:.1f} s of processor time, allowed are {budget:g}")
        try:
            facts = json.loads((folder / FACTS).read_text("utf-8"))
            model, tokenizer = NemotronH.from_pretrained(folder / MODEL), load_tokenizer(folder / MODEL)
            score = bits_per_byte(model, tokenizer, facts["seq_len"], text.held_out)
        except (UserError, OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise RunFailed(f"{entry}: what it wrote cannot be scored: {error}") from error
    total, active = model.num_parameters()
    return {
        **facts, "bits_per_byte": round(score, 5), "seconds": round(seconds, 1), "seed": seed, "budget": budget,
        "parameters": total, "active_parameters": active, "entry": str(entry), "sha256": digest,
    } | machine(text)  # fmt: skip


def _train(entry: Path, seed: int, budget: float, folder: Path) -> float:
    """Run the entry's process to its end; the processor time of it, and of the processes that it waited for."""

    def limit() -> None:
        die_with_parent()
        most = math.ceil(1.2 * budget) + 10  # counted in ticks, coarser than what is reported: only ends what goes on
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))

    # More threads would only use the budget up, and a GPU would not: its time is no processor's.
    settings = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = bench_research_entry.__file__
    process = subprocess.Popen(
        [sys.executable, script, str(entry.absolute()), str(folder), str(seed), str(budget)],
        env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=limit,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    if process.returncode and seconds <= budget:
        raise RunFailed(f"{entry} failed after {seconds:.1f} s (exit code {process.returncode})", "see above")
    return seconds


def bits_per_byte(model: NemotronH, tokenizer: Tokenizer, seq_len: int, documents: Sequence[str]) -> float:
    """Bits for each byte of the documents, in windows of `seq_len` tokens.

    ValueError: the tokenizer loses something or has tokens that the model has not, or the score is no number.
    """
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise ValueError(f"its tokenizer has {tokenizer.get_vocab_size()} tokens, its model {model.config.vocab_size}")
    end = tokenizer.token_to_id(END)
    if end is None or not 1 < seq_len <= MAX_SEQ_LEN:
        raise ValueError(f"a token {END} and windows of 2 to {MAX_SEQ_LEN} tokens expected, found {end} and {seq_len}")
    stream, lengths = [end], token_byte_lengths(tokenizer)
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != document:
            raise ValueError("its tokenizer does not give the text back")
        if int(lengths[ids].sum()) != len(document.encode()):
            raise ValueError("its tokenizer is not byte-level: the lengths of tokens are not those of the text")
        stream += [*ids, end]
    score = model_bits_per_byte(
        model, np.array(stream), lengths, seq_len=seq_len, batch_size=max(1, 4096 // seq_len), label="score"
    )
    if not math.isfinite(score):
        raise ValueError(f"its score is {score}")
    return score


def machine(text: Text) -> dict[str, str]:
    """What a score depends on besides its entry and seed.

    Virtual machines call processors of several generations by one name, so PyTorch's instruction set stands beside it:
    the baseline reads 3.4 million tokens on an "AMD EPYC" with AVX-512, and 1.2 million on one with AVX2.
    """
    here = describe_environment()
    return {
        "text": text.digest, "processor": f"{here['cpu']} ({here['torch']['instructions']})",
        "python": here["python"], "torch": here["torch"]["version"],
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- leaderboard


def row_of(runs: Sequence[dict[str, Any]], changed: str) -> Row:
    """The line of an entry, from its runs."""
    first, scores = runs[0], [run["bits_per_byte"] for run in runs]
    return Row(
        entry=Path(first["entry"]).name,
        changed=changed,
        bits_per_byte=round(statistics.fmean(scores), 5),
        sd=round(statistics.stdev(scores), 5) if len(scores) > 1 else 0.0,
        scores=scores,
        seeds=[run["seed"] for run in runs],
        tokens=round(statistics.fmean(run["tokens"] for run in runs)),
        **{name: first[name] for name in ("sha256", "text", "processor", "python", "torch")},
    )


def read_leaderboard(folder: Path) -> list[Row]:
    """Its lines. UserError: there is none, or it cannot be read."""
    path = folder / LEADERBOARD
    if not path.is_file():
        raise UserError(f"no leaderboard {path}", "it is in examples/research of the repository: run this in a clone")
    with path.open(encoding="utf-8", newline="") as file:
        lines: list[dict[str, Any]] = list(csv.DictReader(file))
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            line |= {name: float(line[name]) for name in ("bits_per_byte", "sd")} | {"tokens": int(line["tokens"])}
            line |= {"scores": [float(score) for score in line["scores"].split()]}
            rows.append(Row(**line | {"seeds": [int(seed) for seed in line["seeds"].split()]}))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}: not a line of a leaderboard: {error}") from None
    return rows


def write_row(row: Row, folder: Path) -> None:
    """Add a line to the leaderboard; its head, too, where it is new."""
    path = folder / LEADERBOARD
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        lists = {name: " ".join(map(str, getattr(row, name))) for name in ("scores", "seeds")}
        writer.writerow(asdict(row) | lists)


def standard_error(rows: Sequence[Row], first: int, second: int) -> float:
    """Of the difference between a mean of `first` scores and one of `second`, given the noise floor."""
    return rows[0].sd * math.sqrt(1 / first + 1 / second)


def same_machine(row: Row, here: dict[str, Any]) -> bool:
    """Whether a line's scores are of the same text, kind of processor and PyTorch: others do not compare."""
    return all(getattr(row, name) == here[name] for name in ("text", "processor", "torch"))


def judge(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Whether an entry is better than the best line by more than noise; nothing, where the two do not compare."""
    best = min(rows, key=lambda each: each.bits_per_byte)
    if not same_machine(best, asdict(row)):
        return {}
    gain = best.bits_per_byte - row.bits_per_byte
    needed = NEEDED * standard_error(rows, len(row.scores), len(best.scores))
    improves = gain > needed and len(row.scores) >= MIN_SEEDS
    return {"record": best.bits_per_byte, "gain": round(gain, 5), "needed": round(needed, 5), "improves": improves}


def check(folder: Path, num_seeds: int) -> dict[str, Any]:
    """Run the entries of a leaderboard again, each with the first of its seeds.

    Where text, processor and PyTorch are those of a line, its scores have to come again, within noise. Elsewhere no
    line may be worse than the one before it by more than noise, and of the first nothing is asked. A line whose entry
    fails is not confirmed, and the others are run.
    """
    rows, lines, before = read_leaderboard(folder), list[dict[str, Any]](), math.inf
    for row in rows:
        if check_entry(folder / row.entry) != row.sha256:
            raise UserError(f"{folder / row.entry} is not the file that was scored: its sha256 is another")
    text = read_text()
    for row in rows:
        line: dict[str, Any] = {"entry": row.entry, "recorded": row.bits_per_byte}
        try:
            runs = [run_entry(folder / row.entry, seed, BUDGET, text) for seed in row.seeds[:num_seeds]]
        except RunFailed as error:  # on a machine that it is not made for, for example
            print(f"{error}: NOT CONFIRMED", file=sys.stderr)
            lines.append(line | {"failed": str(error), "confirmed": False})
            continue
        mean = statistics.fmean(run["bits_per_byte"] for run in runs)
        same = same_machine(row, machine(text))
        allowed = ALLOWED * standard_error(rows, len(runs), len(row.scores) if same else len(runs))
        confirmed = abs(mean - row.bits_per_byte) <= allowed if same else mean <= before + allowed
        limit = f", {allowed:.4f} above the line before at most" if math.isfinite(before) else ""
        wanted = f"within {allowed:.4f}" if same else f"another machine{limit}"
        verdict = "confirmed" if confirmed else "NOT CONFIRMED"
        print(f"{row.entry}: {mean:.4f}, recorded {row.bits_per_byte:.4f} ({wanted}): {verdict}", file=sys.stderr)
        lines.append(line | {"bits_per_byte": round(mean, 5), "allowed": round(allowed, 5), "confirmed": confirmed})
        before = mean
    return {"confirmed": all(line["confirmed"] for line in lines), "lines": lines} | machine(text)


def main(options: Options) -> None:
    """Run an entry, or all of the leaderboard. The last line on stdout is JSON."""
    entry, folder = Path(options.entry), Path(options.entry).parent
    if options.check:
        if (options.seed, options.budget, options.record) != (1, BUDGET, None):
            raise UserError("--check runs each line as it was recorded: of the other options it takes --seeds alone")
        found = check(folder, options.seeds)
        print(json.dumps(found))
        if not found["confirmed"]:
            raise RunFailed(f"{folder / LEADERBOARD}: not every line is confirmed")
        return
    check_entry(entry)
    rows = read_leaderboard(folder) if (folder / LEADERBOARD).exists() else []
    least = MIN_SEEDS if rows else BASELINE_SEEDS
    if options.record is not None and (options.budget != BUDGET or options.seeds < least):
        raise UserError(f"a line of the leaderboard is of {BUDGET:g} s and at least {least} seeds")
    runs, text = [], read_text()
    if options.record is not None and rows and not same_machine(rows[-1], machine(text)):
        raise UserError(
            f"{folder / LEADERBOARD} is of {rows[-1].processor}, torch {rows[-1].torch} and text {rows[-1].text}: "
            "scores from here do not compare",
            "record a baseline of your own: copy the folder without its leaderboard",
        )
    for seed in range(options.seed, options.seed + options.seeds):
        runs.append(run_entry(entry, seed, options.budget, text))
        if options.seeds > 1:
            print(json.dumps(runs[-1]), flush=True)
    row = row_of(runs, options.record or "")
    verdict = judge(row, rows) if rows and options.budget == BUDGET else {}
    print(json.dumps((runs[0] if options.seeds == 1 else asdict(row)) | verdict))
    if options.record is not None:
        if rows and not verdict["improves"]:
            raise RunFailed(
                f"no improvement: a gain of {verdict['gain']} bits per byte, needed are {verdict['needed']}"
            )
        write_row(row, folder)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
