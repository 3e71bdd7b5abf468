#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Supervised fine-tuning on packed conversations with the embedded stack: a CPU, one GPU, or torchrun."
# name = "nano3/sft"
# setup = "pip install nemotron"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# default = "default"
# format = "omegaconf"
# schema = "schema.py:SFTConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 1: teach the base model to answer, with reasoning on and off.

    nemotron nano3 sft -c tiny
    python train.py --config tiny optimizer.lr=1e-3
    torchrun --nproc-per-node 8 train.py --config small [dist.use_torch_fsdp2=true]

Reads the base model and the packed conversations that `nemotron nano3 data prep sft` publishes; publishes the weights
of the best validation loss, and their results: pass@1 on held-out verifiable tasks, greedy and sampled.

Shapes: B packed rows, L tokens a row, V vocabulary.

Simplified against the paper (tech report, arXiv 2512.20848, section 3.1): rows of a few hundred tokens instead of 256k;
no agent data; padding at the end of a row (about a per cent of it) is routed to experts and
counted as load. Loss mask, packing without leakage between conversations (attention, convolution and SSM state),
per-token loss and the load-balancing loss are the paper's. The paper trains a fixed number of steps; here the final
decay begins when validation stops improving, which WSD allows at any time.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which Ctrl-C is to end in one line, too
    from nemo_runspec.errors import end_on_signals

    end_on_signals()

import io
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Model, Progress, Results, Run, SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import FAMILIES, best_constant_answer, generate_tasks
from nemotron.stack.evaluation import evaluate_model, load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.distributed import (
    Ranks,
    any_rank,
    clip_gradients,
    deal,
    start_distributed,
    stop_distributed,
    sum_gradients,
    sum_over_ranks,
)
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.loaders import PackedLoader
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.preemption import StopSignal
from nemotron.stack.training.recompute import recompute_activations
from nemotron.stack.training.schedule import Schedule, lr_at
from nemotron.stack.training.sharding import shard_model, sync_gradients_in_backward, whole_model, whole_weights

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: SFTConfig = load_script_config(__file__, inputs=read_pipe)
    ranks = start_distributed()
    saved = cfg.model_dump(mode="json"), cfg.checkpoint.keep_last, cfg.checkpoint.async_save
    with (
        open_run(cfg, script=__file__) as run,
        StopSignal() as stop,
        Checkpoints(run.dir / "checkpoints", *saved) as checkpoints,
    ):
        data = SFTPack.load(path=cfg.dataset.path)
        base = Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint)
        check_tokenizer(base, data)
        with run.phase("train"):
            model, best = train(cfg, run, base, data, ranks, stop, checkpoints)
        stop_distributed()
        if not ranks.is_main:  # one process publishes
            return
        published = publish(cfg, run, base, data, model, best)
        with run.phase("evaluate"):
            results = evaluate(cfg, published, model, best, lambda: stop.check(checkpoints.last))
    print_complete({"model": published, "results": results})


@dataclass
class Best:
    """The best validation so far, how many since then were no better, the last one, and when training ends (steps)."""

    ends_at: int
    loss: float = math.inf
    step: int = 0
    since: int = 0
    validated: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    cfg: SFTConfig,
    run: Run,
    base: Checkpoint,
    data: SFTPack,
    ranks: Ranks,
    stop: StopSignal,
    checkpoints: Checkpoints,
) -> tuple[NemotronH, Best]:
    """The training loop. Returns the model, on rank 0 whole with the best weights, and the record of validations."""
    device, batch_size = ranks.device, cfg.train.global_batch_size
    torch.manual_seed(cfg.rng.seed)
    model = NemotronH.from_pretrained(base.path)
    if cfg.dist.use_torch_fsdp2:  # each rank keeps a slice of every weight, else all of it
        shard_model(model, ranks, bf16=cfg.mixed_precision == "bf16_mixed")
    model.to(device)
    recompute_activations(model, cfg.model.recompute_granularity, cfg.model.recompute_modules)
    betas = (cfg.optimizer.adam_beta1, cfg.optimizer.adam_beta2)
    optimizer = build_optimizer(model, cfg.optimizer.lr, betas, cfg.optimizer.adam_eps, cfg.optimizer.weight_decay)
    schedule = Schedule(cfg.optimizer.lr, cfg.optimizer.min_lr, cfg.train.train_iters, **cfg.scheduler.model_dump())
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.mixed_precision == "bf16_mixed")
    loader, valid = open_data(cfg, data, ranks)

    # ---- resume: the same command after a crash goes on here, to the same weights
    start, best = 0, Best(ends_at=cfg.train.train_iters)
    if run.resumed and (restored := checkpoints.load_latest(model, optimizer)) is not None:
        start, best = restored.step, Best(**restored.state["best"], weights=restored.best_model)
        loader.load_state_dict(restored.state["loader"])
        if ranks.is_main:
            print(f"resumed at step {start} of at most {cfg.train.train_iters}", file=sys.stderr)
    run.metrics.truncate_after(start or -1)

    flops_per_token = training_flops_per_token(model.config, data.seq_len)
    tokens_per_step = batch_size * data.seq_len
    peak = measure_peak_flops(device, torch.float32 if cfg.mixed_precision == "fp32" else torch.bfloat16)
    progress = Progress(
        best.ends_at, label="sft", start=start, peak_flops=peak * ranks.world_size,
        stream=sys.stderr if ranks.is_main else io.StringIO(),
    )  # fmt: skip

    def validate_when_due() -> None:
        """Not again what was validated before the run was stopped; what a signal cut short is made up for."""
        if done > best.validated and (done % cfg.train.eval_interval == 0 or done == best.ends_at):
            note_validation(cfg, run, model, valid, best, done, ranks, progress, stop, autocast)

    model.train()
    done = start
    validate_when_due()
    while done < best.ends_at:
        lr = lr_at(done, replace(schedule, train_iters=best.ends_at))
        set_lr(optimizer, lr)
        batch = loader.next_batch(batch_size).to(device)
        # Loss: mean over the trained tokens of the global batch, wherever they are: every answer token weighs the same.
        sums = torch.zeros(2, device=device)  # loss in nats a trained token; load-balancing loss
        trained = batch.loss_mask_BL.sum().float()
        sum_over_ranks([trained])
        micro_batches = list(batch.micro_batches(cfg.train.micro_batch_size))
        for i, micro in enumerate(micro_batches, start=1):
            sync_gradients_in_backward(model, i == len(micro_batches))
            share = len(micro.input_ids_BL) / batch_size
            answers_BL = micro.loss_mask_BL.bool()  # prompts need no logits, which is most of the output head saved
            with autocast:
                out = model(micro.input_ids_BL, micro.seq_idx_BL, answers_BL)
            nats = selected_loss_sum(out.logits, micro.labels_BL[answers_BL])
            loss = torch.stack([nats / trained.clamp(min=1), out.load_balancing_loss * share])
            (loss[0] + cfg.model.moe_aux_loss_coeff * loss[1]).backward()
            sums += loss.detach()
        sum_gradients(model)
        sum_over_ranks([sums])
        grad_norm = clip_gradients(model, cfg.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        # Experts that saw fewer tokens than the mean become likelier to be chosen, the others less (aux-loss-free).
        model.update_expert_bias(cfg.model.moe_router_bias_update_rate)

        done += 1
        loss_nats, balance = sums.tolist()
        if not math.isfinite(loss_nats):
            raise RunFailed(f"loss is {loss_nats} at step {done}", "a smaller optimizer.lr or a longer warm-up helps")
        progress.update(done, tokens=tokens_per_step, flops=tokens_per_step * flops_per_token, loss=loss_nats, lr=lr)
        if done % cfg.logger.log_interval == 0 or done == best.ends_at:
            run.metrics.log(
                done, loss=loss_nats, lr=lr, grad_norm=grad_norm, load_balancing_loss=balance,
                trained_tokens=trained, epochs=loader.epochs,
            )  # fmt: skip
        validate_when_due()
        stopping = any_rank(stop.requested, device)
        if done % cfg.checkpoint.save_interval == 0 or done == best.ends_at or stopping:
            numbers = {name: value for name, value in vars(best).items() if name != "weights"}
            state = {"loader": loader.state_dict(), "best": numbers}
            checkpoints.save(done, model, optimizer, state, best.weights)
        if stopping:
            raise stop.error(checkpoints.last)
    progress.close()
    if best.validated < done:  # a signal has come while the last validation was made up for
        raise stop.error(checkpoints.last)
    model = whole_model(model, ranks)
    if ranks.is_main:
        model.load_state_dict(best.weights)
    return model, best


def open_data(cfg: SFTConfig, data: SFTPack, ranks: Ranks) -> tuple[PackedLoader, PackedLoader]:
    """Packed rows to train on and to validate on."""
    if cfg.train.global_batch_size % ranks.world_size:
        raise UserError(
            f"train.global_batch_size {cfg.train.global_batch_size} does not divide among {ranks.world_size} processes"
        )
    if data.train_path is None or data.valid_path is None:
        raise UserError(f"{data.ref} has no {'training' if data.train_path is None else 'validation'} rows")
    rank, world = ranks.rank, ranks.world_size
    loader = PackedLoader(data.train_path, data.seq_len, cfg.rng.seed, rank=rank, world_size=world)
    return loader, PackedLoader(data.valid_path, data.seq_len, cfg.rng.seed)  # `note_validation` deals it out


@torch.no_grad()
def note_validation(
    cfg: SFTConfig,
    run: Run,
    model: NemotronH,
    valid: PackedLoader,
    best: Best,
    step: int,
    ranks: Ranks,
    progress: Progress,
    stop: StopSignal,
    autocast: torch.autocast,
) -> None:
    """Validate (nats, mean over trained tokens), keep the weights if they are the best, else lose patience.

    When patience is lost, the steps left are those of the final decay: with WSD it may begin at any time. Where a
    signal comes, all ranks leave together, and nothing is noted.
    """
    batches = islice(valid.all_batches(cfg.train.global_batch_size), cfg.train.eval_iters)
    micro_batches = [micro for batch in batches for micro in batch.micro_batches(cfg.train.micro_batch_size)]
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    model.eval()
    stopping = False
    for batch, counts in deal(micro_batches, ranks):
        if stopping := any_rank(stop.requested, ranks.device):
            break
        batch = batch.to(ranks.device)
        answers_BL = batch.loss_mask_BL.bool()
        with autocast:
            logits_TV = model(batch.input_ids_BL, batch.seq_idx_BL, answers_BL).logits
        if counts:
            sums += torch.stack([selected_loss_sum(logits_TV, batch.labels_BL[answers_BL]), answers_BL.sum()]).double()
    model.train()
    if stopping:
        return
    sum_over_ranks([sums])
    loss = (sums[0] / sums[1].clamp(min=1)).item()
    best.since = 0 if loss < best.loss - cfg.train.early_stop_min_delta else best.since + 1
    if loss < best.loss:
        best.loss, best.step = loss, step
        best.weights = whole_weights(model, ranks)
    best.validated = step
    run.metrics.log(step, valid_loss=loss)
    progress.note(f"step {step}: validation loss {loss:.4f}, best {best.loss:.4f} at step {best.step}")
    decay = cfg.scheduler.lr_wsd_decay_iters if cfg.scheduler.lr_decay_style == "WSD" else 0
    lost = 0 < cfg.train.early_stop_patience <= best.since and step >= cfg.scheduler.lr_warmup_iters
    if lost and step + decay < best.ends_at:
        best.ends_at = progress.total = step + decay
        progress.note(f"step {step}: no improvement in {best.since} validations; the last {decay} steps begin")


def check_tokenizer(base: Checkpoint, data: SFTPack) -> None:
    """Refuse a pack that was tokenised with another tokenizer than the model's: its ids would mean other text."""
    theirs = (data.tokenizer_path or data.path) / "tokenizer.json"
    if theirs.is_file() and theirs.read_bytes() != (base.path / "tokenizer.json").read_bytes():
        raise UserError(
            f"{data.ref} was packed with another tokenizer than that of {base.ref}",
            "prepare the data again with the tokenizer of this model, or train the model on the other data",
        )


def publish(cfg: SFTConfig, run: Run, base: Checkpoint, data: SFTPack, model: NemotronH, best: Best) -> Model:
    """The weights of the best validation, in Hugging Face layout with the tokenizer, as the artifact `run.output`."""
    if (done := run.published()) is not None:
        return Model.load(done.ref)  # stopped during evaluation: these weights are published already
    model.save_pretrained(run.output_dir)
    for file in sorted(base.path.glob("*token*.json")):
        shutil.copyfile(file, run.output_dir / file.name)
    total, active = model.num_parameters()
    return Model(
        path=run.output_dir,
        step=best.step,
        tokens=best.step * cfg.train.global_batch_size * data.seq_len,
        dataset_path=data.path,
        tokenizer_path=run.output_dir,
        num_parameters=total,
        metrics={"valid_loss": best.loss, "steps": best.ends_at, "active_parameters": active},
    ).save()


def evaluate(cfg: SFTConfig, published: Model, model: NemotronH, best: Best, poll: Callable[[], None]) -> Results:
    """pass@1 on held-out tasks under the chat template, reasoning on, beside the best constant answer."""
    metrics: dict[str, Any] = {"valid_loss": best.loss}
    settings = cfg.evaluation
    if settings.tasks_per_family:
        tasks = {
            family: generate_tasks(
                family, "eval", settings.tasks_per_family, settings.seed, settings.difficulty.get(family)
            )
            for family in FAMILIES
        }
        evaluation = evaluate_model(
            model, load_tokenizer(published.path), [task for several in tasks.values() for task in several],
            samples=settings.samples, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size,
            seed=settings.seed, poll=poll,
        )  # fmt: skip
        metrics["tasks"] = evaluation.metrics()
        metrics["best_constant"] = {family: best_constant_answer(several).score for family, several in tasks.items()}
        metrics["generations"] = evaluation.generations(per_family=2)
        for family in FAMILIES:
            print(
                f"{family}: pass@1 {evaluation.greedy(family).estimate:.3f} greedy, best constant answer "
                f"{metrics['best_constant'][family]:.3f}",
                file=sys.stderr,
            )
    return Results(metrics=metrics).save()


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
