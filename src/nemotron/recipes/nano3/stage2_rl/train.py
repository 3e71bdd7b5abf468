#!/usr/bin/env python
# /// script
# [tool.runspec]
# schema = "1"
# docs = "Reinforcement learning from verifiable rewards (GRPO) on four environment families at once."
# name = "nano3/rl"
# setup = "pip install nemotron"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# default = "default"
# format = "omegaconf"
# schema = "schema.py:RLConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2: reinforcement learning from verifiable rewards, GRPO.

    nemotron nano3 rl rlvr -c tiny
    python train.py --config tiny grpo.max_num_steps=5
    torchrun --nproc-per-node 8 train.py --config small

A step: draw prompts of all families in a fixed ratio, sample a group of completions for each, let the environments
verify them, turn rewards into group-relative advantages, take one optimiser step. Publishes the weights of the last
step, and their results: pass@1 on held-out tasks, greedy and sampled.

Shapes: P prompts of this rank, N completions a prompt, B packed rows, L tokens a row, T completion tokens.

Simplified against the paper (tech report, arXiv 2512.20848, section 3.2): four generated families instead of nine
sources; no curriculum over pass rates; the trainer is its own generator, so the ratio between the two is 1 up to
rounding and masked importance sampling has next to nothing to mask. Leave-one-out baseline, normalised rewards,
asymmetric clip, token-level loss, one update a batch, overlong filtering, frozen router with moving expert bias are the
paper's. With one update a batch the policy ratio is 1 when the gradient is taken, so the clip never acts; it stands in
the loss because it does as soon as a batch is split into several updates.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Model, Progress, Results, RLPrompts, Run, open_run, print_complete, read_pipe
from nemotron.kit.chat import render
from nemotron.stack.environments import FAMILIES, Task, best_constant_answer, generate_tasks, verify
from nemotron.stack.evaluation import evaluate_model, load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.advantages import leave_one_out_advantages
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts, pack_rollouts
from nemotron.stack.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from nemotron.stack.training.distributed import (
    Ranks,
    any_rank,
    start_distributed,
    stop_distributed,
    sum_gradients,
    sum_over_ranks,
)
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.preemption import StopSignal

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.schema import RLConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: RLConfig = load_script_config(__file__, inputs=read_pipe())
    ranks = start_distributed()
    with open_run(cfg, script=__file__) as run, StopSignal() as stop:
        prompts = RLPrompts.load(path=cfg.data.path)
        initial = Checkpoint.load(path=cfg.policy.model_name)
        tokenizer = load_tokenizer(initial.path)
        with run.phase("train"):
            model, checkpoint = train(cfg, run, initial, prompts, tokenizer, ranks, stop)
        stop_distributed()
        if not ranks.is_main:  # one process publishes
            return
        published = publish(cfg, run, initial, prompts, model)
        with run.phase("evaluate"):
            results = evaluate(cfg, model, tokenizer, lambda: stop.check(checkpoint))
    print_complete({"model": published, "results": results})


def train(
    cfg: RLConfig,
    run: Run,
    initial: Checkpoint,
    data: RLPrompts,
    tokenizer: Tokenizer,
    ranks: Ranks,
    stop: StopSignal,
) -> tuple[NemotronH, Path]:
    """The GRPO loop. Returns the trained model and the last checkpoint."""
    device, grpo, policy = ranks.device, cfg.grpo, cfg.policy
    torch.manual_seed(cfg.seed)
    model = NemotronH.from_pretrained(initial.path).to(device)
    if policy.freeze_moe_router:
        for moe in model.moe_blocks():
            moe.gate.weight.requires_grad_(False)
    reference = None
    if cfg.loss_fn.reference_policy_kl_penalty:
        reference = NemotronH.from_pretrained(initial.path).to(device).eval()
    adam = policy.optimizer
    optimizer = build_optimizer(model, adam.lr, (adam.adam_beta1, adam.adam_beta2), adam.adam_eps, adam.weight_decay)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.mixed_precision == "bf16_mixed")
    tasks = PromptSource(data, cfg)
    stop_ids = [token for name in ("<|im_end|>", "</s>") if (token := tokenizer.token_to_id(name)) is not None]

    # ---- resume: prompts and sampling are functions of (seed, step), so weights and optimiser are the whole state
    start, checkpoints, written_config = 0, run.dir / "checkpoints", cfg.model_dump(mode="json")
    checkpoint = checkpoints
    if run.resumed and (found := latest_checkpoint(checkpoints)) is not None:
        start, checkpoint = load_checkpoint(found, model, optimizer, written_config).step, found
        print(f"resumed at step {start} of {grpo.max_num_steps}", file=sys.stderr)
    run.metrics.truncate_after(start or -1)
    samples_log = SampleLog(run.dir / "rollouts.jsonl", start, cfg.logger.log_samples if ranks.is_main else 0)
    progress = Progress(
        grpo.max_num_steps, label="rl", start=start, stream=sys.stderr if ranks.is_main else io.StringIO()
    )
    if start == 0 and grpo.val_period:
        note_validation(cfg, run, model, tokenizer, tasks, 0, progress, ranks)

    for step in range(start, grpo.max_num_steps):
        began = time.perf_counter()
        set_lr(optimizer, adam.lr * min(1.0, (step + 1) / (policy.lr_warmup_iters + 1)))

        # ---- 1. Rollouts: N completions for each of this rank's prompts, sampled from the policy as it is now
        chosen = tasks.batch(step)[ranks.rank :: ranks.world_size]
        generator = torch.Generator(device=device).manual_seed(
            int(np.random.SeedSequence([cfg.seed, step, ranks.rank]).generate_state(1)[0])
        )
        errors: list[str] = []

        def score(
            index: int, completion_ids: list[int], chosen: list[Task] = chosen, errors: list[str] = errors
        ) -> float | None:
            text = tokenizer.decode(completion_ids, skip_special_tokens=False)
            verdict = verify(chosen[index], text, cfg.env.enable_thinking)
            if verdict.status == "error":  # not a zero: left out of baseline and loss, and counted
                errors.append(verdict.reason)
                return None
            return verdict.score

        rollouts = collect_rollouts(
            model,
            [encode_prompt(task, tokenizer, cfg.env.enable_thinking) for task in chosen],
            score,
            samples_per_prompt=grpo.num_generations_per_prompt,
            max_new_tokens=policy.generation.max_new_tokens,
            temperature=policy.generation.temperature,
            top_p=policy.generation.top_p,
            stop_token_ids=stop_ids,
            prompts_per_call=max(1, policy.generation.batch_size // grpo.num_generations_per_prompt),
            generator=generator,
            should_stop=lambda: stop.requested,
        )
        if any_rank(stop.requested, device):  # this step's rollouts are dropped; a resumed run draws the same ones
            checkpoint = save(cfg, checkpoints, step, model, optimizer, written_config, ranks, checkpoint)
            raise stop.error(checkpoint)
        if len(errors) > grpo.max_error_rate * len(rollouts):
            raise RunFailed(f"verification failed for {len(errors)} of {len(rollouts)} rollouts", errors[0])
        generated = time.perf_counter()

        # ---- 2. Advantages: how much better than the other completions of the same prompt
        rewards_PN = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
        rewards_PN = rewards_PN.view(-1, grpo.num_generations_per_prompt)
        advantages_PN = leave_one_out_advantages(rewards_PN, ~rewards_PN.isnan(), grpo.normalize_rewards)

        # ---- 3. One update. Loss: sum over completion tokens / number of completion tokens of the global batch
        counted = [
            (rollout, advantage)
            for rollout, advantage in zip(rollouts, advantages_PN.flatten().tolist(), strict=True)
            if rollout.reward is not None and not (grpo.overlong_filtering and rollout.truncated)
        ]
        totals = torch.tensor([float(sum(len(r.completion_ids) for r, _ in counted))], device=device)
        sum_over_ranks([totals])
        model.train()
        kl, masked = 0.0, 0
        for micro in pack_rollouts(
            [rollout for rollout, _ in counted],
            [advantage for _, advantage in counted],
            policy.max_total_sequence_length,
            policy.train_micro_batch_size,
            keep_zero_advantage=reference is not None,  # with a KL term every completion has a gradient
        ):
            micro = micro.to(device)
            with autocast:
                logits_TV = model(micro.input_ids_BL, micro.seq_idx_BL, micro.predicts_BL).logits
            logp_T = token_logprobs(logits_TV, micro.targets_T)
            reference_T = None
            if reference is not None:
                with torch.no_grad(), autocast:
                    reference_T = token_logprobs(
                        reference(micro.input_ids_BL, micro.seq_idx_BL, micro.predicts_BL).logits, micro.targets_T
                    )
            loss = grpo_loss(
                logp_T,
                logp_T.detach(),  # one update a batch: the policy of the rollouts is the policy being updated
                micro.logp_generator_T,
                micro.advantages_T,
                ratio_clip_min=cfg.loss_fn.ratio_clip_min,
                ratio_clip_max=cfg.loss_fn.ratio_clip_max,
                importance_bound=cfg.loss_fn.importance_bound,
                logp_reference_T=reference_T,
                kl_penalty=cfg.loss_fn.reference_policy_kl_penalty,
            )
            (loss.loss / totals.clamp(min=1)).backward()
            kl += float(loss.kl)
            masked += int(loss.masked)
        sum_gradients(model)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), policy.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RunFailed(f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps")
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(policy.moe_router_bias_update_rate)

        # ---- 4. Records
        done = step + 1
        by_family = {
            f"reward_{family}": mean([r.reward for r in rollouts if chosen[r.prompt_index].family == family])
            for family in cfg.env.families
        }
        reward = mean([r.reward for r in rollouts])
        sampled_tokens = sum(len(r.completion_ids) for r in rollouts)
        run.metrics.log(
            done, reward=reward, **by_family,
            entropy=sum(r.entropy * len(r.completion_ids) for r in rollouts) / max(1, sampled_tokens),
            completion_tokens=sampled_tokens / len(rollouts),
            truncated=sum(r.truncated for r in rollouts) / len(rollouts),
            groups_without_gradient=(advantages_PN == 0).all(-1).float().mean().item(),
            verifier_errors=len(errors), masked_tokens=masked, kl=kl / totals.item() if totals.item() else 0.0,
            grad_norm=float(grad_norm), lr=optimizer.param_groups[0]["lr"],
            seconds_generate=generated - began, seconds_train=time.perf_counter() - generated,
        )  # fmt: skip
        samples_log.write(done, rollouts, chosen, tokenizer)
        progress.update(done, tokens=sampled_tokens, flops=0.0, reward=reward)
        if grpo.val_period and (done % grpo.val_period == 0 or done == grpo.max_num_steps):
            note_validation(cfg, run, model, tokenizer, tasks, done, progress, ranks)
        stopping = any_rank(stop.requested, device)
        if done % cfg.checkpoint.save_interval == 0 or done == grpo.max_num_steps or stopping:
            checkpoint = save(cfg, checkpoints, done, model, optimizer, written_config, ranks, checkpoint)
        if stopping:
            raise stop.error(checkpoint)
    progress.close()
    return model, checkpoint


class PromptSource:
    """Prompts by family; a batch is a pure function of (seed, step), which is what makes a resumed run exact."""

    def __init__(self, data: RLPrompts, cfg: RLConfig) -> None:
        self.seed, self.size = cfg.seed, cfg.grpo.num_prompts_per_step
        self.shares = cfg.env.families
        assert data.train_path is not None
        self.train = self._read(data.train_path)
        self.valid = self._read(data.valid_path) if data.valid_path else {}
        for family in self.shares:
            if not self.train.get(family):
                raise UserError(
                    f"env.families: {data.ref} has no prompts of '{family}'", f"it has: {', '.join(sorted(self.train))}"
                )

    def batch(self, step: int) -> list[Task]:
        """The prompts of a step: per family its share of the batch, walking through an order shuffled each epoch."""
        total, tasks = sum(self.shares.values()), []
        edges = np.round(np.cumsum([0.0, *self.shares.values()]) / total * self.size).astype(int)
        for position, family in enumerate(self.shares):
            pool, count = self.train[family], int(edges[position + 1] - edges[position])
            for k in range(step * count, (step + 1) * count):
                epoch, within = divmod(k, len(pool))
                order = np.random.default_rng([self.seed, position, epoch]).permutation(len(pool))
                tasks.append(pool[order[within]])
        return tasks

    @staticmethod
    def _read(path: Path) -> dict[str, list[Task]]:
        by_family: dict[str, list[Task]] = {}
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                task = Task.from_dict(json.loads(line)["task"])
                by_family.setdefault(task.family, []).append(task)
        return by_family


class SampleLog:
    """A few rollouts of each step as JSONL, so that one can read what the policy does and what it is paid for."""

    def __init__(self, path: Path, start: int, per_step: int) -> None:
        self.path, self.per_step = path, per_step
        kept = []
        if path.exists() and start:
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= start]
        if per_step:
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, step: int, rollouts: list[Rollout], tasks: list[Task], tokenizer: Tokenizer) -> None:
        """Evenly spaced rollouts, so that every family occurs."""
        if not self.per_step:
            return
        with self.path.open("a", encoding="utf-8") as file:
            for r in rollouts[:: max(1, len(rollouts) // self.per_step)][: self.per_step]:
                record = {
                    "step": step,
                    "family": tasks[r.prompt_index].family,
                    "prompt": tasks[r.prompt_index].prompt,
                    "completion": tokenizer.decode(r.completion_ids, skip_special_tokens=False),
                    "reward": r.reward,
                }
                file.write(json.dumps(record) + "\n")


def encode_prompt(task: Task, tokenizer: Tokenizer, thinking: bool) -> list[int]:
    """Token ids of the conversation up to where the model answers."""
    messages = [{"role": "user", "content": task.prompt}]
    text = render(messages, enable_thinking=thinking, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def token_logprobs(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target under fp32 logits, [T]."""
    return -torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none")


def mean(values: list[float | None]) -> float:
    """Mean of the values that are there; nan without any."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else math.nan


def save(
    cfg: RLConfig,
    root: Path,
    step: int,
    model: NemotronH,
    optimizer: torch.optim.Optimizer,
    written_config: dict[str, Any],
    ranks: Ranks,
    last: Path,
) -> Path:
    """Checkpoint of `step` finished steps, written by rank 0; before the first step there is nothing to save."""
    if step == 0:
        return last
    if ranks.is_main:
        save_checkpoint(root, step, model, optimizer, {}, written_config, keep_last=cfg.checkpoint.keep_last)
    return root / f"step-{step:08d}"


def note_validation(
    cfg: RLConfig,
    run: Run,
    model: NemotronH,
    tokenizer: Tokenizer,
    tasks: PromptSource,
    step: int,
    progress: Progress,
    ranks: Ranks,
) -> None:
    """Greedy and sampled pass@1 on validation prompts (never the evaluation split), logged. Rank 0 does it."""
    per_family = cfg.grpo.val_tasks_per_family
    chosen = [task for family in cfg.env.families for task in tasks.valid.get(family, [])[:per_family]]
    if not chosen or not ranks.is_main:
        return
    evaluation = evaluate_model(
        model, tokenizer, chosen, samples=1, prompt_format="chat" if cfg.env.enable_thinking else "chat_no_think",
        max_new_tokens=cfg.policy.generation.max_new_tokens, batch_size=cfg.policy.generation.batch_size, seed=cfg.seed,
    )  # fmt: skip
    greedy, sampled = evaluation.mean("greedy").estimate, evaluation.mean("sampled").estimate
    run.metrics.log(step, valid_greedy=greedy, valid_sampled=sampled)
    progress.note(f"step {step}: validation pass@1 {greedy:.3f} greedy, {sampled:.3f} sampled")


def publish(cfg: RLConfig, run: Run, initial: Checkpoint, data: RLPrompts, model: NemotronH) -> Model:
    """The weights of the last step, in Hugging Face layout with the tokenizer, as the artifact `run.output`."""
    model.save_pretrained(run.output_dir)
    for file in sorted(initial.path.glob("*token*.json")):
        shutil.copyfile(file, run.output_dir / file.name)
    total, active = model.num_parameters()
    return Model(
        path=run.output_dir,
        step=cfg.grpo.max_num_steps,
        dataset_path=data.path,
        tokenizer_path=run.output_dir,
        num_parameters=total,
        metrics={
            "rollouts": cfg.grpo.max_num_steps * cfg.grpo.num_prompts_per_step * cfg.grpo.num_generations_per_prompt,
            "active_parameters": active,
        },
    ).save()


def evaluate(cfg: RLConfig, model: NemotronH, tokenizer: Tokenizer, poll: Callable[[], None]) -> Results:
    """pass@1 on held-out tasks under the chat template, beside the best constant answer."""
    metrics: dict[str, Any] = {}
    settings = cfg.evaluation
    if settings.tasks_per_family:
        tasks = {
            family: generate_tasks(
                family, "eval", settings.tasks_per_family, settings.seed, settings.difficulty.get(family)
            )
            for family in FAMILIES
        }
        evaluation = evaluate_model(
            model, tokenizer, [task for several in tasks.values() for task in several],
            samples=settings.samples, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size,
            seed=settings.seed, poll=poll,
        )  # fmt: skip
        metrics["tasks"] = evaluation.metrics()
        metrics["best_constant"] = {family: best_constant_answer(several).score for family, several in tasks.items()}
        metrics["generations"] = evaluation.generations(per_family=2)
    return Results(metrics=metrics).save()


if __name__ == "__main__":
    sys.exit(run_main(main))
