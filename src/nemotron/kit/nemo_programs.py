"""Programs of NeMo Evaluator and NeMo-Gym, which live in environments of their own: started, waited for, read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from nemo_runspec.errors import RunFailed, UserError

LAUNCHER, GYM = "nemo-evaluator-launcher", "gym"
PACKAGES = {LAUNCHER: "nemo-evaluator-launcher==0.2.6", GYM: "nemo-gym==0.4.0"}
POLL_SECONDS = 60
UNFINISHED = {"pending", "running"}


def find(program: str) -> None:
    """UserError where a program is not on the PATH."""
    if shutil.which(program) is None:
        raise UserError(f"no program {program} here", f"it is in {PACKAGES[program]}, in an environment of its own")


def call(folder: Path, *words: str) -> str:
    """Run a program in a folder and return its standard output, which stderr shows too. RunFailed if it fails."""
    result = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    print(result.stdout, file=sys.stderr)
    if result.returncode:
        raise RunFailed(f"{words[0]} {words[1]} ended with {result.returncode}", " ".join(words))
    return result.stdout


def launched_scores(config: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Submit what a config of the launcher says, wait for it, and read what each of its tasks reports, in their order.

    What was submitted is in `folder`, so that the same command waits for it instead of submitting it again.
    """
    submitted = folder / "launcher"  # the launcher writes INVOCATION_config.yml there
    if not list(submitted.glob("*_config.yml")):
        file = folder / "launcher.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        call(folder, LAUNCHER, "run", "--config", str(file), "--config-output", str(submitted))
    invocation = next(submitted.glob("*_config.yml")).name.removesuffix("_config.yml")
    while UNFINISHED & (states := _states(folder, invocation)):
        time.sleep(POLL_SECONDS)
    if states != {"success"}:
        raise RunFailed(f"tasks of {invocation}: {', '.join(sorted(states))}", f"{LAUNCHER} logs {invocation}")
    scores = folder / "scores"
    call(folder, LAUNCHER, "export", invocation, "--dest", "local", "--format", "json", "--output-dir", str(scores))
    reported: dict[int, dict[str, float]] = {}  # a job INVOCATION.N is that of the task N
    for file in scores.rglob("processed_results.json"):
        for benchmark in json.loads(file.read_text(encoding="utf-8"))["benchmarks"].values():
            for entry in (entry for entries in benchmark["models"].values() for entry in entries):
                reported[int(entry["job_id"].rpartition(".")[2])] = entry["scores"]
    count = len(config["evaluation"]["tasks"])
    if missing := sorted(set(range(count)) - reported.keys()):
        raise RunFailed(f"{invocation} has no scores of its tasks {missing}", f"{LAUNCHER} logs {invocation}")
    return [reported[index] for index in range(count)]


def _states(folder: Path, invocation: str) -> set[str]:
    return {job["status"] for job in json.loads(call(folder, LAUNCHER, "status", invocation, "--json"))}
