#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Reinforcement learning from verifiable rewards (GRPO) in several environment families at once."
# name = "nano3/rl"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "schema.py:RLConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2: reinforcement learning from verifiable rewards, GRPO.

    nemotron nano3 rl rlvr -c tiny
    python rlvr.py --config tiny grpo.max_num_steps=5
    torchrun --nproc-per-node 8 rlvr.py --config small

A step: draw prompts of all families in a fixed ratio, sample a group of completions for each, let the environments
verify them, turn rewards into group-relative advantages, take one optimiser step. Publishes the weights of the last
step, and their results: pass@1 on held-out tasks, greedy and sampled.

Simplified against the paper (tech report, arXiv 2512.20848, section 3.2): generated families instead of nine
sources; prompts by pass rate only with `data.curriculum`; every process holds the whole model; the trainer is its own
generator in the same precision, so the ratio between the two is 1 up to rounding and masked importance sampling has
next to nothing to mask, unless generation runs ahead (`grpo.async_grpo`; stack/rl/rollout_buffer.py); Ray's workers
(`cluster.rollout_workers`; stack/rl/ray_workers.py) draw what this process would. Leave-one-out
baseline and standard deviation, asymmetric clip, token-level loss, one update a batch, overlong filtering, frozen
router with moving expert bias are the paper's. With one update a batch the policy ratio is 1 when the gradient is
taken, so the clip never acts; it stands in the loss because it does as soon as a batch is split into several updates.
Completions without a gradient (all of a prompt have one reward) are not read again, so that the bias moves by the load
of the others; NeMo-RL reads all.
docs/guides/rl-metrics.md explains every number that is logged.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Results, RLPrompts, print_complete, read_pipe
from nemotron.kit.chat_template import load_template
from nemotron.kit.commands import command_hint
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.stack.environments import Task, load_environments, runs_programs, verifiable_families
from nemotron.stack.evaluation.model import evaluate_model, load_tokenizer, score_tasks, stop_token_ids
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.rl.calls import RolloutSettings, cut_into_calls, draw_call, merge_calls
from nemotron.stack.rl.grpo import (
    Batch,
    check_verified,
    load_policy,
    log_samples,
    prompts_per_call,
    step_metrics,
    token_advantages,
    update,
)
from nemotron.stack.rl.policy import warmed_up_lr
from nemotron.stack.rl.prompts import (
    PromptSource,
    check_same_families,
    encode_prompts,
    has_turns,
    read_prompts,
    verifiable_shares,
)
from nemotron.stack.rl.ray_workers import Job, RayWorkers, open_workers
from nemotron.stack.rl.rollout_buffer import RolloutBuffer
from nemotron.stack.training.distributed import Ranks, stop_distributed, sum_metrics
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.schema import RLConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: RLConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        steps, prompts_per_step = cfg.grpo.max_num_steps, cfg.grpo.num_prompts_per_step
        published = publish_model(
            session.run, model, data.initial.path,
            {
                "rollouts": steps * prompts_per_step * cfg.grpo.num_generations_per_prompt,
                "families": list(cfg.env.families),
                "sandbox": cfg.env.sandbox if runs_programs(cfg.env.families) else None,
            },
            num_steps=steps, dataset_path=data.prompts.path, chat_template=data.initial.chat_template,
            reasoning=cfg.env.enable_thinking,
        )  # fmt: skip
        with session.run.phase("evaluate"):
            scores = score_tasks(
                model, data.initial.path, cfg.evaluation, template=data.template, thinking=cfg.env.enable_thinking,
                poll=session.stop.poll,
            )  # fmt: skip
            results = Results(metrics=scores).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, and prompts to train on and to validate on (never those of the evaluation split)."""

    initial: Checkpoint
    template: str
    tokenizer: Tokenizer
    stop_ids: list[int]
    prompts: RLPrompts
    source: PromptSource
    valid: list[Task]
    ranks: Ranks
    workers: RayWorkers | None = None  # who draws the rollouts; none: this process

    def tasks(self, step: int) -> list[Task]:
        """This rank's share of the prompts of a step."""
        return self.source.batch(step)[self.ranks.rank :: self.ranks.world_size]

    def encode(self, tasks: list[Task], cfg: RLConfig) -> list[list[int]]:
        """The prompts of tasks in tokens; UserError where one leaves no room for a response."""
        texts = [prompt_text(task, self.template, cfg.env.enable_thinking) for task in tasks]
        new, most = cfg.policy.generation.max_new_tokens, cfg.policy.max_total_sequence_length
        return encode_prompts(texts, self.tokenizer, max_new_tokens=new, max_length=most)

    def settings(self, cfg: RLConfig) -> RolloutSettings:
        """What holds for all rollouts."""
        return RolloutSettings(
            self.template, cfg.env.enable_thinking, cfg.env.sandbox, cfg.env.effort_levels,
            samples_per_prompt=cfg.grpo.num_generations_per_prompt,
            max_new_tokens=cfg.policy.generation.max_new_tokens, max_turns=cfg.grpo.max_rollout_turns,
            max_length=cfg.policy.max_total_sequence_length, stop_token_ids=self.stop_ids,
        )  # fmt: skip


def open_data(cfg: RLConfig, ranks: Ranks) -> Data:
    """Model and prompts. Which prompts a step draws is a function of the seed and the step."""
    prompts, initial = RLPrompts.load(path=cfg.data.path), Checkpoint.load(path=cfg.policy.model_name)
    ranks.check_divides("grpo.num_prompts_per_step", cfg.grpo.num_prompts_per_step)
    cfg.env.families = verifiable_shares(cfg.env.families, cfg.env.sandbox)
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    if (template := initial.template) is None:
        raise UserError(f"{initial.ref} has no chat template", "RL starts from a model after SFT")
    if prompts.train_path is None:
        raise UserError(f"{prompts.ref} has no training prompts")
    yours = load_environments(cfg.env.environments)
    source = PromptSource(prompts.train_path, cfg.env.families, cfg.grpo.num_prompts_per_step, cfg.seed, yours)
    if cfg.data.curriculum:
        source.follow(cfg.data.curriculum, cfg.grpo.max_num_steps)
    pools = read_prompts(prompts.valid_path, yours) if prompts.valid_path else {}
    valid = [task for family in cfg.env.families for task in pools.get(family, [])[: cfg.grpo.val_tasks_per_family]]
    stop_ids = stop_token_ids(initial.path, template)
    if cfg.grpo.max_rollout_turns > 1 and not load_template(template).keeps_turns:
        source.check_single_responses(
            f"the template of {initial.ref} tells earlier turns anew, and a policy is trained on what it wrote"
        )
    data = Data(initial, template, load_tokenizer(initial.path), stop_ids, prompts, source, valid, ranks)
    data.encode(source.drawn(cfg.grpo.max_num_steps), cfg)  # what has no room is refused now
    return data


def train(cfg: RLConfig, session: Session, data: Data) -> NemotronH:
    """The GRPO loop. Returns the trained model."""
    ranks, steps, ahead = session.ranks, cfg.grpo.max_num_steps, cfg.grpo.async_grpo
    micro_batch_tokens = cfg.policy.train_micro_batch_size * cfg.policy.max_total_sequence_length
    prompts_of_rank = cfg.grpo.num_prompts_per_step // ranks.world_size
    prompts_of_call = min(prompts_per_call(cfg), prompts_of_rank)
    conversations = 0
    if cfg.grpo.max_rollout_turns > 1:
        conversations = min(prompts_of_call, max(sum(map(has_turns, data.tasks(step))) for step in range(steps)))
    needs = Needs(
        load_config(data.initial.path), micro_batch_tokens,
        copies=bool(cfg.loss_fn.reference_policy_kl_penalty) + ahead.enabled * (ahead.max_trajectory_age_steps + 2),
        completions=prompts_of_call * cfg.grpo.num_generations_per_prompt,
        completion_tokens=cfg.policy.max_total_sequence_length,
        conversations=conversations * cfg.grpo.num_generations_per_prompt, decodes_beside=ahead.enabled,
    )  # fmt: skip
    check_memory(session, needs, "policy.train_micro_batch_size")
    torch.manual_seed(cfg.seed)
    model, reference = load_policy(cfg, data.initial.path, ranks.device)
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    trained = replace(model.config, mtp_num_layers=cfg.policy.mtp_num_layers)  # depths of this stage
    flops_per_token = training_flops_per_token(trained, cfg.policy.max_total_sequence_length)

    # ---- resume: prompts and sampling are functions of (seed, step), so the whole state is weights, optimiser and the
    # rollouts that were drawn ahead
    samples = session.open_log("rollouts")
    restored = session.begin("rl", steps, model, optimizer)
    check_same_families(restored, list(cfg.env.families))
    state = {"families": list(cfg.env.families)}
    step = restored.step if restored else 0
    job = Job(
        model.config, data.tokenizer.to_str(), data.settings(cfg), cfg.env.environments,
        runs_programs=runs_programs(cfg.env.families), bf16=session.bf16, device=ranks.device.type,
        num_threads=torch.get_num_threads(),
    )  # fmt: skip

    with ExitStack() as stack:
        num_calls = math.ceil(prompts_of_rank / prompts_of_call)
        data.workers = stack.enter_context(open_workers(cfg.cluster.rollout_workers, num_calls, session, job))
        draw = partial(draw_rollouts, cfg, data)
        buffer: RolloutBuffer | None = None
        if ahead.enabled:
            buffer = stack.enter_context(RolloutBuffer(cfg, session, ahead.max_trajectory_age_steps, data.tasks, draw))
        if buffer and restored:
            buffer.restore(step, restored.tensors)
        while True:
            # ---- 1. What changes no weight: save where that is due, validate, draw the rollouts. Where a signal cuts
            # this short, the rollouts are dropped, and a resumed run draws the same ones.
            with session.head_of_step(step, state, partial(buffer.tensors, step) if buffer else dict):
                if data.valid and cfg.grpo.val_period and (step % cfg.grpo.val_period == 0 or step == steps):
                    metrics = validate(cfg, session, model, data)
                    session.run.metrics.log(step, **metrics)
                    session.progress.note(
                        f"step {step}: validation pass@1 {metrics['valid_greedy']:.3f} greedy, "
                        f"{metrics['valid_sampled']:.3f} sampled"
                    )
                if step == steps:
                    break
                began = time.perf_counter()
                with session.dealt_out(), session.autocast:
                    batch = buffer.take(step) if buffer else draw(model, step, session.stop.poll)
                generated = time.perf_counter()

            # ---- 2. Advantages: how much better than the other completions of the same prompt
            advantages, without_gradient = token_advantages(batch.rollouts, cfg.grpo)

            # ---- 3. One update
            lr = warmed_up_lr(step, cfg.policy)
            set_lr(optimizer, lr)
            grad_norm, record = update(cfg, session, reference, batch.rollouts, advantages)
            if not math.isfinite(grad_norm):
                raise RunFailed(
                    f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps"
                )

            # ---- 4. Records
            step += 1
            seconds = {"seconds_generate": generated - began, "seconds_train": time.perf_counter() - generated}
            metrics = step_metrics(cfg.grpo, ranks, batch, record, without_gradient) | data.source.pass_rate(step - 1)
            if buffer:
                metrics |= buffer.metrics(step - 1, metrics)
            session.run.metrics.log(step, **metrics, grad_norm=grad_norm, lr=lr, **seconds)
            if ranks.is_main:
                log_samples(samples, step, batch, data.tokenizer, cfg.logger.log_samples)
            # Generated tokens cost a forward pass, a third of a training token.
            flops = flops_per_token * (metrics["trained_tokens"] + metrics["tokens"] / 3)
            session.progress.update(step, tokens=int(metrics["tokens"]), flops=flops, reward=metrics["reward"])
    session.progress.close()
    return model


def draw_rollouts(cfg: RLConfig, data: Data, model: NemotronH, step: int, poll: Callable[[], None]) -> Batch:
    """A group of completions for each of this rank's prompts of a step, sampled from `model`, and their rewards."""
    tasks = data.tasks(step)
    calls = cut_into_calls(tasks, data.encode(tasks, cfg), prompts_per_call(cfg), [cfg.seed, step, data.ranks.rank])
    # In the trainer's precision and at temperature 1: otherwise generator and trainer would be two policies.
    if data.workers:
        of_calls = data.workers.draw(model, calls, poll)
    else:
        of_calls = [draw_call(call, model, data.tokenizer, data.settings(cfg), poll) for call in calls]
    drawn = merge_calls(calls, of_calls)
    return Batch(tasks, drawn.rollouts, drawn.errors, list(cfg.env.families))


def validate(cfg: RLConfig, session: Session, model: NemotronH, data: Data) -> dict[str, float]:
    """pass@1 on the validation prompts, greedy and sampled, mean over the families. Each rank does a share of them.

    RunFailed where the verification of too many responses, of all ranks together, failed.
    """
    ranks, generation = session.ranks, cfg.policy.generation
    settings = ResponsesConfig(
        samples=1, max_new_tokens=generation.max_new_tokens, max_turns=cfg.grpo.max_rollout_turns,
        batch_size=generation.batch_size, seed=cfg.seed, sandbox=cfg.env.sandbox,
        max_error_rate=1.0,  # of a rank's share; that of all is looked at below
    )  # fmt: skip
    with session.dealt_out(), session.autocast:
        evaluation = evaluate_model(
            model, data.initial.path, data.valid[ranks.rank :: ranks.world_size], settings, template=data.template,
            thinking=cfg.env.enable_thinking, poll=session.stop.poll,
        )  # fmt: skip
    families = list(dict.fromkeys(task.family for task in data.valid))
    responses = evaluation.greedy_T.size + evaluation.sampled_TS.size
    of_all = sum_metrics({"errors": len(evaluation.errors), "responses": responses}, ranks)
    check_verified(of_all["errors"], of_all["responses"], cfg.grpo, evaluation.errors)
    sums = sum_metrics(evaluation.counts(families), ranks)

    def mean_rate(which: str) -> float:
        return sum(sums[which, f, "right"] / max(sums[which, f, "scored"], 1) for f in families) / len(families)

    return {"valid_greedy": mean_rate("greedy"), "valid_sampled": mean_rate("sampled")}


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
