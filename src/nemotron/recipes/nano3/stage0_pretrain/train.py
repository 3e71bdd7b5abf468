#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Pretrain the base model on blended text with the embedded stack: a CPU, one GPU, or torchrun."
# name = "nano3/pretrain"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "schema.py:PretrainConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 0: pretrain a base model, or go on with one in a further phase.

    nemotron nano3 pretrain -c tiny
    nemotron super3 pretrain -c tiny-phase2
    python train.py --config tiny optimizer.lr=1e-3
    torchrun --nproc-per-node 8 train.py --config small [dist.use_torch_fsdp2=true]

Reads the blend that `nemotron nano3 data prep pretrain` publishes; publishes the base model and its results: bits per
byte on held-out text beside an interpolated trigram model of the same training tokens, and pass@1 on verifiable tasks.

A phase is a run that goes on with a published model (`run.model`): with its weights and expert biases always, with its
AdamW moments where that run published them (`checkpoint.save_optim`, `load_optim`), and behind the last window that was
read of each source. Two such runs end with the bits of one that does the steps of both. Super 3 predicts further tokens
(`mtp_loss`), and its long-context phase has steps of long and of short sequences (`dataset.short`).

Shapes: B sequences, L = dataset.seq_length, V vocabulary, K depths of multi-token prediction.

Simplified against the papers (arXiv 2512.20848, section 2.3; Super: arXiv 2604.12374): the steps are the same (WSD
schedule, AdamW, two data phases, bias-based expert balancing plus a small load-balancing loss, the loss of multi-token
prediction), but there is no tensor, pipeline, context or expert parallelism, only data parallelism, whole or sharded;
fp32 or bf16 mixed precision, in which FP8 and NVFP4 are emulated; and sequences run across document borders, as
Megatron's do by default. Whether the paper's phases keep their moments is not published; here they do, since Megatron
goes on with its optimizer.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, PretrainBlend, Results, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import verifiable_families
from nemotron.stack.evaluation.language_model import bits_per_byte_of, score_text, token_byte_lengths
from nemotron.stack.evaluation.long_text import check_retrieval, score_long_text
from nemotron.stack.evaluation.model import load_tokenizer, score_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.quantization.fp8 import train_in_fp8
from nemotron.stack.quantization.nvfp4_training import Nvfp4Run, train_in_nvfp4
from nemotron.stack.training.checkpoint import load_moments, save_moments
from nemotron.stack.training.distributed import (
    Ranks,
    clip_gradients,
    deal,
    stop_distributed,
    sum_gradients,
    sum_metrics,
)
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.loaders import held_out_documents, validation_batches, validation_streams
from nemotron.stack.training.losses import mtp_loss_sums, next_token_loss, token_losses
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.merging import retain_weights
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr
from nemotron.stack.training.phases import PhaseLoaders, check_base
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session
from nemotron.stack.training.sharding import place_model, sync_gradients_in_backward, whole_model

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.schema import PretrainConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: PretrainConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model, metrics = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        steps = session.last_step
        published = publish_model(
            session.run, model, data.tokenizer_dir, metrics, dataset_path=cfg.dataset.path, num_steps=steps,
            tokens=steps * cfg.train.global_batch_size * cfg.dataset.seq_length,
        )  # fmt: skip
        with session.run.phase("evaluate"):
            results = evaluate(cfg, session, model, data)
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """What is trained on. byte_lengths_V: int64, the bytes of text that each token stands for; base: to go on from."""

    loaders: PhaseLoaders
    tokenizer_dir: Path
    byte_lengths_V: torch.Tensor
    base: Checkpoint | None = None


def open_data(cfg: PretrainConfig, ranks: Ranks) -> Data:
    """The blend. Which sequence comes when is a function of the seed and a cursor, which the checkpoint holds."""
    blend = PretrainBlend.load(path=cfg.dataset.path)
    ranks.check_divides("train.global_batch_size", cfg.train.global_batch_size)
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    loaders = PhaseLoaders(cfg.dataset, cfg.train.train_iters * cfg.train.global_batch_size, cfg.rng.seed, ranks)
    if (size := loaders.full.vocab_size) > cfg.model.vocab_size:
        raise UserError(f"model.vocab_size {cfg.model.vocab_size} is smaller than the tokenizer's {size}")
    tokenizer_dir = blend.tokenizer_path or blend.path
    tokenizer = load_tokenizer(tokenizer_dir)
    if (retrieval := cfg.evaluation.retrieval) is not None:
        if not validation_streams(cfg.dataset.path, 1):
            raise UserError(f"{blend.ref} holds no text out to ask about", "evaluation.retrieval=null leaves that out")
        documents = held_out_documents(cfg.dataset.path)
        check_retrieval(tokenizer, [*chain.from_iterable(documents.values())], retrieval)
    data = Data(loaders, tokenizer_dir, torch.from_numpy(token_byte_lengths(tokenizer)))
    if cfg.checkpoint.pretrained_checkpoint is not None:
        data.base = Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint)
        check_base(data.base, config_from_dict(cfg.model.model_dump()), tokenizer_dir)
        loaders.go_on_from(data.base, blend.path)
    return data


def train(cfg: PretrainConfig, session: Session, data: Data) -> tuple[NemotronH, dict[str, Any]]:
    """The training loop. Returns the model, whole on rank 0, the last validation, and what was read of which source."""
    ranks, loaders = session.ranks, data.loaders
    steps, batch_size = cfg.train.train_iters, cfg.train.global_batch_size
    # ---- model: the same seed on every rank, hence the same initial weights
    architecture = config_from_dict(cfg.model.model_dump())
    micro_batch_tokens = cfg.train.micro_batch_size * cfg.dataset.seq_length
    needs = Needs(architecture, micro_batch_tokens, cfg.model, sharded=cfg.dist.use_torch_fsdp2)
    check_memory(session, needs, "train.micro_batch_size")
    torch.manual_seed(cfg.rng.seed)
    model = NemotronH(architecture) if data.base is None else NemotronH.from_pretrained(data.base.path)
    bf16_blocks = cfg.model.num_layers_at_start_in_bf16, cfg.model.num_layers_at_end_in_bf16
    nvfp4 = Nvfp4Run(cfg.rng.seed, ranks.rank)
    if cfg.mixed_precision == "bf16_with_fp8_subchannel_scaling_mixed":
        train_in_fp8(model, *bf16_blocks)
    elif cfg.mixed_precision == "bf16_with_nvfp4_mixed":
        train_in_nvfp4(model, nvfp4, cfg.model.quant_recipe, *bf16_blocks)
    # Not `session.bf16`, which is true for FP8 and NVFP4 as well: they round fp32 weights, so sharded ones must travel
    # as fp32.
    bf16 = session.precision == "bf16_mixed"
    place_model(model, ranks, cfg.model, shard=cfg.dist.use_torch_fsdp2, bf16=bf16)
    optimizer = build_optimizer(model, cfg.optimizer)
    if data.base is not None and cfg.checkpoint.load_optim:
        load_moments(data.base.path, model, optimizer)
    tokens_per_step = batch_size * cfg.dataset.seq_length
    num_depths = model.config.mtp_num_layers if model.mtp is not None else 0

    # ---- resume: the same command after a crash goes on here, to the same weights
    step, metrics = 0, dict[str, Any]()
    if (restored := session.begin("pretrain", steps, model, optimizer)) is not None:
        step = restored.step
        loaders.load_state_dict(restored.state["loaders"])

    model.train()
    if cfg.dataset.short is None:  # else steps differ in shape, and so in which number of threads is the faster one
        session.choose_threads(batch_size, cfg.train.micro_batch_size, cfg.dataset.seq_length)
    while True:
        # ---- the head of a step: save where that is due, validate; nothing in it changes a weight. Here a signal is
        # answered with a checkpoint, on every rank; one that comes during an update waits for the next head.
        with session.head_of_step(step, {"loaders": loaders.state_dict()}):
            if step > 0 and step % (cfg.checkpoint.save_retain_interval or step + 1) == 0:
                retain_weights(session.run.output_dir, step, model, ranks)
            if step > 0 and (step % cfg.train.eval_interval == 0 or step == steps):
                metrics = validate(cfg, session, model, data)
                session.run.metrics.log(step, **metrics)
                bits = ", ".join(f"{source} {value:.3f}" for source, value in metrics["valid_bits_per_byte"].items())
                missing = "no validation: no source holds out more tokens than a sequence"
                session.progress.note(f"step {step}: {f'validation bits per byte {bits}' if bits else missing}")
        if step == steps:
            break

        # ---- a step is of long sequences or of short ones, which are so many more: the tokens stay as many
        loader = loaders.of_step(step)
        pieces = cfg.dataset.seq_length // loader.seq_len

        # ---- gradients. Loss: mean over all tokens of the global batch; each micro-batch adds its share, as each rank.
        # Depth k of multi-token prediction has the same denominator less the last k tokens of each sequence.
        lr = lr_at(step, steps, cfg.optimizer, cfg.scheduler)
        set_lr(optimizer, lr)
        phase = loader.blend.phase
        batch = loader.next_batch(batch_size * pieces).to(ranks.device)
        loss_sum, balance_sum = torch.zeros((), device=ranks.device), torch.zeros((), device=ranks.device)
        mtp_sums_K = torch.zeros(num_depths, device=ranks.device)
        micro_batches = list(batch.micro_batches(cfg.train.micro_batch_size * pieces))
        for i, micro in enumerate(micro_batches, start=1):
            sync_gradients_in_backward(model, i == len(micro_batches))
            nvfp4.begin(step, i)  # the random numbers of stochastic rounding are those of this micro-batch
            share = len(micro.input_ids_BL) / (batch_size * pieces)
            with session.autocast:
                out = model(micro.input_ids_BL)
            loss = next_token_loss(out.logits, micro.labels_BL) * share
            balance = out.load_balancing_loss * share
            total = loss + cfg.model.moe_aux_loss_coeff * balance
            if out.mtp_logits:
                nats_K, tokens_K = mtp_loss_sums(out.mtp_logits, micro.labels_BL)
                mtp_K = nats_K / tokens_K * share
                total = total + cfg.model.mtp_loss_scaling_factor * mtp_K.mean()
                mtp_sums_K += mtp_K.detach()
            total.backward()
            loss_sum += loss.detach()
            balance_sum += balance.detach()

        # ---- update
        sum_gradients(model)
        grad_norm = clip_gradients(model, cfg.optimizer.clip_grad).item()
        mtp_losses = {f"mtp_{depth}_loss": nats for depth, nats in enumerate(mtp_sums_K, start=1)}
        balance_per_block = balance_sum / max(1, len(model.moe_blocks()))
        sums = sum_metrics({"loss": loss_sum, "load_balancing_loss": balance_per_block, **mtp_losses}, ranks)
        loss_nats = sums["loss"]
        if not math.isfinite(loss_nats) or not math.isfinite(grad_norm):  # before it reaches a weight
            raise RunFailed(
                f"loss is {loss_nats}, gradient norm {grad_norm} at step {step + 1}",
                "a smaller optimizer.lr or a longer warm-up helps",
            )
        optimizer.step()
        optimizer.zero_grad()
        # Experts that saw fewer tokens than the mean become likelier to be chosen, the others less (aux-loss-free). The
        # tokens are those of all ranks.
        model.update_expert_bias(cfg.model.moe_router_bias_update_rate)

        # ---- records
        step += 1
        flops = tokens_per_step * training_flops_per_token(model.config, loader.seq_len)
        session.progress.update(step, tokens=tokens_per_step, flops=flops, loss=loss_nats, lr=lr)
        if step % cfg.logger.log_interval == 0 or step == steps:
            tokens = step * tokens_per_step
            length = {} if cfg.dataset.short is None else {"seq_length": loader.seq_len}
            session.run.metrics.log(step, **sums, lr=lr, grad_norm=grad_norm, tokens=tokens, phase=phase, **length)
    session.progress.close()
    if cfg.checkpoint.save_optim:
        save_moments(session.run.output_dir, model, optimizer, ranks.is_main)
    return whole_model(model, ranks), metrics | loaders.metrics()


@torch.no_grad()
def validate(cfg: PretrainConfig, session: Session, model: NemotronH, data: Data) -> dict[str, Any]:
    """Held-out loss (nats, mean over tokens) and bits per byte of each source, on a fixed sample of its windows."""
    device, byte_lengths_V = session.ranks.device, data.byte_lengths_V.to(session.ranks.device)
    sizes = cfg.dataset.seq_length, cfg.train.global_batch_size, cfg.train.eval_iters
    micro_batches = (
        (source, micro)
        for source, batch in validation_batches(cfg.dataset.path, *sizes)
        for micro in batch.micro_batches(cfg.train.micro_batch_size)
    )
    streams = validation_streams(cfg.dataset.path, cfg.dataset.seq_length)  # the same on all ranks
    sums = {
        (source, name): torch.zeros((), dtype=torch.float64, device=device)
        for source in streams
        for name in ("nats", "tokens", "bytes")
    }
    seq_len, batch_size, eval_iters = sizes
    num_rows = sum(min((stream.num_tokens - 1) // seq_len, eval_iters * batch_size) for stream in streams.values())
    progress, rows = session.progress_of_pass("validate", -(-num_rows // session.ranks.world_size)), 0
    model.eval()
    for (source, batch), counts in deal(micro_batches, session.ranks):
        session.poll()
        batch = batch.to(device)
        with session.autocast:
            logits_BLV = model(batch.input_ids_BL).logits
        if counts:
            nats_BL = token_losses(logits_BLV, batch.labels_BL)
            sums[source, "nats"] += nats_BL.double().sum()
            sums[source, "tokens"] += nats_BL.numel()
            sums[source, "bytes"] += byte_lengths_V[batch.labels_BL].sum()
        rows += len(batch.input_ids_BL)
        progress.update(rows, tokens=batch.input_ids_BL.numel())
    model.train()
    totals = sum_metrics(sums, session.ranks)
    loss, bits = {}, {}
    for source in streams:
        nats, tokens, num_bytes = (totals[source, name] for name in ("nats", "tokens", "bytes"))
        loss[source] = nats / tokens
        bits[source] = bits_per_byte_of(nats, int(num_bytes))
    return {"valid_loss": loss, "valid_bits_per_byte": bits}


def evaluate(cfg: PretrainConfig, session: Session, model: NemotronH, data: Data) -> Results:
    """Bits per byte on all held-out text, beside the trigram baseline; pass@1 on held-out tasks, in plain text."""
    poll = session.stop.poll  # rank 0 is alone by now: there is nobody to agree with
    sizes = {"seq_len": cfg.dataset.seq_length, "batch_size": cfg.train.micro_batch_size}
    trained = data.loaders.trained_tokens() if cfg.evaluation.trigram_baseline else None
    documents, byte_lengths_V = held_out_documents(cfg.dataset.path), data.byte_lengths_V.numpy()
    text = score_text(model, documents, trained, byte_lengths_V, **sizes, poll=poll)
    scores = score_tasks(model, data.tokenizer_dir, cfg.evaluation, template=None, poll=poll)
    if (retrieval := cfg.evaluation.retrieval) is not None:
        models = {"after": model}
        if data.base is not None:
            models["before"] = NemotronH.from_pretrained(data.base.path, device=session.ranks.device)
        tokenizer, passages = load_tokenizer(data.tokenizer_dir), [*chain.from_iterable(documents.values())]
        scores["long"] = {
            name: score_long_text(each, tokenizer, passages, byte_lengths_V, retrieval, **sizes, poll=poll)
            for name, each in models.items()
        }
    return Results(metrics={"text": text, **scores}).save()


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
