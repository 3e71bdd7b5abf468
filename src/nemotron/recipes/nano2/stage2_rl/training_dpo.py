#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Iterative on-policy DPO on calls of tools over several turns."
# name = "nano2/rl-dpo"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_dpo", default = "tiny", schema = "training_dpo.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, training 2 of 4: a model that calls tools more reliably.

    python data_curation.py --scale tiny | python training_ifeval.py | python training_dpo.py > dpo.json
    python training_dpo.py --checkpoint-path MODEL --dataset-path DIR --rounds 1

DPO (Rafailov et al. 2023), iterative and on-policy: in each round the policy, as it is by then, attempts every request
several times; where one attempt left the databases as it should and another did not, they are a pair; an epoch on the
pairs of the round follows, with the model that began it as the reference.

A pair is the first turn in which two attempts differ by a token, of reasoning or call: the same context, what a right
attempt wrote there, and what a wrong one did. The template shows earlier turns without their reasoning, so that an
attempt is not one sequence anyway. Shapes: T sampled tokens of some pairs.

Simplified against the paper (arXiv 2508.14444, section 3.2): one process, fp32; five small databases, not WorkBench.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import copy
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nemo_runspec.errors import RunFailed
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.kit.schemas.rl import DPOLossConfig
from nemotron.recipes.nano2.stage2_rl.sampling import in_groups, load_policy, read_prompts, sample, save_policy
from nemotron.stack.rl.pairs import Pair, PairBatch, answer_logprobs, answer_of, pack_pairs
from nemotron.stack.rl.preferences import dpo_loss
from nemotron.stack.rl.rollouts import Rollout, one_turn_each
from nemotron.stack.training.optim import build_optimizer


@dataclass
class Config:
    """What to train on, how long and how fast."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    dataset_path: UserPath | None = None  # default: what came with it; of one that is named, its own
    scale: Scale | None = None  # one smaller than that of the data takes its share of the prompts
    rounds: Annotated[int, Field(ge=1)] = 2  # each on its share of the requests
    samples: Annotated[int, Field(ge=2)] = 6  # attempts at each request
    pairs_per_request: Annotated[int, Field(ge=1)] = 3  # at most
    pairs_per_step: Annotated[int, Field(ge=1)] = 8  # that make one gradient
    lr: Annotated[float, Field(gt=0)] = 2e-4  # the smaller the model, the larger
    beta: Annotated[float, Field(gt=0)] = 0.1  # how strongly the policy is held to the reference
    sft_weight: Annotated[float, Field(ge=0)] = 0.1  # of the chosen turn's negative log-likelihood (sum over tokens)
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one half after the other, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """In each round sample, verify, pair, train; save."""
    initial = Checkpoint.load(path=config.checkpoint_path, key="model")
    dataset = Dataset.load(path=config.dataset_path or (config.checkpoint_path and initial.dataset_path), key="data")
    policy = load_policy(initial, config.threads)
    model, reference = policy.model, copy.deepcopy(policy.model)
    prompts = read_prompts(dataset, "tools", config.scale)
    optimizer = build_optimizer(model, AdamWConfig(lr=config.lr, adam_beta2=0.95, weight_decay=0.0))
    settings = DPOLossConfig(reference_policy_kl_penalty=config.beta, sft_loss_weight=config.sft_weight)

    def loss_sum(micro: PairBatch) -> Tensor:  # of some pairs: the loss, and its first term alone
        logp_T = answer_logprobs(model.train(), micro, nullcontext())  # no autocast: fp32
        with torch.no_grad():
            reference_T = answer_logprobs(reference, micro, nullcontext())
        loss = dpo_loss(logp_T, reference_T, micro.lengths_S, settings)
        return torch.stack([loss.loss, loss.preference_P.sum()])

    progress, losses, right = Progress(config.rounds, label="dpo"), list[float](), list[float]()
    for i in range(config.rounds):
        # --- 1. Attempts of the policy as it is now, verified; those at one request stand together
        attempts = sample(policy, prompts[i :: config.rounds], config.samples, max_turns=4, seed=[config.seed, i])
        right.append(sum(attempt.reward == 1 for attempt in attempts) / len(attempts))
        groups = in_groups(attempts, config.samples)
        pairs = [pair for group in groups for pair in make_pairs(group, config.pairs_per_request)]
        progress.note(f"round {i + 1}: {right[-1]:.1%} of {len(attempts):,} attempts are right, {len(pairs)} pairs")
        # --- 2. An epoch on the pairs. Loss: mean over the pairs of a batch of -log sigmoid(beta (gain of the chosen -
        # gain of the rejected)) + sft_weight NLL(chosen); a gain: log-probability of a turn less the reference's
        reference.load_state_dict(model.state_dict())
        for start in range(0, len(pairs), config.pairs_per_step):
            batch = pairs[start : start + config.pairs_per_step]
            micros = pack_pairs(batch, max(pair.num_tokens for pair in batch), rows_per_batch=1)
            _, preference_loss = policy.lanes.add_gradients(model, loss_sum, micros, len(batch))
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            if not math.isfinite(grad_norm.item()):  # before it reaches a weight
                raise RunFailed(f"gradient norm {grad_norm} in round {i + 1}", "try a smaller --lr")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(preference_loss.item())
        progress.update(i + 1, loss=losses[-1] if pairs else "none: no pairs")
    progress.close()

    with output_folder(config.output_dir) as folder:
        save_policy(model, initial, folder)
        checkpoint = Model(
            path=folder,
            num_steps=len(losses),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=initial.chat_template,
            reasoning=True,
            num_parameters=model.num_parameters()[0],
            metrics={"right_by_round": right, "preference_loss": losses},
        )
        return checkpoint.save()


def make_pairs(attempts: Sequence[Rollout], most: int) -> list[Pair]:
    """The turns in which a right attempt and a wrong one at the same request part, at most `most`; no two are equal."""
    right, wrong = ([one_turn_each(attempt) for attempt in attempts if attempt.reward == reward] for reward in (1, 0))
    pairs: list[Pair] = []
    for chosen, rejected in itertools.product(right, wrong):
        turns = (Pair(answer_of(a), answer_of(b)) for a, b in zip(chosen, rejected, strict=False))
        parting = next((pair for pair in turns if pair.chosen != pair.rejected), None)
        if parting is not None and parting not in pairs:
            pairs.append(parting)
    return pairs[:most]


if __name__ == "__main__":
    run_step(main, Config)
