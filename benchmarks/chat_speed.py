#!/usr/bin/env python
"""Preparing conversations beside the tokenizer alone: MB/s and ratio, by steps.

    python benchmarks/chat_speed.py                         # 20 MB, one thread and all
    python benchmarks/chat_speed.py --mb 5 50 --threads 1
    python benchmarks/chat_speed.py --tokenizer FOLDER      # with tokenizer.json, in place of one trained here

Conversations: one to three turns of the user, reasoning before the last answer, a tool in a third of them; their texts
are runs of lines of the standard library, of lognormal length (question 300 bytes, reasoning 2 kB, answer 1 kB
in the median), as JSON Lines. Tokenizer: byte-level BPE of up to 131,072 tokens, trained on part of the same text.

Every round times, one after the other in this process: `plain`, the rendered conversations in memory through
`Tokenizer.encode_batch_fast` in batches of 256 on N threads, the ids thrown away; `chat`, the same conversations from
the JSON Lines file to packed Parquet rows with receipts (reading the tokenizer, listing, checks, template, mask, ids,
packing, N processes and their start included). The ratio is that of the round; its median is printed, and that of the
processor seconds, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from process import Clock
from text import encode_alone, library_lines

ROUNDS = 5
VOCAB_SIZE = 131_072
SAMPLE_BYTES = 10_000_000  # that the tokenizer is trained on
TOOL = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}


def conversations(num_bytes: int) -> Iterator[dict[str, Any]]:
    """Records of about `num_bytes` together, the same every time."""
    rng = random.Random(0)
    lines = library_lines()

    def text(median: int) -> str:
        wanted = min(int(rng.lognormvariate(0, 0.8) * median), 50_000)
        begin, parts = rng.randrange(len(lines)), [""]
        while wanted > 0:
            parts.append(lines[begin % len(lines)])
            wanted -= len(parts[-1])
            begin += 1
        return "".join(parts).strip() or "x"

    while num_bytes > 0:
        messages: list[dict[str, Any]] = []
        with_tool = rng.random() < 1 / 3
        turns = rng.randint(1, 3)
        for turn in range(turns):
            messages.append({"role": "user", "content": text(300)})
            if with_tool:
                call = {"name": "search", "arguments": {"query": text(30)}}
                messages += [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": text(500)},
                ]
            answer = {"role": "assistant", "content": text(1000)}
            messages.append(answer | ({"reasoning_content": text(2000)} if turn == turns - 1 else {}))
        record = {"messages": messages, "tools": [TOOL] if with_tool else None}
        num_bytes -= len(json.dumps(record, ensure_ascii=False).encode())
        yield record


def chat(tokenizer_json: str, file: Path, processes: int) -> tuple[float, float, int]:
    """Seconds from a file's name to packed rows, as of `Clock`; and how many tokens these hold."""
    from nemotron.data_prep.chat import pack as chat_pack
    from nemotron.data_prep.chat import spool as chat_spool
    from nemotron.data_prep.sources.locations import list_files
    from nemotron.data_prep.sources.reading import Reading
    from nemotron.data_prep.tokens.tokenizer import tokenizer_from
    from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
    from nemotron.data_prep.work.shards import freeze, run_shards

    reading = Reading(columns={"messages": "messages", "tools": "tools"}, required=(), present=("messages",))
    source = chat_spool.ChatSource("own", reading)
    settings = chat_spool.ChatSettings(tokenizer_json, "nano3", 1 << 20, "drop", 0.0, 0.0, 0, {"own": source})
    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        tokenizer_from.cache_clear()
        clock = Clock()
        tokenizer_from(tokenizer_json)
        with PoolEngine(processes) if processes > 1 else SerialEngine() as engine:
            size = max(min(32 << 20, file.stat().st_size // (4 * processes)), 1)
            plan = chat_spool.plan_tokenize(settings, {"own": list_files([str(file)])}, size)
            freeze(plan, folder / "spool")
            task, counts = chat_spool.tokenize_shard, chat_spool.ChatCounts
            list(run_shards(plan, folder / "spool", task, settings, engine, counts))
            sequences = chat_pack.read_sequences(folder / "spool", plan, ["own"])
            chosen = chat_pack.choose(sequences, ["own"], weights=None, repeats={}, num_tokens=None)
            longest = max(4096, int(sequences["length"].max()))
            packing = chat_pack.Packing(longest, "best_fit_decreasing", 0, 1 << 22)
            packed = chat_pack.pack_rows(plan, sequences, chosen.splits, packing, folder, engine)
        seconds = clock.read()
    return *seconds, packed["train"].counts.tokens


def measure(tokenizer_json: str, file: Path, texts: list[str], threads: int, rounds: int) -> None:
    """Print a line for a file and a number of threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    size = sum(len(text.encode()) for text in texts) / 1e6
    walls, processors, rates = [], [], []
    tokens = 0
    for _ in range(rounds):
        plain_wall, plain_processor = encode_alone(tokenizer_json, texts, specials_as_text=False)
        chat_wall, chat_processor, tokens = chat(tokenizer_json, file, threads)
        walls.append(plain_wall / chat_wall)
        processors.append(plain_processor / chat_processor)
        rates.append((size / plain_wall, size / chat_wall))
    plain_rate, chat_rate = (statistics.median(column) for column in zip(*rates, strict=True))
    print(
        f"{size:6.0f} MB of text, {tokens / 1e6:.1f} M tokens, {threads} thread{'s' * (threads > 1)}: "
        f"plain {plain_rate:.1f} MB/s, chat {chat_rate:.1f} MB/s, ratio {statistics.median(walls):.0%} "
        f"(rounds {', '.join(f'{ratio:.0%}' for ratio in walls)}), "
        f"of processor seconds {statistics.median(processors):.0%}",
        flush=True,
    )


def main() -> None:
    """Measure every size with every number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--mb", type=float, nargs="+", default=[20], help="megabytes (10^6 bytes) of JSON Lines")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()

    from tokenizers import __version__

    from nemotron.data_prep.tokens.tokenizer import find_tokenizer, train_tokenizer
    from nemotron.kit.chat import render

    if arguments.tokenizer:
        tokenizer_json = find_tokenizer(str(arguments.tokenizer)).json_text()
    else:
        sample = (json.dumps(record, ensure_ascii=False) for record in conversations(SAMPLE_BYTES))
        tokenizer_json = train_tokenizer(sample, VOCAB_SIZE).to_str()
    print(
        f"{platform.machine()}, {cores} cores; Python {platform.python_version()}, tokenizers {__version__}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for mb in arguments.mb:
            file, texts = Path(folder) / f"{mb:g}.jsonl", []
            with file.open("w", encoding="utf-8") as stream:
                for record in conversations(int(mb * 1e6)):
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                    texts.append(render(record["messages"], tools=record["tools"], template="nano3"))
            for threads in arguments.threads:
                measure(tokenizer_json, file, texts, threads, arguments.rounds)


if __name__ == "__main__":
    main()
