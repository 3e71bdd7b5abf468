#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Trains a generative reward model (GenRM): a judge that compares two responses, by GRPO."
# name = "nano3/genrm"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/genrm"
# format = "omegaconf"
# schema = "genrm_schema.py:GenRMConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2: a generative reward model, the judge of RLHF.

    nemotron nano3 rl genrm -c tiny
    nemotron nano3 rl genrm -c tiny 'data.comparisons=[comparisons.jsonl]'
    torchrun --nproc-per-node 8 genrm.py --config tiny

The judge reads a prompt with two responses, reasons, and writes two scores and a ranking. A step: draw tasks, let the
model as it was answer each several times, verify the answers, show the judge pairs of which one is better, in both
orders, and reward verdicts by how close they are to the truth. The first steps imitate right verdicts instead, on pairs
that a program makes: the tiny model has never seen their form. Publishes the judge, and how often it prefers what is
better on held-out tasks.

Simplified against the paper (tech report, arXiv 2512.20848, section 3.2): comparisons of verifiable responses, right
over wrong and short over long, instead of people's (HelpSteer3, lmarena) and of safety; a model of the same size as the
policy instead of Qwen3-235B. Reward, both orders and one update a batch are the paper's.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemo_runspec.words import counted
from nemotron.kit import Checkpoint, Results, RLPrompts, print_complete, read_pipe
from nemotron.kit.chat import THINK, template_opens_reasoning
from nemotron.kit.commands import command_hint
from nemotron.kit.schemas.rl import JudgeConfig
from nemotron.stack.environments import Task, load_environments, verify_all
from nemotron.stack.evaluation.model import load_tokenizer, model_generate_fn, stop_token_ids
from nemotron.stack.evaluation.scoring import GenerateFn, prompt_text
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.rl.comparisons import (
    demonstration,
    different,
    first_comparison,
    hold_out,
    made_comparisons,
    read_comparisons,
)
from nemotron.stack.rl.dialogue import Dialogue
from nemotron.stack.rl.genrm import Response
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
from nemotron.stack.rl.imitation import imitate
from nemotron.stack.rl.judging import Judge, count_preferred, preferred_rates, reward_of
from nemotron.stack.rl.policy import warmed_up_lr
from nemotron.stack.rl.prompts import (
    PromptSource,
    check_same_families,
    read_prompts,
    shuffled,
    verifiable_shares,
)
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts
from nemotron.stack.training.distributed import Ranks, stop_distributed, sum_metrics
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.genrm_schema import GenRMConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: GenRMConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model, scores = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        published = publish_model(
            session.run, model, data.initial.path, {"judge": scores, "families": data.families},
            num_steps=cfg.grpo.max_num_steps, dataset_path=data.prompts.path, chat_template=data.initial.chat_template,
            reasoning=cfg.env.enable_thinking,
        )  # fmt: skip
        results = Results(metrics={"judge": scores}).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, tasks to answer, and in place of these the user's own comparisons, where there are some.

    own_valid: those of a twentieth of the prompts, which are not trained on. families: those of the tasks, `comparison`
    alone where the comparisons are the user's.
    """

    initial: Checkpoint
    template: str
    tokenizer: Tokenizer
    stop_ids: list[int]
    prompts: RLPrompts
    source: PromptSource
    valid: list[Task]
    own: list[Task]
    own_valid: list[Task]
    families: list[str]


def open_data(cfg: GenRMConfig, ranks: Ranks) -> Data:
    """Model and tasks. What a step compares is a function of the seed and the step."""
    prompts, initial = RLPrompts.load(path=cfg.data.path), Checkpoint.load(path=cfg.policy.model_name)
    # In both orders on one rank.
    ranks.check_divides("half of grpo.num_prompts_per_step", cfg.grpo.num_prompts_per_step // 2)
    cfg.env.families = verifiable_shares(cfg.env.families, cfg.env.sandbox)
    if (template := initial.template) is None:
        raise UserError(f"{initial.ref} has no chat template", "a judge starts from a model after SFT")
    if prompts.train_path is None:
        raise UserError(f"{prompts.ref} has no training prompts")
    yours = load_environments(cfg.env.environments)
    # Twice as many tasks as comparisons: many tasks give none.
    source = PromptSource(prompts.train_path, cfg.env.families, 2 * cfg.grpo.num_prompts_per_step, cfg.seed, yours)
    source.check_comparable()
    pools = read_prompts(prompts.valid_path, yours) if prompts.valid_path else {}
    valid = [task for family in cfg.env.families for task in pools.get(family, [])[: cfg.grpo.val_tasks_per_family]]
    tokenizer, stop_ids = load_tokenizer(initial.path), stop_token_ids(initial.path, template)
    pairs = read_own(cfg, tokenizer, template, ranks)
    own, own_valid = ([task for pair in part for task in pair] for part in hold_out(pairs))
    families = ["comparison"] if own else list(cfg.env.families)
    return Data(initial, template, tokenizer, stop_ids, prompts, source, valid, own, own_valid, families)


def prompt_room(cfg: GenRMConfig) -> int:
    """Tokens that the prompt of a comparison may have."""
    return cfg.policy.max_total_sequence_length - cfg.policy.generation.max_new_tokens


def read_own(cfg: GenRMConfig, tokenizer: Tokenizer, template: str, ranks: Ranks) -> list[tuple[Task, Task]]:
    """The user's own comparisons that leave room for a verdict, in both orders, each once; says what is left out.

    UserError: files are named, and none of their comparisons can be used.
    """
    read, room = read_comparisons([Path(path) for path in cfg.data.comparisons], template), prompt_room(cfg)
    pairs = different(read)
    fitting = [pair for pair in pairs if max(map(len, prompts_of(cfg, tokenizer, template, pair))) <= room]
    limit = f"{room} tokens: policy.max_total_sequence_length less policy.generation.max_new_tokens"
    if cfg.data.comparisons and not fitting:
        where = ", ".join(cfg.data.comparisons)
        reason = f"all {len(pairs):,} have more than {limit}" if pairs else "there is none"
        raise UserError(f"data.comparisons: no comparison of {where} can be used, {reason}")
    if len(pairs) < len(read) and ranks.is_main:
        print(f"left out, as there twice: {counted(len(read) - len(pairs), 'comparison')}", file=sys.stderr)
    if len(fitting) < len(pairs) and ranks.is_main:
        print(f"left out: {counted(len(pairs) - len(fitting), 'comparison')} of more than {limit}", file=sys.stderr)
    return fitting


def prompts_of(cfg: GenRMConfig, tokenizer: Tokenizer, template: str, tasks: Sequence[Task]) -> list[list[int]]:
    """The tokens with which each comparison is asked."""
    texts = [prompt_text(task, template, cfg.env.enable_thinking) for task in tasks]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def train(cfg: GenRMConfig, session: Session, data: Data) -> tuple[NemotronH, dict[str, float]]:
    """Imitation, then GRPO. Returns the judge and its last validation."""
    ranks, steps = session.ranks, cfg.grpo.max_num_steps
    check_memory(session, memory_needs(cfg, load_config(data.initial.path), ranks), "policy.train_micro_batch_size")
    torch.manual_seed(cfg.seed)
    model, reference = load_policy(cfg, data.initial.path, ranks.device)
    initial = NemotronH.from_pretrained(data.initial.path, device=ranks.device).eval()  # answers the tasks
    answer = model_generate_fn(
        initial, data.initial.path, data.template, max_new_tokens=cfg.policy.generation.max_new_tokens,
        batch_size=cfg.policy.generation.batch_size, poll=session.stop.poll,
    )  # fmt: skip
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    trained = replace(model.config, mtp_num_layers=cfg.policy.mtp_num_layers)  # depths of this stage
    flops_per_token = training_flops_per_token(trained, cfg.policy.max_total_sequence_length)

    # ---- resume: comparisons and sampling are functions of (seed, step), so weights and optimiser are the whole state
    samples = session.open_log("rollouts")
    restored = session.begin("genrm", steps, model, optimizer)
    check_same_families(restored, data.families)
    step = restored.step if restored else 0
    scores: dict[str, float] = {}

    while True:
        imitates = step < cfg.judge.imitation_steps
        # ---- 1. What changes no weight: save where that is due, validate, draw comparisons and verdicts
        with session.head_of_step(step, {"families": data.families}):
            if (
                (data.own_valid if data.own else data.valid)
                and cfg.grpo.val_period
                and ((step > 0 and step % cfg.grpo.val_period == 0) or step == steps)
            ):
                scores = validate(cfg, session, answer, data)
                session.run.metrics.log(step, **scores)
                session.progress.note(f"step {step}: prefers the better one in {scores['valid_preferred']:.3f}")
            if step == steps:
                break
            began = time.perf_counter()
            with session.dealt_out(), session.autocast:
                drawn = draw_comparisons(cfg, session, answer, data, step)
            drawn.check_verified(cfg, ranks)
            comparisons = drawn.tasks
            if imitates:
                imitated = demonstrations(cfg, data, comparisons)
                usable = len(imitated)
            else:
                batch = draw_verdicts(cfg, session, data, comparisons, step)
                usable = len(batch.tasks)
            note_nothing_learned(session, step, len(comparisons), usable)
            generated = time.perf_counter()

        # ---- 2. One update
        if imitates:
            lr = imitation_lr(step, cfg)
            set_lr(optimizer, lr)
            grad_norm, metrics = imitate(session, cfg.policy, imitated)
        else:
            lr = warmed_up_lr(step - cfg.judge.imitation_steps, cfg.policy)
            set_lr(optimizer, lr)
            advantages, without_gradient = token_advantages(batch.rollouts, cfg.grpo)
            grad_norm, record = update(cfg, session, reference, batch.rollouts, advantages)
        if not math.isfinite(grad_norm):
            raise RunFailed(f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps")

        # ---- 3. Records
        step += 1
        seconds = {"seconds_generate": generated - began, "seconds_train": time.perf_counter() - generated}
        if not imitates:
            metrics = step_metrics(cfg.grpo, ranks, batch, record, without_gradient)
            if ranks.is_main:
                log_samples(samples, step, batch, data.tokenizer, cfg.logger.log_samples)
        session.run.metrics.log(step, **metrics, grad_norm=grad_norm, lr=lr, **seconds)
        shown = {"loss": metrics["loss"]} if imitates else {"reward": metrics["reward"]}
        # Generated tokens cost a forward pass, a third of a training token; those of the answers are not counted.
        generated_tokens = 0 if imitates else metrics["tokens"]
        flops = flops_per_token * (metrics["trained_tokens"] + generated_tokens / 3)
        session.progress.update(step, tokens=int(metrics["tokens"]), flops=flops, **shown)
    session.progress.close()
    return model, scores


def memory_needs(cfg: GenRMConfig, config: NemotronHConfig, ranks: Ranks) -> Needs:
    """What training takes: the model that answers the tasks stays beside the judge, and with a KL term a reference."""
    of_rank = cfg.grpo.num_prompts_per_step // ranks.world_size
    verdicts = min(prompts_per_call(cfg), of_rank) * cfg.grpo.num_generations_per_prompt
    answers = min(cfg.policy.generation.batch_size, 2 * of_rank * cfg.judge.responses_per_task)
    return Needs(
        config, cfg.policy.train_micro_batch_size * cfg.policy.max_total_sequence_length,
        copies=1 + bool(cfg.loss_fn.reference_policy_kl_penalty), completions=max(verdicts, answers),
        completion_tokens=cfg.policy.max_total_sequence_length,
    )  # fmt: skip


def demonstrations(cfg: GenRMConfig, data: Data, comparisons: Sequence[Task]) -> list[Rollout]:
    """The right verdicts on comparisons, as if the judge had written them; those that have no room are left out."""
    thinking, room = cfg.env.enable_thinking, cfg.policy.max_total_sequence_length
    rollouts = [demonstration(task, data.tokenizer, data.template, thinking) for task in comparisons]
    return [rollout for rollout in rollouts if len(rollout.prompt_ids) + len(rollout.completion_ids) <= room]


def note_nothing_learned(session: Session, step: int, drawn: int, usable: int) -> None:
    """Says so where no rank has a comparison to learn from: none was drawn, or none leaves room for a verdict."""
    sums = sum_metrics({"drawn": drawn, "usable": usable}, session.ranks)
    if sums["usable"]:
        return
    reason = "no two responses of which one is better"
    if sums["drawn"]:
        reason = (
            f"none of {counted(int(sums['drawn']), 'comparison')} leaves room for a verdict: "
            "raise policy.max_total_sequence_length"
        )
    session.progress.note(f"step {step + 1}: nothing is learned, {reason}")


def imitation_lr(step: int, cfg: GenRMConfig) -> float:
    """Linear warm-up, as in GRPO, and linear decay over the second half of the imitation steps."""
    warmed_up = min(1.0, (step + 1) / (cfg.policy.lr_warmup_iters + 1))
    return cfg.judge.imitation_lr * min(warmed_up, 2 * (1 - step / cfg.judge.imitation_steps))


@dataclass
class Comparisons:
    """Comparisons that a rank drew, one task for each order. `responses`: how many were verified for them; `errors`: of
    each without a verdict, why."""

    tasks: list[Task]
    responses: int = 0
    errors: list[str] = field(default_factory=list)

    def check_verified(self, cfg: GenRMConfig, ranks: Ranks) -> None:
        """RunFailed where the verification of too many responses, of all ranks together, failed. All ranks call it."""
        sums = sum_metrics({"errors": len(self.errors), "responses": self.responses}, ranks)
        check_verified(sums["errors"], sums["responses"], cfg.grpo, self.errors)


def draw_comparisons(cfg: GenRMConfig, session: Session, answer: GenerateFn, data: Data, step: int) -> Comparisons:
    """This rank's share of the comparisons of a step, at most: of responses that the model drew, in both orders.

    Steps of imitation have responses that a program made, wherever the task has a demonstration: they cost nothing.
    """
    ranks, most = session.ranks, cfg.grpo.num_prompts_per_step // session.ranks.world_size
    if data.own:
        first = (step * ranks.world_size + ranks.rank) * most
        return Comparisons([data.own[row] for row in shuffled(len(data.own), range(first, first + most), cfg.seed)])
    tasks = data.source.batch(step)[ranks.rank :: ranks.world_size]
    seed = int(np.random.SeedSequence([cfg.seed, step, ranks.rank]).generate_state(1)[0])
    made = []
    if step < cfg.judge.imitation_steps:
        known = [task for task in tasks if task.solution.answer]
        made = made_comparisons(known, seed, data.template, cfg.env.sandbox)
        tasks = [task for task in tasks if not task.solution.answer]
    drawn = comparisons_of(cfg, answer, data, tasks, seed)
    drawn.tasks = spread(made, most) + spread(drawn.tasks, most - min(len(made), most))
    return drawn


def spread(comparisons: list[Task], most: int) -> list[Task]:
    """At most `most` of the comparisons, evenly spread: those of a family stand together."""
    pairs = [comparisons[row : row + 2] for row in range(0, len(comparisons), 2)]
    chosen = np.linspace(0, len(pairs) - 1, min(len(pairs), most // 2)).astype(int)
    return [task for row in chosen for task in pairs[row]]


def comparisons_of(cfg: GenRMConfig, answer: GenerateFn, data: Data, tasks: Sequence[Task], seed: int) -> Comparisons:
    """A comparison of responses to each task, in both orders (`first_comparison`).

    Responses are those of the model as it was before it became a judge.
    """
    thinking, number = cfg.env.enable_thinking, cfg.judge.responses_per_task
    if not tasks:
        return Comparisons([])
    texts = [prompt_text(task, data.template, thinking) for task in tasks]
    completions = answer(texts, temperature=1.0, seed=seed, samples=number)
    repeated = [task for task in tasks for _ in range(number)]
    opened = template_opens_reasoning(data.template, thinking)
    verdicts = verify_all(repeated, [completion.text for completion in completions], opened, cfg.env.sandbox)
    errors = [verdict.reason for verdict in verdicts if verdict.status == "error"]  # they are compared with none
    responses = [Response.of(f"{THINK}{c.text}" if opened else c.text) for c in completions]
    finished = [completion.finished for completion in completions]
    groups = [slice(start, start + number) for start in range(0, len(responses), number)]
    pairs = [
        first_comparison(task, responses[group], verdicts[group], finished[group], data.template)
        for task, group in zip(tasks, groups, strict=True)
    ]
    return Comparisons([task for pair in pairs if pair for task in pair], len(verdicts), errors)


def draw_verdicts(cfg: GenRMConfig, session: Session, data: Data, comparisons: list[Task], step: int) -> Batch:
    """N verdicts on each comparison, sampled from the judge as it is now, and what they earn."""
    thinking, judge = cfg.env.enable_thinking, cfg.judge
    prompts = prompts_of(cfg, data.tokenizer, data.template, comparisons)
    kept = [row for row, ids in enumerate(prompts) if len(ids) <= prompt_room(cfg)]
    tasks = [comparisons[row] for row in kept]
    seed = int(np.random.SeedSequence([cfg.seed, step, session.ranks.rank, 1]).generate_state(1)[0])

    def begin(index: int) -> Dialogue:
        return Dialogue(None, data.tokenizer, data.template, thinking)

    def score(index: int, dialogues: list[Dialogue]) -> list[float | None]:
        return [
            reward_of(tasks[index], dialogue.response, dialogue.opened, judge.format_penalty, judge.ranking_weight)
            for dialogue in dialogues
        ]

    with session.dealt_out(), session.autocast:
        rollouts = collect_rollouts(
            session.model, [prompts[row] for row in kept], begin, score,
            samples_per_prompt=cfg.grpo.num_generations_per_prompt,
            max_new_tokens=cfg.policy.generation.max_new_tokens, stop_token_ids=data.stop_ids,
            prompts_per_call=prompts_per_call(cfg),
            generator=torch.Generator(device=session.ranks.device).manual_seed(seed), poll=session.stop.poll,
        )  # fmt: skip
    return Batch(tasks, rollouts, [], data.families)


def validate(cfg: GenRMConfig, session: Session, answer: GenerateFn, data: Data) -> dict[str, float]:
    """How often greedy verdicts prefer what is better, of held-out comparisons (`preferred_rates`).

    Each rank does a share.
    """
    ranks, generation = session.ranks, cfg.policy.generation
    settings = JudgeConfig(
        enable_thinking=cfg.env.enable_thinking, temperature=0, top_p=1, max_new_tokens=generation.max_new_tokens,
        max_prompt_tokens=prompt_room(cfg), batch_size=generation.batch_size,
    )  # fmt: skip
    with session.dealt_out(), session.autocast:
        if data.own:
            drawn = Comparisons(data.own_valid[ranks.rank :: ranks.world_size])
        else:
            drawn = comparisons_of(cfg, answer, data, data.valid[ranks.rank :: ranks.world_size], cfg.seed)
        judge = Judge(session.model, data.tokenizer, data.template, settings)
        counts = count_preferred(drawn.tasks, judge.say(drawn.tasks, cfg.seed, session.stop.poll))
    drawn.check_verified(cfg, ranks)
    return {f"valid_{name}": rate for name, rate in preferred_rates(sum_metrics(counts, ranks)).items()}


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
