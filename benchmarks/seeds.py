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
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path("output/seeds")


def run_seed(seed: int, shares: SimpleQueue[set[int]]) -> Path:
    """Run the whole pipeline with one seed on a share of the cores; returns its output root.

    Out-of-band runs (exit 1) count like others.
    """
    root = ROOT / f"seed-{seed}"
    root.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "RUNSPEC_OUTPUT_ROOT": str(root), "RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")}
    command = ["nemotron", "nano3", "pipe", "-c", "tiny", f"pretrain:rng.seed={seed}", f"sft:rng.seed={seed}"]
    with (root / "pipe.log").open("w") as log:
        phases = [f"{step}:seed={seed}" for step in ("rl", "genrm", "rlhf")]
        command += [*phases, f"rl-final:seed={seed + 1_000}"]  # other prompts than those of the first pass
        cores = shares.get()
        on_its_cores = functools.partial(os.sched_setaffinity, 0, cores) if cores else None
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False, preexec_fn=on_its_cores)
        shares.put(cores)
    return root


def results_of(root: Path) -> dict[str, Any]:
    """The metrics of the newest evaluation under an output root."""
    records = sorted((root / "artifacts" / "nano3-eval-results-tiny").glob("*/artifact.json"))
    if not records:
        sys.exit(f"no evaluation under {root}; see {root / 'pipe.log'}")
    metrics: dict[str, Any] = json.loads(records[-1].read_text())["metrics"]
    return metrics


def main() -> None:
    """Run what is missing, then print every band's quantity: per seed, mean, standard deviation, mean - 3 sd."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with a share of the cores")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not on macOS
    shares: SimpleQueue[set[int]] = SimpleQueue()
    for number in range(arguments.at_once):
        shares.put(set(cores[number :: arguments.at_once]))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        roots = list(pool.map(lambda seed: run_seed(seed, shares), arguments.seeds))
    metrics = [results_of(root) for root in roots]
    print(f"{'quantity':34s} {'band':>8s} {'mean':>7s} {'sd':>7s} {'mean-3sd':>9s}   each seed")
    for index, band in enumerate(metrics[0]["bands"]):
        values = [float(m["bands"][index]["value"]) for m in metrics]
        mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        each = " ".join(f"{value:.3f}" for value in values)
        print(
            f"{band['name']:34s} {band['bound']:8.3f} {mean:7.3f} {deviation:7.3f} {mean - 3 * deviation:9.3f}   {each}"
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
