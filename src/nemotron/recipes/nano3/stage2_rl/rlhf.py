#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Reinforcement learning from a judge's preferences (RLHF): GRPO with rewards by a generative reward model."
# name = "nano3/rlhf"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/rlhf"
# format = "omegaconf"
# schema = "rlhf_schema.py:RLHFConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2: reinforcement learning from preferences, GRPO with a judge.

    nemotron nano3 rl rlhf -c tiny
    python rlhf.py --config tiny grpo.max_num_steps=5
    torchrun --nproc-per-node 8 rlhf.py --config tiny

A step: draw prompts, sample a group of completions for each, let the judge compare each with the next one of its group,
turn its scores into rewards, with bonuses and weights for being short, and take one optimiser step as in `rlvr.py`.
Whether an answer is right gives no reward here; it is measured beside it. Publishes the weights of the last step, and
how they compare with those before: answers right, lengths, and how often a judge prefers them.

Simplified against the paper (tech report, arXiv 2512.20848, section 3.3): prompts of the verifiable families instead of
people's, and the judge of `genrm.py`. Circular comparisons, tie-break, bonuses, length weights, GRPO are the paper's.
docs/guides/rl-metrics.md explains every number that is logged.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Results, RLPrompts, print_complete, read_pipe
from nemotron.kit.chat import THINK
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import Task, load_environments, verifiable_families, verify_all
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.intervals import bootstrap_interval
from nemotron.stack.evaluation.model import evaluate_model, held_out_tasks, load_tokenizer, stop_token_ids
from nemotron.stack.evaluation.scoring import Evaluation, prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.rl.dialogue import Dialogue
from nemotron.stack.rl.genrm import Response
from nemotron.stack.rl.grpo import (
    Batch,
    load_policy,
    log_samples,
    prompts_per_call,
    step_metrics,
    token_advantages,
    update,
)
from nemotron.stack.rl.judging import Judge, judged_rewards, wins
from nemotron.stack.rl.policy import warmed_up_lr
from nemotron.stack.rl.prompts import PromptSource, check_same_families, encode_prompts, verifiable_shares
from nemotron.stack.rl.rollouts import collect_rollouts
from nemotron.stack.training.distributed import Ranks, stop_distributed, sum_metrics
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.rlhf_schema import RLHFConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: RLHFConfig = load_script_config(__file__, inputs=read_pipe)
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
            },
            num_steps=steps, dataset_path=data.prompts.path, chat_template=data.initial.chat_template,
            reasoning=cfg.env.enable_thinking,
        )  # fmt: skip
        with session.run.phase("evaluate"):
            results = Results(metrics=before_and_after(cfg, session, model, data)).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, the judge, and prompts to train on."""

    initial: Checkpoint
    template: str
    tokenizer: Tokenizer
    stop_ids: list[int]
    prompts: RLPrompts
    source: PromptSource
    judge: Judge

    def encode(self, tasks: list[Task], cfg: RLHFConfig) -> list[list[int]]:
        """The prompts of tasks in tokens; UserError where one leaves no room for a response."""
        texts = [prompt_text(task, self.template, cfg.env.enable_thinking) for task in tasks]
        new, most = cfg.policy.generation.max_new_tokens, cfg.policy.max_total_sequence_length
        return encode_prompts(texts, self.tokenizer, max_new_tokens=new, max_length=most)


def open_data(cfg: RLHFConfig, ranks: Ranks) -> Data:
    """Model, judge and prompts. Which prompts a step draws is a function of the seed and the step."""
    prompts, initial = RLPrompts.load(path=cfg.data.path), Checkpoint.load(path=cfg.policy.model_name)
    ranks.check_divides("grpo.num_prompts_per_step", cfg.grpo.num_prompts_per_step)
    cfg.env.families = verifiable_shares(cfg.env.families, cfg.env.sandbox)
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    if (template := initial.template) is None:
        raise UserError(f"{initial.ref} has no chat template", "RLHF starts from a model after SFT")
    if prompts.train_path is None:
        raise UserError(f"{prompts.ref} has no training prompts")
    yours = load_environments(cfg.env.environments)
    source = PromptSource(prompts.train_path, cfg.env.families, cfg.grpo.num_prompts_per_step, cfg.seed, yours)
    source.check_comparable()
    stop_ids = stop_token_ids(initial.path, template)
    judge = open_judge(cfg, cfg.judge.model_path, ranks.device)
    data = Data(initial, template, load_tokenizer(initial.path), stop_ids, prompts, source, judge)
    data.encode(source.drawn(cfg.grpo.max_num_steps), cfg)  # what has no room is refused now
    return data


def open_judge(cfg: RLHFConfig, folder: Path, device: torch.device) -> Judge:
    """The judge in `folder`, under its own chat template and tokenizer."""
    checkpoint = Checkpoint.load(path=folder)
    if (template := checkpoint.template) is None:
        raise UserError(
            f"{checkpoint.ref} has no chat template, so it is no judge", "nemotron nano3 rl genrm trains one"
        )
    model = NemotronH.from_pretrained(checkpoint.path, device=device).eval()
    return Judge(model, load_tokenizer(checkpoint.path), template, cfg.judge)


def train(cfg: RLHFConfig, session: Session, data: Data) -> NemotronH:
    """The GRPO loop. Returns the trained model."""
    ranks, steps = session.ranks, cfg.grpo.max_num_steps
    tokens = cfg.policy.train_micro_batch_size * cfg.policy.max_total_sequence_length
    group, of_rank = cfg.grpo.num_generations_per_prompt, cfg.grpo.num_prompts_per_step // ranks.world_size
    judge = Needs(
        data.judge.model.config, 0, completions=min(cfg.judge.batch_size, of_rank * group),
        completion_tokens=cfg.judge.max_prompt_tokens + cfg.judge.max_new_tokens,
    )  # fmt: skip
    needs = Needs(
        load_config(data.initial.path), tokens, copies=bool(cfg.loss_fn.reference_policy_kl_penalty),
        completions=min(prompts_per_call(cfg), of_rank) * group,
        completion_tokens=cfg.policy.max_total_sequence_length, judge=judge,
    )  # fmt: skip
    check_memory(session, needs, "policy.train_micro_batch_size")
    torch.manual_seed(cfg.seed)
    model, reference = load_policy(cfg, data.initial.path, ranks.device)
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    trained = replace(model.config, mtp_num_layers=cfg.policy.mtp_num_layers)  # depths of this stage
    flops_per_token = training_flops_per_token(trained, cfg.policy.max_total_sequence_length)

    # ---- resume: prompts, sampling and verdicts are functions of (seed, step), so weights and optimiser are the whole
    # state
    samples = session.open_log("rollouts")
    restored = session.begin("rlhf", steps, model, optimizer)
    check_same_families(restored, list(cfg.env.families))
    step = restored.step if restored else 0

    while True:
        # ---- 1. What changes no weight: save where that is due, draw the rollouts and what the judge says of them
        with session.head_of_step(step, {"families": list(cfg.env.families)}):
            if step == steps:
                break
            began = time.perf_counter()
            batch, measured = draw_rollouts(cfg, session, model, data, step)
            generated = time.perf_counter()

        # ---- 2. Advantages: how much better than the other completions of the same prompt
        advantages, without_gradient = token_advantages(batch.rollouts, cfg.grpo)

        # ---- 3. One update
        lr = warmed_up_lr(step, cfg.policy)
        set_lr(optimizer, lr)
        grad_norm, record = update(cfg, session, reference, batch.rollouts, advantages)
        if not math.isfinite(grad_norm):
            raise RunFailed(f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps")

        # ---- 4. Records
        step += 1
        seconds = {"seconds_generate": generated - began, "seconds_train": time.perf_counter() - generated}
        metrics = step_metrics(cfg.grpo, ranks, batch, record, without_gradient)
        sums = sum_metrics(measured, ranks)
        lengths = ("reasoning_chars", "answer_chars", "forfeited")
        metrics |= {name: sums[name] / sums["completions"] for name in lengths}
        metrics["accuracy"] = sums["right"] / max(sums["verified"], 1)
        metrics["comparisons_too_long"] = sums["comparisons_too_long"]
        session.run.metrics.log(step, **metrics, grad_norm=grad_norm, lr=lr, **seconds)
        if ranks.is_main:
            log_samples(samples, step, batch, data.tokenizer, cfg.logger.log_samples)
        # Generated tokens cost a forward pass, a third of a training token; those of the judge are not counted.
        flops = flops_per_token * (metrics["trained_tokens"] + metrics["tokens"] / 3)
        session.progress.update(step, tokens=int(metrics["tokens"]), flops=flops, reward=metrics["reward"])
    session.progress.close()
    return model


def draw_rollouts(
    cfg: RLHFConfig, session: Session, model: NemotronH, data: Data, step: int
) -> tuple[Batch, dict[str, float]]:
    """A group of completions for each of this rank's prompts with their rewards, and what is measured, as sums."""
    ranks, thinking, generation = session.ranks, cfg.env.enable_thinking, cfg.policy.generation
    tasks = data.source.batch(step)[ranks.rank :: ranks.world_size]
    prompts = data.encode(tasks, cfg)
    sampling_seed, judge_seed = np.random.SeedSequence([cfg.seed, step, ranks.rank]).generate_state(2).tolist()
    groups: dict[int, list[Response]] = {}
    scores: list[float] = []  # of the answers that could be verified

    def begin(index: int) -> Dialogue:
        return Dialogue(None, data.tokenizer, data.template, thinking)

    def keep(index: int, dialogues: list[Dialogue]) -> list[float | None]:
        written, opened = [dialogue.response for dialogue in dialogues], dialogues[0].opened
        groups[index] = [Response.of(f"{THINK}{text}" if opened else text) for text in written]
        verdicts = verify_all([tasks[index]] * len(written), written, opened, cfg.env.sandbox)
        scores.extend(verdict.score for verdict in verdicts if verdict.status != "error")
        return [None] * len(written)

    # In the trainer's precision and at temperature 1: otherwise generator and trainer would be two policies.
    with session.dealt_out(), session.autocast:
        rollouts = collect_rollouts(
            model, prompts, begin, keep, samples_per_prompt=cfg.grpo.num_generations_per_prompt,
            max_new_tokens=generation.max_new_tokens, max_length=cfg.policy.max_total_sequence_length,
            stop_token_ids=data.stop_ids, prompts_per_call=prompts_per_call(cfg),
            generator=torch.Generator(device=ranks.device).manual_seed(sampling_seed), poll=session.stop.poll,
        )  # fmt: skip
        asked = [(task, groups[index]) for index, task in enumerate(tasks)]
        rewards, errors, too_long = judged_rewards(data.judge, asked, cfg.reward, judge_seed, session.stop.poll)
    of_rollouts = [reward for group in rewards for reward in group]
    for rollout, reward in zip(rollouts, of_rollouts, strict=True):
        rollout.reward = reward
    responses = [response for group in groups.values() for response in group]
    measured: dict[str, float] = {
        "completions": len(responses),
        "verified": len(scores),
        "right": sum(scores),
        "reasoning_chars": sum(len(response.reasoning) for response in responses),
        "answer_chars": sum(len(response.answer) for response in responses),
        "forfeited": sum(response.forfeits for response in responses),
        "comparisons_too_long": too_long,
    }
    return Batch(tasks, rollouts, errors, list(cfg.env.families)), measured


def before_and_after(cfg: RLHFConfig, session: Session, model: NemotronH, data: Data) -> dict[str, Any]:
    """The model as it is now beside the one that training began with, on held-out tasks, responses sampled.

    `tasks` and `before`: pass@1; `comparison`: of both, paired; `lengths`: characters; `win_rate`: what `win_rate` says
    of each judge's verdicts, on tasks of the families that training drew.
    """
    tasks = held_out_tasks(cfg.evaluation.tasks_per_family, cfg.evaluation)
    if not tasks:
        return {}
    initial = NemotronH.from_pretrained(data.initial.path, device=session.ranks.device)
    evaluations = [
        evaluate_model(
            which, data.initial.path, tasks, cfg.evaluation, template=data.template, thinking=cfg.env.enable_thinking,
            poll=session.stop.poll, show_progress=True,
        )
        for which in (initial, model)
    ]  # fmt: skip
    before, after = evaluations
    responses = [sampled_responses(evaluation) for evaluation in evaluations]
    judged = judged_families(cfg, list(after.families))
    judges = {"judge": data.judge} if judged else {}
    if judged and cfg.judge.test_model_path is not None:
        judges["test_judge"] = open_judge(cfg, cfg.judge.test_model_path, session.ranks.device)

    def won(judge: Judge, family: str) -> np.ndarray:
        """How often the model after wins, of each task and sample."""
        rows = after.rows(family).tolist()
        pairs = [
            (tasks[row], new, old)
            for row in rows
            for old, new in zip(responses[0][row], responses[1][row], strict=True)
        ]
        of_pairs = wins(judge, pairs, cfg.evaluation.seed, session.stop.poll)
        return np.array(of_pairs).reshape(len(rows), -1)

    win_rates = {}
    for name, judge in judges.items():
        rates = win_rates[name] = win_rate([won(judge, family) for family in judged])
        decided = f", of the decided pairs {rates['decided']['estimate']:.3f}" if rates["decided"] else ""
        print(
            f"{name} prefers the model after to before: {rates['estimate']:.3f} with ties as half, "
            f"{rates['ties']:.1%} of the pairs{decided}",
            file=sys.stderr,
        )
    return {
        "tasks": after.metrics(),
        "before": before.metrics(),
        "comparison": {which: compare(before, after, which).metrics() for which in ("greedy", "sampled")},
        "lengths": {name: mean_lengths(r) for name, r in zip(("before", "after"), responses, strict=True)},
        "win_rate": win_rates,
    }


def win_rate(of_families: Sequence[np.ndarray]) -> dict[str, Any]:
    """How often the model after is preferred, with 95 % intervals.

    `estimate`, `low`, `high`: of all pairs, a tie as half a win, mean over the families. `ties`: their share of the
    pairs; most are of responses that training has not changed. `decided`: how often it wins of the other pairs, mean
    over the tasks that have such a pair, of all families together; None where there is none.

    Args:
        of_families: `wins` of each family, [tasks, samples].
    """
    wins_TS = np.concatenate(of_families)
    won_T, lost_T = (wins_TS > 0.5).sum(1), (wins_TS < 0.5).sum(1)
    is_decided_T = won_T + lost_T > 0
    rates_T = won_T[is_decided_T] / (won_T + lost_T)[is_decided_T]
    return {
        **asdict(bootstrap_interval([wins_TS.mean(1) for wins_TS in of_families])),
        "ties": float((wins_TS == 0.5).mean()),
        "decided": asdict(bootstrap_interval([rates_T])) if len(rates_T) else None,
    }


def judged_families(cfg: RLHFConfig, evaluated: list[str]) -> list[str]:
    """The evaluated families that training drew, those of the win rate; says so where there is none."""
    judged = [family for family in evaluated if family in cfg.env.families]
    if not judged:
        print(
            f"no win rate: training drew {', '.join(cfg.env.families)}, and evaluation.families has "
            f"{', '.join(evaluated)}",
            file=sys.stderr,
        )
    return judged


def sampled_responses(evaluation: Evaluation) -> list[list[Response]]:
    """The sampled responses to each task."""
    return [
        [Response.of(f"{THINK}{completion.text}" if opened else completion.text) for completion in several]
        for several, opened in zip(evaluation.sampled_completions, evaluation.opened, strict=True)
    ]


def mean_lengths(responses: list[list[Response]]) -> dict[str, float]:
    """Characters of reasoning and of answers, mean over all responses."""
    flat = [response for several in responses for response in several]
    return {
        "reasoning_chars": sum(len(response.reasoning) for response in flat) / max(len(flat), 1),
        "answer_chars": sum(len(response.answer) for response in flat) / max(len(flat), 1),
    }


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
