#!/usr/bin/env python
"""Is it RL, or just more training? RL against SFT continued for the same seconds, from one SFT model.

    nemotron nano3 pipe -c tiny          # first: publishes the SFT and the RL model
    python benchmarks/sft_continued.py

SFT goes on from the published SFT model, on the same conversations in another order, for as many steps as fit into the
seconds that RL trained, with its own warm-up and decay. Then base, SFT, SFT continued and RL are evaluated side by side
on the same held-out tasks. Works in the current output root, and adds artifacts named nano3-sft-continued-*.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts import Registry
from nemo_runspec.env import output_root


def seconds_of(stage: str, model: str) -> tuple[float, dict[str, Any]]:
    """Seconds of the phase `train` of the run that published `model`, and the record of that model."""
    record = Registry.default().resolve(model).record
    run_dir = Path(output_root()) / "nano3" / stage / f"tiny-{record['producer']['fingerprint']}"
    phases = [json.loads(line) for line in (run_dir / "phases.jsonl").read_text().splitlines()]
    return sum(phase["seconds"] for phase in phases if phase["phase"] == "train"), record


def main() -> None:
    """Continue SFT, evaluate the four models, print the comparisons."""
    rl_seconds, _ = seconds_of("rl", "nano3-rl-model-tiny")
    sft_seconds, sft = seconds_of("sft", "nano3-sft-model-tiny")
    steps = round(rl_seconds / sft_seconds * sft["metrics"]["steps"])
    print(f"RL trained {rl_seconds:.0f} s; SFT made {sft['metrics']['steps']} steps in {sft_seconds:.0f} s")
    print(f"SFT continues for {steps} steps", flush=True)
    train = ["nemotron", "nano3", "sft", "-c", "tiny", "run.model=nano3-sft-model-tiny", "rng.seed=4321"]
    names = ["run.output=nano3-sft-continued-model-tiny", "run.results=nano3-sft-continued-results-tiny"]
    length = [f"train.train_iters={steps}", f"scheduler.lr_wsd_decay_iters={steps * 2 // 5}"]
    subprocess.run([*train, *names, *length], check=True)
    evaluate = ["nemotron", "nano3", "eval", "-c", "tiny", "run.sft_continued=nano3-sft-continued-model-tiny"]
    evaluate += ["run.rlhf=null", "run.final=null"]
    code = subprocess.run([*evaluate, "run.results=nano3-sft-continued-eval-tiny"], check=False).returncode
    if code not in (0, 1):  # 1: outside a band, with the numbers published
        sys.exit(code)


if __name__ == "__main__":
    main()
