#!/usr/bin/env python
"""What `python -m nemotron.recipes.nano2 --scale tiny` reaches over several seeds, stage by stage.

    python benchmarks/nano2_seeds.py --seeds 1 2 3 4 5 --at-once 2

Every seed has an output root of its own (under output/nano2-seeds); one that was evaluated to the end is not run
again. The data is the same for all seeds; initial weights, the order of the data and what RL samples are not. Scores
are pass@1 on held-out tasks, mean over five families and both modes of reasoning.
"""

from __future__ import annotations

import sys
from pathlib import Path

from seeds import newest_metrics, parse_arguments, print_bands, run_all

from nemotron.recipes.nano2.stage1_sft.evaluation import MODES
from nemotron.recipes.nano2.summary import summarise

ROOT = Path("output/nano2-seeds")
SEEDED = (  # what a seed decides: flags of the recipe
    "pretrain.train", "pretrain.long", "sft.train", "rl.train.ifeval", "rl.train.dpo", "rl.train.reward",
    "rl.train.rlhf", "compress.train.prune", "compress.train.distil",
)  # fmt: skip


def command_of(seed: int) -> list[str]:
    """The whole recipe with one seed."""
    flags = [word for config in SEEDED for word in (f"--{config}.seed", str(seed))]
    return [sys.executable, "-m", "nemotron.recipes.nano2", "--scale", "tiny", *flags]


def quantities_of(root: Path) -> dict[str, float]:
    """What the recipe prints at its end, and more, of the run in an output root."""
    pretrain, sft, rl, compress = (
        newest_metrics(root, f"nano2-{stage}-results") for stage in ("pretrain", "sft", "rl", "compressed")
    )
    judge = newest_metrics(root, "nano2-rl-reward")
    quantities = summarise(pretrain, sft, rl, compress)
    for source, entry in pretrain["text"].items():
        quantities |= {f"{source}, {key}": value for key, value in entry.items() if key.endswith("bits_per_byte")}
    for phase, scores in pretrain["long"].items():
        quantities |= {f"{phase} the long phase, tokens {at}": value for at, value in scores["text"].items()}
        for answers in ("answers", "answers_without_document"):
            quantities[f"{phase} the long phase, {answers}"] = scores[answers]["loss"]
    for how in ("greedy", "sampled"):
        quantities[f"RL less SFT, {how}"] = quantities[f"RL, {how}"] - quantities[f"SFT, {how}"]
    for kind in ("right over wrong", "short over long"):  # of answers that were cut off there are a few, or none
        quantities[f"reward before: {kind}"] = judge["held_out_before"][kind][0]
        quantities[f"reward: {kind}"] = judge["held_out"][kind][0]
    quantities["RL beats SFT by the rule"] = rl["preferences"]["win_rate"]
    before, after = rl["tasks"]["before"], rl["tasks"]["after"]
    for mode in MODES:
        for family, entry in before[mode]["tasks"]["families"].items():
            for how in ("greedy", "sampled"):
                name = f"{family[:12]} {mode[10:]} {how}"
                quantities[f"{name}: SFT"] = entry[how]
                quantities[f"{name}: RL"] = after[mode]["tasks"]["families"][family][how]
    return quantities


def main() -> None:
    """Run what is missing, then print every quantity."""
    arguments = parse_arguments(__doc__)
    commands = {ROOT / f"seed-{seed}": command_of(seed) for seed in arguments.seeds}
    done = {root for root in commands if (root / "artifacts" / "nano2-compressed-results").is_dir()}
    run_all({root: command for root, command in commands.items() if root not in done}, arguments.at_once)
    runs = [quantities_of(root) for root in commands]
    print_bands({name: (None, [run[name] for run in runs]) for name in runs[0]})


if __name__ == "__main__":
    main()
