#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Merge weights of several steps at the constant rate into those of a decayed run, and score them."
# name = "super3/merge"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/merge"
# format = "omegaconf"
# schema = "schema.py:MergeConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Stage 0, beside the phases: what a decay would give, read off the weights of phase 1.

    nemotron super3 data prep pretrain -c tiny
    nemotron super3 pretrain -c tiny-phase1_retained
    nemotron super3 merge -c tiny

Phase 1 keeps its weights every so many steps (`checkpoint.save_retain_interval`). Here those of a window of steps
before its end are merged with the weights of a decay over that window (`stack/training/merging.py` has the derivation),
and scored on held-out text beside the last ones. A merge costs no training: Nemotron 3 Super watches its constant phase
by merged models (arXiv 2604.12374, section 2), which saves the decays that would be run for that alone.

Simplified against the paper: bits per byte instead of twelve benchmarks, and expert biases are merged like weights.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import itertools
import sys

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.kit import Checkpoint, PretrainBlend, Results, open_run, print_complete
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once
from nemotron.recipes.super3.stage0_pretrain.schema import MergeConfig
from nemotron.stack.evaluation.language_model import score_text, token_byte_lengths
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import held_out_documents
from nemotron.stack.training.merging import merge, merge_weights, read_states, retained_steps
from nemotron.stack.training.publish import publish_model


def main() -> None:
    """Read, merge over each window, score, publish one."""
    cfg: MergeConfig = load_script_config(__file__)
    stop_at_once()  # minutes at most, and nothing to save half-way
    with open_run(cfg, script=__file__) as run:
        base, data = Checkpoint.load(path=cfg.model_path), PretrainBlend.load(path=cfg.dataset_path)
        files = retained_steps(base.path)
        last, interval = max(files), _interval(list(files))
        model = NemotronH.from_pretrained(base.path).eval()
        byte_lengths = token_byte_lengths(load_tokenizer(base.path))
        held_out = held_out_documents(data.path)
        if not held_out:
            raise UserError(f"{data.ref} holds no text out", "a merge is scored on it: valid_fraction of a source")

        # --- The last weights, then each window: 0 is a merge of the last ones alone
        scores: dict[str, dict[str, float]] = {}
        chosen: dict[str, torch.Tensor] = {}
        for window in (0, *sorted(cfg.windows)):
            steps = [step for step in files if step >= last - window]
            if window % interval or len(steps) != window // interval + 1:
                raise UserError(
                    f"window {window}: there are weights of every {interval} steps from {min(files)} to {last}",
                    "a window is a multiple of that interval, no longer than they reach back",
                )
            weights = merge_weights(len(steps) - 1, interval, cfg.lr_wsd_decay_style, cfg.min_lr_share)
            state = merge(read_states(files[step] for step in steps), weights if window else [1.0])
            model.load_state_dict(state)
            text = score_text(
                model, held_out, None, byte_lengths, seq_len=cfg.seq_length, batch_size=cfg.batch_size
            )  # fmt: skip
            bits = {source: each["bits_per_byte"] for source, each in text.items()}
            name = f"window_{window}" if window else "last"
            scores[name] = {**bits, "mean": sum(bits.values()) / len(bits), "checkpoints": len(steps)}
            if window == cfg.window:
                chosen = state
            print(f"{name}: mean of sources {scores[name]['mean']:.4f} bits per byte", file=sys.stderr)

        model.load_state_dict(chosen)
        drawn = base.metrics.get("drawn")  # a phase that goes on from the merged model reads on behind these windows
        published = publish_model(
            run, model, base.path, {"window": cfg.window, "interval": interval, "drawn": drawn},
            num_steps=last, tokens=base.tokens if last == base.num_steps else None, dataset_path=data.path,
        )  # fmt: skip
        results = Results(metrics={"merging": scores}).save()
    print_complete({"model": published, "results": results})


def _interval(steps: list[int]) -> int:
    """Steps from one to the next, the same everywhere. UserError: there is one alone, or they are not."""
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    if len(gaps) != 1:
        raise UserError(f"weights of steps {steps}: equal distances expected, of two or more")
    return gaps.pop()


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
