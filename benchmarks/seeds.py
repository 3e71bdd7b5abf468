#!/usr/bin/env python
"""What `nemotron FAMILY pipe -c tiny` reaches over several seeds, and the bands that follow from it.

    python benchmarks/seeds.py --seeds 1 2 3 4 5 --at-once 2
    python benchmarks/seeds.py --family super3 --seeds 1 2 3 4 5 --at-once 2    # or lightning35

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nemo_runspec.artifacts import Registry

ROOT = Path("output/seeds")

# Of the steps with seeds, by family: how far each stands from the seed of a run. A later pass draws other prompts.
SEEDS = {
    "nano3": {
        **{"pretrain:rng.seed": 0, "sft:rng.seed": 0},
        **{"rl:seed": 0, "genrm:seed": 0, "rlhf:seed": 0, "rl-final:seed": 1_000},
    },
    "super3": {
        **{f"pretrain-{phase}:rng.seed": 0 for phase in ("phase1", "phase2", "long-1m", "long-mixed")},
        **{f"{step}:rng.seed": 0 for step in ("sft", "sft-conversation", "sft-budget", "qad")},
        **{f"{step}:seed": 1_000 * i for i, step in enumerate(("rlvr1", "rlvr2", "rlvr3", "swe1", "swe2"))},
        **{f"{step}:seed": 0 for step in ("genrm", "rlhf", "mtp-healing")},
    },
    "lightning35": {"pretrain:rng.seed": 0, "sft:rng.seed": 0, "rl:seed": 0, "qad:rng.seed": 0},
}  # fmt: skip


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


def parse_arguments(description: str | None, families: Sequence[str] = ()) -> argparse.Namespace:
    """`--seeds` and `--at-once`, and `--family` where there are several."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with a share of the cores")
    if families:
        parser.add_argument("--family", choices=families, default=families[0])
    return parser.parse_args()


def command_of(family: str, seed: int) -> list[str]:
    """The whole pipeline with one seed."""
    seeds = [f"{key}={seed + offset}" for key, offset in SEEDS[family].items()]
    return [sys.executable, "-m", "nemotron", family, "pipe", "-c", "tiny", *seeds]


def main() -> None:
    """Run what is missing, then print every band's quantity."""
    arguments = parse_arguments(__doc__, list(SEEDS))
    family = arguments.family
    commands = {ROOT / f"{family}-{seed}": command_of(family, seed) for seed in arguments.seeds}
    run_all(commands, arguments.at_once)
    metrics = [newest_metrics(root, f"{family}-eval-results-tiny") for root in commands]
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
