#!/usr/bin/env python
"""Many requests at once: our engine, `nemotron serve` and `transformers serve`, in turn on one machine.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/serving.py
    python benchmarks/serving.py --model super3-rlhf-model-tiny --drafts 3

Without a model, one of 14 M parameters with random weights and a tokenizer of the standard library's own lines. Each
round, `--requests` different prompts of 160 characters are sent at once and continued greedily by up to `--new-tokens`
tokens: by the engine in this process, by `nemotron serve` and by `transformers serve`, which needs what `pip install
"transformers[serving]"` brings, and answers one request after the other: its continuous batching refuses models with
layers that are not attention ("Invalid layer type: linear_attention", transformers 5.23). Printed are the medians and
ranges over rounds of tokens/s and of the time to the first token, itself the median over a round's requests, and the
ratios of each round to `transformers serve`. A server that has no turn is stopped (SIGSTOP). Every prompt is new in
every round, so that no prompt cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from models import MODELS, build, machine
from text import library_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotron.kit import Checkpoint
from nemotron.stack.models import NemotronH
from nemotron.stack.serving.engine import Engine, Limits, Sampling

# Of a request for a prompt: seconds to the first token, and how many came.
Request = Callable[[str], Awaitable[tuple[float, int]]]
BIN = Path(sys.executable).parent


def write_model(folder: Path, size: str) -> None:
    """A model with random weights and a byte-level tokenizer of its vocabulary, as transformers reads them, too."""
    model = build(size)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.config.vocab_size, special_tokens=["</s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(library_lines()[:20_000], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def prompts_of(source: random.Random, count: int) -> list[str]:
    """Different ones of about 160 characters: lines of Python's standard library from somewhere on."""
    lines = library_lines()
    return ["".join(lines[source.randrange(len(lines) - 9) :][:9])[:160] for _ in range(count)]


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers on its port, stopped until it has its turn."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        while True:  # until it listens
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} has ended:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.5)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def turn(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server has its turn."""
    process.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGSTOP)


def over_http(port: int, model: str, new_tokens: int) -> Request:
    """`POST /v1/completions` with a stream of events, by the few lines of HTTP that this takes."""

    async def request(prompt: str) -> tuple[float, int]:
        body = json.dumps(
            {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
             "stream_options": {"include_usage": True}}
        ).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        start, first, count = time.perf_counter(), 0.0, 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                first = first or (time.perf_counter() - start if event["choices"] else 0)
                count = (event.get("usage") or {}).get("completion_tokens", count)
            elif line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                raise RuntimeError(line.decode() + (await reader.read()).decode())
        writer.close()
        return first, count

    return request


def in_process(engine: Engine, tokenizer: Tokenizer, new_tokens: int) -> Request:
    """The engine itself, without text."""

    async def request(prompt: str) -> tuple[float, int]:
        start, first, count = time.perf_counter(), 0.0, 0
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        async for tokens in engine.submit(ids, Sampling(new_tokens, (), temperature=0)):
            first = first or time.perf_counter() - start
            count += len(tokens)
        return first, count

    return request


def measure(request: Request, prompts: list[str]) -> tuple[float, float]:
    """All at once: tokens/s, and the median time to the first token in seconds."""

    async def together() -> list[tuple[float, int]]:
        return await asyncio.gather(*map(request, prompts))

    start = time.perf_counter()
    answers = asyncio.run(together())
    seconds = time.perf_counter() - start
    return sum(count for _, count in answers) / seconds, statistics.median(first for first, _ in answers)


def free_port() -> int:
    """One that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def main() -> None:
    """Start the servers, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="by name or folder; default: random weights")
    parser.add_argument("--size", choices=list(MODELS), default="14M", help="of those; default: 14M")
    parser.add_argument("--requests", type=int, default=64, help="at once; default: 64")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request; default: 64")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--drafts", type=int, default=0, help="of our engine; needs a model with the block; default: 0")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no stopped server stays behind
    print(machine())
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = scratch / "model"
        if args.model is None:
            write_model(folder, args.size)
        else:
            made = Checkpoint.load(path=Path(args.model)) if Path(args.model).is_dir() else Checkpoint.load(args.model)
            folder = made.path
        limits = Limits(max_length=4096, max_rows=args.requests, num_drafts=args.drafts)
        engine = Engine(NemotronH.from_pretrained(folder), limits)
        engine.start()
        stack.callback(engine.stop, 0)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ports = [free_port(), free_port()]
        options = [
            "--max-rows",
            str(args.requests),
            "--drafts",
            str(args.drafts),
            "--template",
            "nano3",
            "--name",
            "model",
        ]
        commands = [
            [str(BIN / "nemotron"), "serve", str(folder), "--port", str(ports[0]), *options],
            [
                str(BIN / "transformers"),
                "serve",
                str(folder),
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--port",
                str(ports[1]),
            ],
        ]
        ours, theirs = (
            stack.enter_context(server(command, port, scratch / f"{port}.log"))
            for command, port in zip(commands, ports, strict=True)
        )
        ways: dict[str, tuple[Request, Callable[[], contextlib.AbstractContextManager[None]]]] = {
            "engine": (in_process(engine, tokenizer, args.new_tokens), contextlib.nullcontext),
            "nemotron serve": (over_http(ports[0], "model", args.new_tokens), lambda: turn(ours)),
            "transformers serve": (over_http(ports[1], str(folder), args.new_tokens), lambda: turn(theirs)),
        }
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for index in range(args.rounds + 1):  # the first one warms up, with fewer
            for number, (way, (request, has_turn)) in enumerate(ways.items()):
                prompts = prompts_of(random.Random(3 * index + number), args.requests if index else 4)
                with has_turn():
                    result = measure(request, prompts)
                if index:
                    results[way].append(result)
                    print(f"round {index}: {way} {result[0]:.1f} tokens/s, {result[1]:.2f} s", flush=True)
    print(f"{args.requests} requests at once, {args.new_tokens} tokens each, {args.rounds} rounds")
    for way, values in results.items():
        columns = []
        for unit, numbers, base in (
            ("tokens/s", [v[0] for v in values], [v[0] for v in results["transformers serve"]]),
            ("s to the first token", [v[1] for v in values], [v[1] for v in results["transformers serve"]]),
        ):
            ratios = sorted(number / other for number, other in zip(numbers, base, strict=True))
            columns.append(
                f"{statistics.median(numbers):8.2f} {unit} ({min(numbers):.2f} to {max(numbers):.2f}), "
                f"{statistics.median(ratios):.3g}x ({ratios[0]:.3g} to {ratios[-1]:.3g})"
            )
        print(f"{way:19s} {'; '.join(columns)}")


if __name__ == "__main__":
    main()
