#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Pretrain the base model on blended text with the embedded stack: a CPU, one GPU, or torchrun."
# name = "nano3/pretrain"
# setup = "pip install nemotron"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# default = "default"
# format = "omegaconf"
# schema = "schema.py:PretrainConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 0: pretrain a Nemotron 3 Nano base model.

    nemotron nano3 pretrain -c tiny
    python train.py --config tiny optimizer.lr=1e-3
    torchrun --nproc-per-node 8 train.py --config small [dist.use_torch_fsdp2=true]

Reads the blend that `nemotron nano3 data prep pretrain` publishes; publishes the base model and its results: bits per
byte on held-out text beside an interpolated trigram model of the same training tokens, and pass@1 on verifiable tasks.

Shapes: B sequences, L = dataset.seq_length, V vocabulary.

Simplified against the paper (tech report, arXiv 2512.20848, section 2.3): the steps are the same (WSD schedule, AdamW,
two data phases that switch at 94 % of the tokens, bias-based expert balancing plus a small load-balancing loss), but
there is no tensor, pipeline or expert parallelism, only data parallelism, whole or sharded; no long-context phase;
fp32 or plain bf16 mixed precision; and sequences run across document borders, as Megatron's do by default.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Model, PretrainBlend, Progress, Results, Run, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import FAMILIES, generate_tasks
from nemotron.stack.evaluation import (
    bits_per_byte_of,
    evaluate_model,
    load_tokenizer,
    model_bits_per_byte,
    token_byte_lengths,
    trigram_bits_per_byte,
)
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import config_from_dict
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
from nemotron.stack.training.loaders import BlendLoader, held_out_documents, validation_batches
from nemotron.stack.training.losses import next_token_loss, token_losses
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.preemption import StopSignal
from nemotron.stack.training.recompute import recompute_activations
from nemotron.stack.training.schedule import Schedule, lr_at
from nemotron.stack.training.sharding import shard_model, sync_gradients_in_backward, whole_model

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.schema import PretrainConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: PretrainConfig = load_script_config(__file__, inputs=read_pipe)
    ranks = start_distributed()
    saved = cfg.model_dump(mode="json"), cfg.checkpoint.keep_last, cfg.checkpoint.async_save
    with (
        open_run(cfg, script=__file__) as run,
        StopSignal() as stop,
        Checkpoints(run.dir / "checkpoints", *saved) as checkpoints,
    ):
        data = PretrainBlend.load(path=cfg.dataset.path)
        tokenizer_dir = data.tokenizer_path or data.path
        with run.phase("train"):
            loader, byte_lengths = open_data(cfg, tokenizer_dir, ranks)
            model, metrics = train(cfg, run, loader, byte_lengths.to(ranks.device), ranks, stop, checkpoints)
        stop_distributed()
        if not ranks.is_main:  # one process publishes
            return
        published = publish(cfg, run, tokenizer_dir, model, loader, metrics)
        with run.phase("evaluate"):
            results = evaluate(cfg, run, published, model, loader, lambda: stop.check(checkpoints.last))
    print_complete({"model": published, "results": results})


def open_data(cfg: PretrainConfig, tokenizer_dir: Path, ranks: Ranks) -> tuple[BlendLoader, torch.Tensor]:
    """The training data, and int64 [V]: the bytes that each token stands for.

    Which sequence comes when is a function of the seed and a cursor, which the checkpoint holds.
    """
    batch_size = cfg.train.global_batch_size
    if batch_size % ranks.world_size:
        raise UserError(f"train.global_batch_size {batch_size} does not divide among {ranks.world_size} processes")
    sequences = cfg.train.train_iters * batch_size
    loader = BlendLoader(
        cfg.dataset.path, cfg.dataset.seq_length, sequences, cfg.rng.seed, ranks.rank, ranks.world_size
    )
    if loader.vocab_size > cfg.model.vocab_size:
        raise UserError(f"model.vocab_size {cfg.model.vocab_size} is smaller than the tokenizer's {loader.vocab_size}")
    return loader, torch.from_numpy(token_byte_lengths(load_tokenizer(tokenizer_dir)))


def train(
    cfg: PretrainConfig, run: Run, loader: BlendLoader, byte_lengths: torch.Tensor, ranks: Ranks, stop: StopSignal,
    checkpoints: Checkpoints,
) -> tuple[NemotronH, dict[str, Any]]:  # fmt: skip
    """The training loop. Returns the model, whole on rank 0, and the last validation."""
    device, steps, batch_size = ranks.device, cfg.train.train_iters, cfg.train.global_batch_size
    # ---- model: the same seed on every rank, hence the same initial weights
    torch.manual_seed(cfg.rng.seed)
    config = config_from_dict(cfg.model.model_dump())
    model = NemotronH(config)
    if cfg.dist.use_torch_fsdp2:  # each rank keeps a slice of every weight, else all of it
        shard_model(model, ranks, bf16=cfg.mixed_precision == "bf16_mixed")
    model.to(device)
    recompute_activations(model, cfg.model.recompute_granularity, cfg.model.recompute_modules)
    betas = (cfg.optimizer.adam_beta1, cfg.optimizer.adam_beta2)
    optimizer = build_optimizer(model, cfg.optimizer.lr, betas, cfg.optimizer.adam_eps, cfg.optimizer.weight_decay)
    schedule = Schedule(cfg.optimizer.lr, cfg.optimizer.min_lr, steps, **cfg.scheduler.model_dump())
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.mixed_precision == "bf16_mixed")

    # ---- resume: the same command after a crash goes on here, to the same weights
    start, metrics, validated = 0, dict[str, Any](), 0
    if run.resumed and (restored := checkpoints.load_latest(model, optimizer)) is not None:
        start, metrics, validated = restored.step, restored.state["metrics"], restored.state["validated"]
        loader.load_state_dict(restored.state["loader"])
        if ranks.is_main:
            print(f"resumed at step {start} of {steps}", file=sys.stderr)
    run.metrics.truncate_after(start or -1)

    flops_per_token = training_flops_per_token(config, cfg.dataset.seq_length)
    tokens_per_step = batch_size * cfg.dataset.seq_length
    peak = measure_peak_flops(device, torch.float32 if cfg.mixed_precision == "fp32" else torch.bfloat16)
    progress = Progress(
        steps, label="pretrain", start=start, peak_flops=peak * ranks.world_size,
        stream=sys.stderr if ranks.is_main else io.StringIO(),
    )  # fmt: skip

    def validation_due(done: int) -> bool:
        return done > validated and (done % cfg.train.eval_interval == 0 or done == steps)

    def note_validation(done: int) -> None:
        """Validate unless a signal cuts it short; a resumed run then makes up for it."""
        nonlocal metrics, validated
        if (found := validate(cfg, model, byte_lengths, ranks, stop, autocast)) is not None:
            metrics, validated = found, done
            run.metrics.log(done, **metrics)
            progress.note(f"step {done}: validation bits per byte {shown(metrics['valid_bits_per_byte'])}")

    model.train()
    if validation_due(start):
        note_validation(start)
    for step in range(start, steps):
        lr = lr_at(step, schedule)
        set_lr(optimizer, lr)
        batch = loader.next_batch(batch_size).to(device)
        # Loss: mean over all tokens of the global batch. Each micro-batch adds its share of it, and so does each rank.
        losses = torch.zeros(2, device=device)
        micro_batches = list(batch.micro_batches(cfg.train.micro_batch_size))
        for i, micro in enumerate(micro_batches, start=1):
            sync_gradients_in_backward(model, i == len(micro_batches))
            share = len(micro.input_ids_BL) / batch_size
            with autocast:
                out = model(micro.input_ids_BL)
            loss = torch.stack([next_token_loss(out.logits, micro.labels_BL), out.load_balancing_loss]) * share
            (loss[0] + cfg.model.moe_aux_loss_coeff * loss[1]).backward()
            losses += loss.detach()
        sum_gradients(model)
        sum_over_ranks([losses])
        grad_norm = clip_gradients(model, cfg.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        # Experts that saw fewer tokens than the mean become likelier to be chosen, the others less (aux-loss-free).
        model.update_expert_bias(cfg.model.moe_router_bias_update_rate)

        done = step + 1
        loss_nats, balance = losses.tolist()
        if not math.isfinite(loss_nats):
            raise RunFailed(f"loss is {loss_nats} at step {done}", "a smaller optimizer.lr or a longer warm-up helps")
        progress.update(done, tokens=tokens_per_step, flops=tokens_per_step * flops_per_token, loss=loss_nats, lr=lr)
        last = done == steps
        if done % cfg.logger.log_interval == 0 or last:
            run.metrics.log(
                done, loss=loss_nats, lr=lr, grad_norm=grad_norm, load_balancing_loss=balance,
                tokens=done * tokens_per_step, phase=loader.blend.phase,
            )  # fmt: skip
        if validation_due(done):
            note_validation(done)
        stopping = any_rank(stop.requested, device)
        if done % cfg.checkpoint.save_interval == 0 or last or stopping:
            state = {"loader": loader.state_dict(), "metrics": metrics, "validated": validated}
            checkpoints.save(done, model, optimizer, state)
        if stopping:
            raise stop.error(checkpoints.last)
    progress.close()
    if validation_due(steps):  # a signal has come while the last one was made up for
        raise stop.error(checkpoints.last)
    return whole_model(model, ranks), metrics


@torch.no_grad()
def validate(
    cfg: PretrainConfig, model: NemotronH, byte_lengths: torch.Tensor, ranks: Ranks, stop: StopSignal,
    autocast: torch.autocast,
) -> dict[str, Any] | None:  # fmt: skip
    """Held-out loss (nats, mean over tokens) and bits per byte of each source, on a fixed sample of its windows.

    None where a signal came: all ranks then leave together.
    """
    sizes = cfg.dataset.seq_length, cfg.train.global_batch_size, cfg.train.eval_iters
    batches = [
        (source, micro)
        for source, batch in validation_batches(cfg.dataset.path, *sizes)
        for micro in batch.micro_batches(cfg.train.micro_batch_size)
    ]
    sums = {source: torch.zeros(3, dtype=torch.float64, device=ranks.device) for source, _ in batches}
    model.eval()
    stopping = False
    for (source, batch), counts in deal(batches, ranks):
        if stopping := any_rank(stop.requested, ranks.device):
            break
        batch = batch.to(ranks.device)
        with autocast:
            logits_BLV = model(batch.input_ids_BL).logits
        if counts:
            nats_BL = token_losses(logits_BLV, batch.labels_BL)
            sums[source][0] += nats_BL.double().sum()
            sums[source][1] += nats_BL.numel()
            sums[source][2] += byte_lengths[batch.labels_BL].sum()
    model.train()
    if stopping:
        return None
    sum_over_ranks(sums.values())
    loss, bits = {}, {}
    for source, (nats, tokens, num_bytes) in sums.items():
        loss[source] = (nats / tokens).item()
        bits[source] = bits_per_byte_of(nats.item(), int(tokens), int(num_bytes)).bits_per_byte
    return {"valid_loss": loss, "valid_bits_per_byte": bits}


def publish(
    cfg: PretrainConfig, run: Run, tokenizer_dir: Path, model: NemotronH, loader: BlendLoader, metrics: dict[str, Any]
) -> Model:
    """The model of the last step, in Hugging Face layout with its tokenizer, as the artifact `run.output`."""
    if (done := run.published()) is not None:
        return Model.load(done.ref)  # stopped during evaluation: these weights are published already
    model.save_pretrained(run.output_dir)
    for file in sorted(tokenizer_dir.glob("*token*.json")):
        shutil.copyfile(file, run.output_dir / file.name)
    total, active = model.num_parameters()
    return Model(
        path=run.output_dir,
        step=cfg.train.train_iters,
        tokens=cfg.train.train_iters * cfg.train.global_batch_size * cfg.dataset.seq_length,
        dataset_path=cfg.dataset.path,
        tokenizer_path=run.output_dir,
        num_parameters=total,
        metrics={
            **metrics,
            "active_parameters": active,
            "mixture": [asdict(row) for row in loader.mixture()],  # realised beside requested
            "epochs": {**loader.epochs()},
        },
    ).save()


def evaluate(
    cfg: PretrainConfig, run: Run, published: Model, model: NemotronH, loader: BlendLoader, poll: Callable[[], None]
) -> Results:
    """Bits per byte on all held-out text, beside the trigram baseline; pass@1 on held-out tasks, in plain text."""
    tokenizer = load_tokenizer(published.path)
    byte_lengths = token_byte_lengths(tokenizer)
    trained = loader.trained_tokens() if cfg.evaluation.trigram_baseline else np.empty(0, np.int64)
    text: dict[str, Any] = {}
    for source, documents in held_out_documents(cfg.dataset.path).items():
        # Every tenth document sets the weights of the trigram's interpolation; the others are scored, by both.
        fit, scored = documents[::10], [document for i, document in enumerate(documents) if i % 10]
        stream = np.concatenate(scored or fit)
        score = model_bits_per_byte(
            model, stream, byte_lengths, seq_len=cfg.dataset.seq_length, batch_size=cfg.train.micro_batch_size,
            poll=poll,
        )  # fmt: skip
        text[source] = {"bits_per_byte": score.bits_per_byte, "tokens": score.tokens, "bytes": score.bytes}
        if len(trained) and scored:
            trigram = trigram_bits_per_byte(trained, np.concatenate(fit), stream, byte_lengths)
            text[source]["trigram_bits_per_byte"] = trigram.bits_per_byte
    metrics: dict[str, Any] = {"text": text}
    settings = cfg.evaluation
    if settings.tasks_per_family:
        tasks = [
            generate_tasks(family, "eval", settings.tasks_per_family, settings.seed, settings.difficulty.get(family))
            for family in FAMILIES
        ]
        evaluation = evaluate_model(
            model, tokenizer, [task for several in tasks for task in several], prompt_format="plain",
            samples=settings.samples, seed=settings.seed, max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size, poll=poll,
        )  # fmt: skip
        metrics["tasks"] = evaluation.metrics()
        metrics["generations"] = evaluation.generations(per_family=2)
    for source, scores in text.items():
        beside = f" (trigram {scores['trigram_bits_per_byte']:.3f})" if "trigram_bits_per_byte" in scores else ""
        print(f"{source}: {scores['bits_per_byte']:.3f} bits per byte{beside}", file=sys.stderr)
    return Results(metrics=metrics).save()


def shown(values: dict[str, float]) -> str:
    """`name 1.234, ...` for a line on the screen."""
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
