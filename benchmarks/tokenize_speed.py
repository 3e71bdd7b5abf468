#!/usr/bin/env python
"""Tokenising beside the tokenizer alone: MB/s and ratio, memory, start-up.

    python benchmarks/tokenize_speed.py                        # 50 MB
    python benchmarks/tokenize_speed.py --mb 10 50 100 1000
    python benchmarks/tokenize_speed.py --tokenizer FOLDER     # with tokenizer.json, in place of one trained here

Text: documents of lognormal length (median 2 kB), put together from runs of lines of this Python's standard library, as
JSON Lines. Tokenizer: byte-level BPE of up to 131,072 tokens, trained on part of the same text.

Every round times, one after the other in this process: `plain`, the texts in memory through
`Tokenizer.encode_batch_fast` in batches of 256 on N threads, the ids thrown away; `pipeline`, the same documents from
the JSON Lines file to .bin/.idx with receipts (reading the tokenizer, listing, plan, N processes and their start
included). The ratio is that of the round; its median is printed, and that of the processor seconds, which other work on
the machine disturbs less. And `command`: the recipe's script as a user starts it, up to the published artifact, with
the most memory that all its processes held together (PSS, sampled); and start-up, which is that command for one short
document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from process import Clock
from text import encode_alone, library_lines

ROUNDS = 5
VOCAB_SIZE = 131_072
SAMPLE_BYTES = 20_000_000  # that the tokenizer is trained on
SCRIPT = Path(__file__).resolve().parents[1] / "src/nemotron/recipes/data/tokenize/tokenize_documents.py"


def documents(num_bytes: int) -> Iterator[str]:
    """Documents of about `num_bytes` together, the same every time."""
    rng = random.Random(0)
    lines = library_lines()
    while num_bytes > 0:
        wanted = min(rng.lognormvariate(7.6, 1.1), 200_000)
        parts: list[str] = []
        while wanted > 0:
            begin = rng.randrange(len(lines))
            parts += lines[begin : begin + 40]
            wanted -= sum(len(line) for line in lines[begin : begin + 40])
        text = "".join(parts)
        num_bytes -= len(text.encode())
        yield text


def pipeline(tokenizer_json: str, file: Path, processes: int) -> tuple[float, float]:
    """Seconds from a file's name to all receipts, as of `Clock`."""
    from nemotron.data_prep.sources.locations import list_files
    from nemotron.data_prep.sources.planning import SourceInput, make_plan
    from nemotron.data_prep.sources.reading import Reading
    from nemotron.data_prep.tokens.encoding import plain_tokenizer
    from nemotron.data_prep.tokens.tokenization import SourceRules, TokenizeCounts, TokenizeJob, tokenize_shard
    from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
    from nemotron.data_prep.work.shards import freeze, run_shards

    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        plain_tokenizer.cache_clear()
        clock = Clock()
        plain_tokenizer(tokenizer_json)
        with PoolEngine(processes) if processes > 1 else SerialEngine() as engine:
            plan = make_plan({}, [SourceInput("text", list_files([str(file)]))], shard_bytes=64 * 2**20)
            freeze(plan, Path(folder))
            job = TokenizeJob(tokenizer_json, None, 2, "int32", 0, {"text": SourceRules(Reading(), 0.01)})
            receipts = list(run_shards(plan, Path(folder), tokenize_shard, job, engine, TokenizeCounts))
        seconds = clock.read()
    assert sum(receipt.counts.splits["train"].documents for receipt, _ in receipts)
    return seconds


def command(file: Path, tokenizer: Path) -> tuple[float, float]:
    """(seconds, peak MB of all processes) of the script on a file."""
    with tempfile.TemporaryDirectory(dir=file.parent) as cwd:
        words = ["--config", "own", f"sources=[{file}]", f"tokenizer={tokenizer}"]
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *words], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        peak = [0.0]
        watcher = threading.Thread(target=watch, args=(child.pid, peak), daemon=True)
        watcher.start()
        _, stderr = child.communicate()
        seconds = time.perf_counter() - start
        if child.returncode:
            sys.exit(stderr)
        return seconds, peak[0]


def watch(pid: int, peak: list[float]) -> None:
    """Sample the memory of a process and of its children until it ends."""
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            total = sum(pss(each) for each in [str(pid), *children])
        except OSError:
            return
        peak[0] = max(peak[0], total / 1e3)
        time.sleep(0.1)


def pss(pid: str) -> int:
    """kB of a process, pages that it shares divided among those who do; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def main() -> None:
    """Print a block a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[50], help="megabytes (10^6 bytes) of text")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="0: the command alone")
    parser.add_argument("--threads", type=int, default=min(len(os.sched_getaffinity(0)), 16))
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(arguments.threads), "true"
    import tokenizers

    from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_dir = arguments.tokenizer and arguments.tokenizer.absolute()
        if tokenizer_dir is None:
            tokenizer_dir = folder / "tokenizer"
            trained = train_tokenizer(documents(SAMPLE_BYTES), VOCAB_SIZE)
            save_tokenizer(trained, tokenizer_dir, model_max_length=8192, template="nano3")
        tokenizer_json = (tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8")
        vocabulary = tokenizers.Tokenizer.from_str(tokenizer_json).get_vocab_size()
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads or processes; Python "
            f"{platform.python_version()}, tokenizers {tokenizers.__version__}, {vocabulary:,} tokens; "
            f"{arguments.rounds} rounds"
        )
        small = folder / "small.jsonl"
        small.write_text(json.dumps({"text": "One short document."}) + "\n")
        starts = [command(small, tokenizer_dir)[0] for _ in range(3)]
        print(f"start-up: {min(starts):.2f} s for one short document, from the command to the artifact; best of 3")
        for megabytes in arguments.mb:
            texts = list(documents(megabytes * 10**6))
            size = sum(len(text.encode()) for text in texts) / 1e6
            file = folder / f"{megabytes}.jsonl"
            with file.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            alone, ours, commands = [], [], []
            for _ in range(arguments.rounds):
                alone.append(encode_alone(tokenizer_json, texts, specials_as_text=True))
                ours.append(pipeline(tokenizer_json, file, arguments.threads))
                commands.append(command(file, tokenizer_dir))
            commands = commands or [command(file, tokenizer_dir)]
            took, peak = statistics.median(seconds for seconds, _ in commands), max(memory for _, memory in commands)
            print(f"\n{megabytes} MB, {len(texts):,} documents")
            beside = ""
            if arguments.rounds:
                ratios, processor = [[a[k] / b[k] for a, b in zip(alone, ours, strict=True)] for k in (0, 1)]
                shares = [a[0] / b[0] for a, b in zip(alone, commands, strict=True)]
                plain_seconds, our_seconds = (statistics.median(wall for wall, _ in each) for each in (alone, ours))
                print(f"  plain     {size / plain_seconds:7.2f} MB/s")
                print(
                    f"  pipeline  {size / our_seconds:7.2f} MB/s, {statistics.median(ratios):.1%} of plain "
                    f"({min(ratios):.1%} to {max(ratios):.1%}); by processor seconds {statistics.median(processor):.1%}"
                )
                beside = f"{statistics.median(shares):.1%} of plain ({min(shares):.1%} to {max(shares):.1%}), "
            print(f"  command   {size / took:7.2f} MB/s, {beside}at most {peak:,.0f} MB of memory", flush=True)
            del texts
            file.unlink()


if __name__ == "__main__":
    main()
