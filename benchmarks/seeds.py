#!/usr/bin/env python
"""What `nemotron nano3 pipe -c tiny` reaches over several seeds, and the bands that follow from it.

    python benchmarks/seeds.py --seeds 1 2 3 4 5 --at-once 2

Every seed has an output root of its own (under output/seeds), so that nothing is skipped and nothing is mixed up. The
data is the same for all seeds; initial weights, the order of the data and what RL samples are not. A band is the mean
less three standard deviations: a run outside it is not bad luck.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nemo_runspec.artifacts import Registry

ROOT = Path("output/seeds")


def run_all(commands: dict[Path, list[str]], at_once: int) -> None:
    """Run each command with an output root of its own, `at_once` side by side, each on a share of the cores.

    What is printed goes to the root's `log`. Exit codes are not looked at: runs outside a band count like others.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not on macOS
    shares: SimpleQueue[set[int]] = SimpleQueue()
    for number in range(at_once):
        shares.put(set(cores[number::at_once]))

    def run(root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "RUNSPEC_OUTPUT_ROOT": str(root),
            "RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts"),
        }
        share = shares.get()
        on_its_cores = functools.partial(os.sched_setaffinity, 0, share) if share else None
        try:
            with (root / "log").open("w") as log:
                subprocess.run(
                    commands[root], env=environment, stdout=log, stderr=log, check=False, preexec_fn=on_its_cores
                )
        finally:
            shares.put(share)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, commands))


def newest_metrics(root: Path, artifact: str) -> dict[str, Any]:
    """The metrics of the newest version of an artifact under an output root."""
    registry = Registry(root / "artifacts")
    if artifact not in registry.names():
        sys.exit(f"no {artifact} under {root}; see {root / 'log'}")
    metrics: dict[str, Any] = registry.resolve(artifact).record["metrics"]
    return metrics


def print_bands(rows: dict[str, tuple[float | None, list[float]]]) -> None:
    """A line for each quantity: the band that there is, if any, mean, standard deviation, mean - 3 sd, every seed."""
    print(f"{'quantity':46s} {'band':>8s} {'mean':>7s} {'sd':>7s} {'mean-3sd':>9s}   each seed")
    for name, (bound, values) in rows.items():
        mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        band, each = "" if bound is None else f"{bound:.3f}", " ".join(f"{value:.3f}" for value in values)
        print(f"{name:46s} {band:>8s} {mean:7.3f} {deviation:7.3f} {mean - 3 * deviation:9.3f}   {each}")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """`--seeds` and `--at-once`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with a share of the cores")
    return parser.parse_args()


def command_of(seed: int) -> list[str]:
    """The whole pipeline with one seed."""
    command = ["nemotron", "nano3", "pipe", "-c", "tiny", f"pretrain:rng.seed={seed}", f"sft:rng.seed={seed}"]
    phases = [f"{step}:seed={seed}" for step in ("rl", "genrm", "rlhf")]
    return [*command, *phases, f"rl-final:seed={seed + 1_000}"]  # other prompts than those of the first pass


def main() -> None:
    """Run what is missing, then print every band's quantity."""
    arguments = parse_arguments(__doc__)
    commands = {ROOT / f"seed-{seed}": command_of(seed) for seed in arguments.seeds}
    run_all(commands, arguments.at_once)
    metrics = [newest_metrics(root, "nano3-eval-results-tiny") for root in commands]
    print_bands(
        {
            band["name"]: (band["bound"], [float(m["bands"][index]["value"]) for m in metrics])
            for index, band in enumerate(metrics[0]["bands"])
        }
    )
    for role in metrics[0]["tasks"]:
        for family in metrics[0]["tasks"][role]["families"]:
            entries = [m["tasks"][role]["families"][family] for m in metrics]
            greedy = statistics.mean(entry["greedy"] for entry in entries)
            sampled = [entry["sampled"] for entry in entries if "sampled" in entry]
            text = f", sampled {statistics.mean(sampled):.3f}" if sampled else ""
            print(f"{role:8s} {family:24s} greedy {greedy:.3f}{text}")


if __name__ == "__main__":
    main()
