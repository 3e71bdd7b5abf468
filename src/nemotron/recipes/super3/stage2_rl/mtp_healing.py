#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Heal multi-token prediction after RL: its block learns to draft what the frozen model would write."
# name = "super3/mtp_healing"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/mtp_healing"
# schema = "mtp_schema.py:MTPHealingConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2, at its end: multi-token prediction is healed. RL has moved the model, and not the block that drafts for it.

    nemotron super3 rl mtp-healing -c tiny
    python mtp_healing.py --config tiny boosting.max_num_steps=5
    torchrun --nproc-per-node 8 mtp_healing.py --config tiny

A step: draw prompts of all families, let the model answer each once at temperature 1, and take one optimiser step in
which the block, and nothing else, learns to predict the model's own distribution behind every token that it wrote
(stack/rl/boosting.py). Publishes the model with its new block; all other tensors are byte for byte those it had.
Published as results is the acceptance length before and after: the mean number of tokens that speculative decoding
settles in a pass of the model, on validation prompts, greedy and at temperature 1.

Logged a step: `loss` (nats times the squared temperature, a drafted token), `drafted_tokens`, `completion_tokens` (mean
of a response), `truncated` (share of the responses that hit the limit), `grad_norm`, `lr`; where it is measured,
`valid_acceptance_length_greedy` and `valid_acceptance_length_sampled`.

Simplified: prompts of several turns are answered once; no rewards are asked for; every process holds the whole model;
Ultra's learning rate and how it measures are not published.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Results, RLPrompts, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import Task
from nemotron.stack.evaluation.model import load_tokenizer, stop_token_ids
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.decoding.speculative import generate_speculative
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.models.published.parameters import count_mtp_parameters
from nemotron.stack.rl.boosting import Response, boosting_loss_sum, pack_responses
from nemotron.stack.rl.calls import cut_into_calls
from nemotron.stack.rl.policy import step_policy, warmed_up_lr
from nemotron.stack.rl.prompts import PromptSource, encode_prompts, read_prompts
from nemotron.stack.training.distributed import Ranks, stop_distributed, sum_metrics
from nemotron.stack.training.flops import forward_flops_per_token, mtp_flops_per_token
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.super3.stage2_rl.mtp_schema import MTPHealingConfig

MODES = {"greedy": 0.0, "sampled": 1.0}  # temperatures at which the acceptance length is measured


def main() -> None:
    """Config, then train and publish."""
    cfg: MTPHealingConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model, measured = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        # The tensors as they lie in the model's files, whatever their dtype, with the trained block in its place.
        assert model.mtp is not None
        healed = NemotronH.from_pretrained(data.initial.path, dtype=None)
        assert healed.mtp is not None
        healed.mtp.load_state_dict(model.mtp.state_dict())
        steps = cfg.boosting.max_num_steps
        published = publish_model(
            session.run, healed, data.initial.path, {"responses": steps * cfg.boosting.num_prompts_per_step},
            num_steps=steps, dataset_path=data.prompts.path, chat_template=data.initial.chat_template,
            reasoning=data.initial.reasoning,
        )  # fmt: skip
        before, after = measured["0"], measured[str(steps)]
        results = Results(
            metrics={
                "acceptance_length": {mode: {"before": before[mode], "after": after[mode]} for mode in MODES},
                "num_speculative_tokens": cfg.boosting.num_speculative_tokens,
                "prompts": len(data.valid),
            }
        ).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, and prompts to train on and to measure on (never those of the evaluation split)."""

    initial: Checkpoint
    template: str
    tokenizer: Tokenizer
    stop_ids: list[int]
    prompts: RLPrompts
    source: PromptSource
    valid: list[Task]

    def encode(self, tasks: list[Task], cfg: MTPHealingConfig) -> list[list[int]]:
        """The prompts of tasks in tokens; UserError where one leaves no room for a response."""
        texts = [prompt_text(task, self.template, cfg.env.enable_thinking) for task in tasks]
        new, most = cfg.policy.generation.max_new_tokens, cfg.policy.max_total_sequence_length
        return encode_prompts(texts, self.tokenizer, max_new_tokens=new, max_length=most)


def open_data(cfg: MTPHealingConfig, ranks: Ranks) -> Data:
    """Model and prompts. Which prompts a step draws is a function of the seed and the step."""
    prompts, initial = RLPrompts.load(path=cfg.data.path), Checkpoint.load(path=cfg.policy.model_name)
    ranks.check_divides("boosting.num_prompts_per_step", cfg.boosting.num_prompts_per_step)
    if (template := initial.template) is None:
        raise UserError(f"{initial.ref} has no chat template", "its prompts are those of RL")
    if not load_config(initial.path).num_nextn_predict_layers:
        raise UserError(
            f"{initial.ref} has no multi-token prediction (num_nextn_predict_layers 0)",
            "a model that was pretrained with it has",
        )
    if prompts.train_path is None or prompts.valid_path is None:
        missing = "training" if prompts.train_path is None else "validation"
        raise UserError(f"{prompts.ref} has no {missing} prompts")
    shares = dict.fromkeys(read_prompts(prompts.train_path), 1.0)
    size, count = cfg.boosting.num_prompts_per_step, cfg.boosting.val_prompts_per_family
    if len(shares) > size:
        raise UserError(
            f"boosting.num_prompts_per_step {size} is below the number of families in {prompts.ref}, {len(shares)}",
            f"boosting.num_prompts_per_step={len(shares)} or more; a step has prompts of every family",
        )
    source = PromptSource(prompts.train_path, shares, size, cfg.seed)
    valid = [task for pool in read_prompts(prompts.valid_path).values() for task in pool[:count]]
    stop_ids = stop_token_ids(initial.path, template)
    data = Data(initial, template, load_tokenizer(initial.path), stop_ids, prompts, source, valid)
    data.encode([*source.drawn(cfg.boosting.max_num_steps), *valid], cfg)  # what has no room is refused now
    return data


def train(cfg: MTPHealingConfig, session: Session, data: Data) -> tuple[NemotronH, dict[str, dict[str, float]]]:
    """The loop. Returns the model, and what was measured by step: the acceptance length, greedy and sampled."""
    ranks, steps, policy = session.ranks, cfg.boosting.max_num_steps, cfg.policy
    rows = min(policy.generation.batch_size, cfg.boosting.num_prompts_per_step // ranks.world_size)
    config = load_config(data.initial.path)
    needs = Needs(
        config, policy.train_micro_batch_size * policy.max_total_sequence_length, completions=rows,
        completion_tokens=policy.max_total_sequence_length, trained=count_mtp_parameters(config).total,
    )  # fmt: skip
    check_memory(session, needs, "policy.train_micro_batch_size")
    torch.manual_seed(cfg.seed)
    model = NemotronH.from_pretrained(data.initial.path, device=ranks.device).eval().requires_grad_(False)
    assert model.mtp is not None
    model.mtp.requires_grad_(True)
    if policy.freeze_moe_router:
        for moe in model.moe_blocks():
            moe.gate.weight.requires_grad_(False)
    optimizer = build_optimizer(model, policy.optimizer)
    flops_per_token = forward_flops_per_token(model.config, policy.max_total_sequence_length) + (
        3 * cfg.boosting.mtp_num_layers * mtp_flops_per_token(model.config, policy.max_total_sequence_length)
    )

    # ---- resume: prompts and all that is drawn are functions of (seed, step), so weights and optimiser are the whole
    # state, and what was measured before
    restored = session.begin("mtp healing", steps, model, optimizer)
    step = restored.step if restored else 0
    measured: dict[str, dict[str, float]] = restored.state["measured"] if restored else {}

    while True:
        # ---- 1. What changes no weight: save where that is due, measure, draw the responses
        with session.head_of_step(step, {"measured": measured}):
            if step in (0, steps) or (cfg.boosting.val_period and step % cfg.boosting.val_period == 0):
                measured[str(step)] = measure(cfg, session, model, data)
                lengths = {f"valid_acceptance_length_{mode}": value for mode, value in measured[str(step)].items()}
                session.run.metrics.log(step, **lengths)
                session.progress.note(
                    f"step {step}: acceptance length {measured[str(step)]['greedy']:.3f} greedy, "
                    f"{measured[str(step)]['sampled']:.3f} sampled"
                )
            if step == steps:
                break
            began = time.perf_counter()
            with session.dealt_out(), session.autocast:
                responses = draw_responses(cfg, session, data, step, model)
            generated = time.perf_counter()

        # ---- 2. One update of the block. Loss: sum over drafted tokens / number of them in the global batch
        set_lr(optimizer, lr := warmed_up_lr(step, policy))
        model.mtp.train()  # its routers count their load; those of the trunk stay as they are
        source = torch.Generator().manual_seed(seed_of(cfg.seed, step, ranks.rank, 1))
        loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for micro in pack_responses(
            responses, policy.max_total_sequence_length, policy.train_micro_batch_size, cfg.boosting.mtp_num_layers,
            source,
        ):  # fmt: skip
            with session.autocast:
                loss = boosting_loss_sum(model, micro.to(ranks.device), cfg.boosting.temperature)
            loss.backward()
            loss_sum += loss.detach()
        drafted = sum(response.num_drafted for response in responses)
        grad_norm = step_policy(session, policy, torch.tensor([drafted], device=ranks.device))
        model.eval()
        if not math.isfinite(grad_norm):
            raise RunFailed(f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps")

        # ---- 3. Records
        step += 1
        sums = sum_metrics(
            {
                "loss": loss_sum,
                "drafted_tokens": drafted,
                "tokens": sum(len(response.ids) for response in responses),
                "completion_tokens": sum(response.num_written for response in responses),
                "truncated": sum(response.ids[-1] not in data.stop_ids for response in responses),
                "responses": len(responses),
            },
            ranks,
        )
        metrics = {
            "loss": sums["loss"] / max(sums["drafted_tokens"], 1),
            "drafted_tokens": sums["drafted_tokens"],
            **{name: sums[name] / sums["responses"] for name in ("completion_tokens", "truncated")},
        }
        seconds = {"seconds_generate": generated - began, "seconds_train": time.perf_counter() - generated}
        session.run.metrics.log(step, **metrics, grad_norm=grad_norm, lr=lr, **seconds)
        tokens = sums["tokens"]
        session.progress.update(step, tokens=int(tokens), flops=flops_per_token * tokens, loss=metrics["loss"])
    session.progress.close()
    return model, measured


def draw_responses(cfg: MTPHealingConfig, session: Session, data: Data, step: int, model: NemotronH) -> list[Response]:
    """One response to each of this rank's prompts of a step, drawn at temperature 1, in the order of the prompts."""
    ranks = session.ranks
    tasks = data.source.batch(step)[ranks.rank :: ranks.world_size]
    calls = cut_into_calls(
        tasks, data.encode(tasks, cfg), cfg.policy.generation.batch_size, [cfg.seed, step, ranks.rank]
    )
    responses: dict[int, Response] = {}
    for call in calls:
        out = generate(
            model, call.prompts, cfg.policy.generation.max_new_tokens, stop_token_ids=data.stop_ids,
            generator=torch.Generator(device=ranks.device).manual_seed(call.seed), poll=session.stop.poll,
        )  # fmt: skip
        for index, prompt, tokens in zip(call.indices, call.prompts, out.tokens, strict=True):
            responses[index] = Response([*prompt, *tokens], len(prompt))
    return [responses[index] for index in range(len(tasks))]


def measure(cfg: MTPHealingConfig, session: Session, model: NemotronH, data: Data) -> dict[str, float]:
    """Acceptance length on the validation prompts, of which each rank has a share, greedy and at temperature 1."""
    ranks, k, generation = session.ranks, cfg.boosting.num_speculative_tokens, cfg.policy.generation
    tasks = data.valid[ranks.rank :: ranks.world_size]
    counts: dict[str, float | torch.Tensor] = {f"{name}_{mode}": 0 for mode in MODES for name in ("rounds", "kept")}
    with session.dealt_out(), session.autocast:
        calls = cut_into_calls(tasks, data.encode(tasks, cfg), generation.batch_size, [cfg.seed, ranks.rank])
        for call in calls:
            for mode, temperature in MODES.items():
                _, acceptance = generate_speculative(
                    model, call.prompts, generation.max_new_tokens, k, temperature, data.stop_ids,
                    torch.Generator(device=ranks.device).manual_seed(call.seed), session.stop.poll,
                )  # fmt: skip
                counts[f"rounds_{mode}"] += acceptance.rounds
                counts[f"kept_{mode}"] += sum(acceptance.accepted)
    sums = sum_metrics(counts, ranks)
    return {mode: 1 + sums[f"kept_{mode}"] / max(sums[f"rounds_{mode}"], 1) for mode in MODES}


def seed_of(*entropy: int) -> int:
    """A seed for a generator of torch, from numbers that name what it is for."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
