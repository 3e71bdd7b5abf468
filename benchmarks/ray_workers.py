#!/usr/bin/env python
"""The same data preparation on Ray with one worker and with two, beside a process and a pool of processes.

    python benchmarks/ray_workers.py                # 100 MB; wants the extra ray (src/nemotron/constraints-cluster.txt)
    python benchmarks/ray_workers.py --mb 10 100

Text, tokenizer and command are those of `tokenize_speed.py`. Each line is the whole command, from its start to the
published artifact, on a Ray that is up already (one node on this machine, with as many CPUs as there are workers), and
the payload digest, which has to be the same in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenize_speed

PORT = 26379


def run(file: Path, tokenizer: Path, env: dict[str, str], cpus: set[int]) -> tuple[float, str]:
    """(seconds, payload digest) of the recipe's script on a file."""
    from nemo_runspec.artifacts import Registry

    with tempfile.TemporaryDirectory(dir=file.parent) as cwd:
        env = env | {"RUNSPEC_ARTIFACTS_ROOT": f"{cwd}/artifacts", "RUNSPEC_OUTPUT_ROOT": f"{cwd}/output"}
        words = ["--config", "own", f"sources=[{file}]", f"tokenizer={tokenizer}", "shard_bytes=8000000"]
        start = time.perf_counter()
        child = subprocess.run(
            [sys.executable, str(tokenize_speed.SCRIPT), *words], cwd=cwd, env=os.environ | env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        if child.returncode:
            sys.exit(child.stderr)
        return seconds, Registry(Path(cwd) / "artifacts").resolve("tokenize-data-own:latest").digest


def ray(*words: str) -> None:
    """The `ray` program of this environment."""
    program = Path(sys.executable).with_name("ray")
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([str(program), *words], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def main() -> None:
    """Print a line an engine and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100], help="megabytes (10^6 bytes) of text")
    arguments = parser.parse_args()
    from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer

    every = sorted(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {len(every)} cores; Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name) / "tokenizer"
        trained = train_tokenizer(tokenize_speed.documents(tokenize_speed.SAMPLE_BYTES), tokenize_speed.VOCAB_SIZE)
        save_tokenizer(trained, tokenizer, model_max_length=8192, template="nano3")
        for megabytes in arguments.mb:
            file = Path(name) / f"{megabytes}.jsonl"
            with file.open("w", encoding="utf-8") as stream:
                stream.writelines(
                    json.dumps({"text": text}) + "\n" for text in tokenize_speed.documents(megabytes * 10**6)
                )
            digests = set()
            for what, cpus in (("one process", set(every[:1])), (f"pool of {min(2, len(every))}", set(every[:2]))):
                seconds, digest = run(file, tokenizer, {}, cpus)
                digests.add(digest)
                print(f"{megabytes:5} MB  {what:<14} {seconds:6.1f} s  {megabytes / seconds:6.2f} MB/s", flush=True)
            for workers in (1, 2):
                ray("start", "--head", f"--port={PORT}", f"--num-cpus={workers}", "--include-dashboard=false")
                try:
                    env = {"RAY_ADDRESS": f"127.0.0.1:{PORT}", "RAY_AUTH_MODE": "disabled"}
                    seconds, digest = run(file, tokenizer, env, set(every))
                finally:
                    ray("stop", "--force")
                digests.add(digest)
                print(f"{megabytes:5} MB  Ray, {workers} worker{'s' * (workers > 1)}  {seconds:6.1f} s  "
                      f"{megabytes / seconds:6.2f} MB/s", flush=True)  # fmt: skip
            print(f"{megabytes:5} MB  digests: {len(digests)}")
            if len(digests) != 1:
                sys.exit("the engines wrote different bytes")


if __name__ == "__main__":
    main()
