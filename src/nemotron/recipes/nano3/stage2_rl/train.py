#!/usr/bin/env python
# /// script
# [tool.runspec]
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
sources; no curriculum over pass rates; every process holds the whole model; the trainer is its own generator in the
same precision, so the ratio between the two is 1 up to rounding and masked importance sampling has next to nothing to
mask. Leave-one-out baseline, normalised rewards, asymmetric clip, token-level loss, one update a batch, overlong
filtering, frozen router with moving expert bias are the paper's. With one update a batch the policy ratio is 1 when the
gradient is taken, so the clip never acts; it stands in the loss because it does as soon as a batch is split into
several updates.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which Ctrl-C is to end in one line, too
    from nemo_runspec.errors import end_on_signals

    end_on_signals()

import contextlib
import io
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import (
    Checkpoint,
    MetricsLog,
    Model,
    Progress,
    Results,
    RLPrompts,
    Run,
    open_run,
    print_complete,
    read_pipe,
)
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import FAMILIES, Task, best_constant_answer, generate_tasks, verify
from nemotron.stack.evaluation import PromptFormat, evaluate_model, load_tokenizer, prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.advantages import leave_one_out_advantages
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.prompts import PromptSource, read_prompts
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts, pack_rollouts
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.distributed import (
    Ranks,
    any_rank,
    clip_gradients,
    start_distributed,
    stop_distributed,
    sum_gradients,
    sum_over_ranks,
)
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.preemption import StopRequested, StopSignal

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.schema import RLConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: RLConfig = load_script_config(__file__, inputs=read_pipe)
    ranks = start_distributed()
    saved = cfg.model_dump(mode="json"), cfg.checkpoint.keep_last, cfg.checkpoint.async_save
    with (
        open_run(cfg, script=__file__) as run,
        StopSignal() as stop,
        Checkpoints(run.dir / "checkpoints", *saved) as checkpoints,
    ):
        prompts = RLPrompts.load(path=cfg.data.path)
        initial = Checkpoint.load(path=cfg.policy.model_name)
        tokenizer = load_tokenizer(initial.path)
        with run.phase("train"):
            model = train(cfg, run, initial, prompts, tokenizer, ranks, stop, checkpoints)
        stop_distributed()
        if not ranks.is_main:  # one process publishes
            return
        published = publish(cfg, run, initial, prompts, model)
        with run.phase("evaluate"):
            results = evaluate(cfg, model, tokenizer, lambda: stop.check(checkpoints.last))
    print_complete({"model": published, "results": results})


def train(
    cfg: RLConfig,
    run: Run,
    initial: Checkpoint,
    data: RLPrompts,
    tokenizer: Tokenizer,
    ranks: Ranks,
    stop: StopSignal,
    checkpoints: Checkpoints,
) -> NemotronH:
    """The GRPO loop. Returns the trained model."""
    device, grpo, policy = ranks.device, cfg.grpo, cfg.policy
    if grpo.num_prompts_per_step % ranks.world_size:
        raise UserError(
            f"grpo.num_prompts_per_step {grpo.num_prompts_per_step} does not divide among {ranks.world_size} processes"
        )
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
    # One precision for generator and trainer: two would be two policies.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.mixed_precision == "bf16_mixed")
    assert data.train_path is not None
    source = PromptSource(data.train_path, cfg.env.families, grpo.num_prompts_per_step, cfg.seed)
    prompt_format: PromptFormat = "chat" if cfg.env.enable_thinking else "chat_no_think"
    stop_ids = [token for name in ("<|im_end|>", "</s>") if (token := tokenizer.token_to_id(name)) is not None]

    # ---- resume: prompts and sampling are functions of (seed, step), so weights and optimiser are the whole state
    start, validated, logged = 0, -1, -1
    if run.resumed and (restored := checkpoints.load_latest(model, optimizer)) is not None:
        start = logged = restored.step
        validated = restored.state["validated"]
        if ranks.is_main:
            print(f"resumed at step {start} of {grpo.max_num_steps}", file=sys.stderr)
    run.metrics.truncate_after(logged)
    samples = MetricsLog(run.dir / "rollouts.jsonl")
    samples.truncate_after(logged)

    flops_per_token = training_flops_per_token(model.config, policy.max_total_sequence_length)
    peak = measure_peak_flops(device, torch.float32 if cfg.mixed_precision == "fp32" else torch.bfloat16)
    progress = Progress(
        grpo.max_num_steps, label="rl", start=start, peak_flops=peak * ranks.world_size,
        stream=sys.stderr if ranks.is_main else io.StringIO(),
    )  # fmt: skip

    def validate_when_due(done: int) -> None:
        """Not again what was validated before the run was stopped; what a signal cut short is made up for."""
        nonlocal validated
        due = grpo.val_period and (done % grpo.val_period == 0 or done == grpo.max_num_steps) and done > validated
        if due and validate(cfg, run, model, tokenizer, data, done, progress, ranks, autocast, stop):
            validated = done

    validate_when_due(start)
    for step in range(start, grpo.max_num_steps):
        began = time.perf_counter()
        # ---- 1. Rollouts: N completions for each of this rank's prompts, sampled from the policy as it is now
        tasks = source.batch(step)[ranks.rank :: ranks.world_size]
        prompts = [
            encoding.ids
            for encoding in tokenizer.encode_batch(
                [prompt_text(task, prompt_format) for task in tasks], add_special_tokens=False
            )
        ]
        generator = torch.Generator(device=device).manual_seed(
            int(np.random.SeedSequence([cfg.seed, step, ranks.rank]).generate_state(1)[0])
        )
        errors: list[str] = []
        with contextlib.suppress(StopRequested), autocast:
            rollouts = collect_rollouts(
                model,
                prompts,
                reward_function(tasks, tokenizer, cfg.env.enable_thinking, errors),
                samples_per_prompt=grpo.num_generations_per_prompt,
                max_new_tokens=policy.generation.max_new_tokens,
                temperature=1.0,  # any other would sample from a policy that is not the one trained
                top_p=1.0,
                stop_token_ids=stop_ids,
                prompts_per_call=max(1, policy.generation.batch_size // grpo.num_generations_per_prompt),
                generator=generator,
                poll=stop.poll,
            )
        if any_rank(stop.requested, device):  # this step's rollouts are dropped; a resumed run draws the same ones
            checkpoints.save(step, model, optimizer, {"validated": validated})
            raise stop.error(checkpoints.last)
        generated = time.perf_counter()

        # ---- 2. Advantages: how much better than the other completions of the same prompt
        rewards_PN = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
        rewards_PN = rewards_PN.view(-1, grpo.num_generations_per_prompt)
        advantages_PN = leave_one_out_advantages(rewards_PN, ~rewards_PN.isnan(), grpo.normalize_rewards)

        # ---- 3. One update
        set_lr(optimizer, adam.lr * min(1.0, (step + 1) / (policy.lr_warmup_iters + 1)))
        done = step + 1
        result = update(cfg, model, reference, optimizer, rollouts, advantages_PN, ranks, autocast)
        if not math.isfinite(result.grad_norm):
            raise RunFailed(
                f"gradient norm is {result.grad_norm} at step {done}", "a smaller policy.optimizer.lr helps"
            )

        # ---- 4. Records
        seconds = {"seconds_generate": generated - began, "seconds_train": time.perf_counter() - generated}
        flat_groups = int((advantages_PN == 0).all(-1).sum())
        metrics = summed_over_ranks(cfg, tasks, rollouts, flat_groups, errors, result, ranks)
        tokens, trained_tokens = metrics.pop("tokens"), metrics.pop("trained_tokens")
        run.metrics.log(done, **metrics, grad_norm=result.grad_norm, lr=optimizer.param_groups[0]["lr"], **seconds)
        for rollout in rollouts[:: max(1, len(rollouts) // max(1, cfg.logger.log_samples))][: cfg.logger.log_samples]:
            task = tasks[rollout.prompt_index]
            text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=False)
            samples.log(done, family=task.family, prompt=task.prompt, completion=text, reward=rollout.reward)
        # Generated tokens cost a forward pass, a third of a training token.
        flops = flops_per_token * (trained_tokens + tokens / 3)
        progress.update(done, tokens=int(tokens), flops=flops, reward=metrics["reward"])
        last = done == grpo.max_num_steps
        validate_when_due(done)
        stopping = any_rank(stop.requested, device)
        if done % cfg.checkpoint.save_interval == 0 or last or stopping:
            checkpoints.save(done, model, optimizer, {"validated": validated})
        if stopping:
            raise stop.error(checkpoints.last)
    progress.close()
    samples.close()
    if any_rank(stop.requested, device):  # while the last validation was made up for
        raise stop.error(checkpoints.last)
    return model


@dataclass
class Update:
    """What one optimiser step did on this rank. sums: of k3, of clipped and of masked tokens, [3]."""

    grad_norm: float
    loss_tokens: float
    trained_tokens: int
    sums: torch.Tensor


def update(
    cfg: RLConfig,
    model: NemotronH,
    reference: NemotronH | None,
    optimizer: torch.optim.Optimizer,
    rollouts: list[Rollout],
    advantages_PN: torch.Tensor,
    ranks: Ranks,
    autocast: torch.autocast,
) -> Update:
    """One step on one batch. Loss: sum over completion tokens / number of completion tokens of the global batch.

    Completions without a verdict and, with overlong filtering, those that hit the length limit count in neither.
    """
    counted = [
        (rollout, advantage)
        for rollout, advantage in zip(rollouts, advantages_PN.flatten().tolist(), strict=True)
        if rollout.reward is not None and not (cfg.grpo.overlong_filtering and rollout.truncated)
    ]
    loss_tokens = torch.tensor([float(sum(len(r.completion_ids) for r, _ in counted))], device=ranks.device)
    sum_over_ranks([loss_tokens])
    model.train()
    sums = torch.zeros(3, device=ranks.device)
    trained_tokens = 0
    for micro in pack_rollouts(
        [rollout for rollout, _ in counted],
        [advantage for _, advantage in counted],
        cfg.policy.max_total_sequence_length,
        cfg.policy.train_micro_batch_size,
        keep_zero_advantage=reference is not None,  # with a KL term every completion has a gradient
    ):
        micro = micro.to(ranks.device)
        with autocast:
            logits_TV = model(micro.input_ids_BL, micro.seq_idx_BL, micro.predicts_BL).logits
        logp_T = token_logprobs(logits_TV, micro.targets_T)
        reference_T = None
        if reference is not None:
            with torch.no_grad(), autocast:
                logits_TV = reference(micro.input_ids_BL, micro.seq_idx_BL, micro.predicts_BL).logits
            reference_T = token_logprobs(logits_TV, micro.targets_T)
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
        (loss.loss / loss_tokens.clamp(min=1)).sum().backward()
        sums += torch.stack([loss.kl, loss.clipped, loss.masked])
        trained_tokens += micro.input_ids_BL.numel()
    sum_gradients(model)
    grad_norm = clip_gradients(model, cfg.policy.max_grad_norm).item()
    if math.isfinite(grad_norm):
        optimizer.step()
        model.update_expert_bias(cfg.policy.moe_router_bias_update_rate)
    optimizer.zero_grad()
    return Update(grad_norm, loss_tokens.item(), trained_tokens, sums)


def summed_over_ranks(
    cfg: RLConfig,
    tasks: list[Task],
    rollouts: list[Rollout],
    flat_groups: int,
    errors: list[str],
    result: Update,
    ranks: Ranks,
) -> dict[str, float]:
    """The metrics of a step over all ranks. RunFailed where verification failed for too many rollouts."""
    lengths = [len(r.completion_ids) for r in rollouts]
    entropy = sum(r.entropy * length for r, length in zip(rollouts, lengths, strict=True))
    of_family = [
        [r.reward for r in rollouts if r.reward is not None and tasks[r.prompt_index].family == family]
        for family in cfg.env.families
    ]
    sums = torch.tensor(
        [
            len(rollouts), sum(lengths), entropy, sum(r.truncated for r in rollouts), flat_groups, len(errors),
            result.trained_tokens, *result.sums.tolist(), *map(sum, of_family), *map(len, of_family),
        ],
        dtype=torch.float64, device=ranks.device,
    )  # fmt: skip
    sum_over_ranks([sums])
    completions, tokens, entropy, truncated, flat, failed, trained_tokens, kl, clipped, masked, *rest = sums.tolist()
    if failed > cfg.grpo.max_error_rate * completions:
        raise RunFailed(
            f"verification failed for {failed:.0f} of {completions:.0f} rollouts",
            errors[0] if errors else "on another rank",
        )
    scores, counts = rest[: len(of_family)], rest[len(of_family) :]
    return {
        "reward": sum(scores) / max(sum(counts), 1),
        **{f"reward_{f}": s / max(n, 1) for f, s, n in zip(cfg.env.families, scores, counts, strict=True)},
        "entropy": entropy / max(tokens, 1),
        "completion_tokens": tokens / completions,
        "truncated": truncated / completions,
        "groups_without_gradient": flat / cfg.grpo.num_prompts_per_step,
        "verifier_errors": failed,
        "clipped_tokens": clipped,
        "masked_tokens": masked,
        "kl": kl / max(result.loss_tokens, 1),
        "tokens": tokens,
        "trained_tokens": trained_tokens,
    }


def reward_function(
    tasks: Sequence[Task], tokenizer: Tokenizer, thinking: bool, errors: list[str]
) -> Callable[[int, list[int]], float | None]:
    """(task index, completion ids) -> its reward, or None where verification failed; the reason goes to `errors`."""

    def reward(index: int, completion_ids: list[int]) -> float | None:
        verdict = verify(tasks[index], tokenizer.decode(completion_ids, skip_special_tokens=False), thinking)
        if verdict.status == "error":  # not a zero: left out of baseline and loss, and counted
            errors.append(verdict.reason)
            return None
        return verdict.score

    return reward


def token_logprobs(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target under fp32 logits, [T]."""
    return -torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none")


def validate(
    cfg: RLConfig,
    run: Run,
    model: NemotronH,
    tokenizer: Tokenizer,
    data: RLPrompts,
    step: int,
    progress: Progress,
    ranks: Ranks,
    autocast: torch.autocast,
    stop: StopSignal,
) -> bool:
    """Greedy and sampled pass@1 on validation prompts (never the evaluation split), logged. Rank 0 does it.

    False where a signal cut it short; nothing is logged then.
    """
    if not (ranks.is_main and data.valid_path):
        return True
    pools = read_prompts(data.valid_path)
    chosen = [task for family in cfg.env.families for task in pools.get(family, [])[: cfg.grpo.val_tasks_per_family]]
    if not chosen:
        return True
    try:
        with autocast:
            evaluation = evaluate_model(
                model, tokenizer, chosen, samples=1,
                prompt_format="chat" if cfg.env.enable_thinking else "chat_no_think",
                max_new_tokens=cfg.policy.generation.max_new_tokens, batch_size=cfg.policy.generation.batch_size,
                seed=cfg.seed, poll=stop.poll,
            )  # fmt: skip
    except StopRequested:
        return False
    greedy, sampled = evaluation.mean("greedy").estimate, evaluation.mean("sampled").estimate
    run.metrics.log(step, valid_greedy=greedy, valid_sampled=sampled)
    progress.note(f"step {step}: validation pass@1 {greedy:.3f} greedy, {sampled:.3f} sampled")
    return True


def publish(cfg: RLConfig, run: Run, initial: Checkpoint, data: RLPrompts, model: NemotronH) -> Model:
    """The weights of the last step, in Hugging Face layout with the tokenizer, as the artifact `run.output`."""
    if (done := run.published()) is not None:
        return Model.load(done.ref)  # stopped during evaluation: these weights are published already
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
    sys.exit(run_main(main, command_hint))
