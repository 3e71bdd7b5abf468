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

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import PretrainBlend, Results, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.stack.environments import verifiable_families
from nemotron.stack.evaluation.language_model import bits_per_byte_of, score_text, token_byte_lengths
from nemotron.stack.evaluation.model import load_tokenizer, score_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.quantization.fp8 import train_in_fp8
from nemotron.stack.training.distributed import (
    Ranks,
    clip_gradients,
    deal,
    stop_distributed,
    sum_gradients,
    sum_metrics,
)
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.loaders import BlendLoader, held_out_documents, validation_batches, validation_streams
from nemotron.stack.training.losses import next_token_loss, token_losses
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr
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
            results = evaluate(cfg, session, data, model)
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """What is trained on. byte_lengths_V: int64, the bytes of text that each token stands for."""

    loader: BlendLoader
    tokenizer_dir: Path
    byte_lengths_V: torch.Tensor


def open_data(cfg: PretrainConfig, ranks: Ranks) -> Data:
    """The blend. Which sequence comes when is a function of the seed and a cursor, which the checkpoint holds."""
    blend = PretrainBlend.load(path=cfg.dataset.path)
    ranks.check_divides("train.global_batch_size", cfg.train.global_batch_size)
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    sequences = cfg.train.train_iters * cfg.train.global_batch_size
    loader = BlendLoader(cfg.dataset.path, cfg.dataset.seq_length, sequences, cfg.rng.seed, ranks)
    if loader.vocab_size > cfg.model.vocab_size:
        raise UserError(f"model.vocab_size {cfg.model.vocab_size} is smaller than the tokenizer's {loader.vocab_size}")
    tokenizer_dir = blend.tokenizer_path or blend.path
    return Data(loader, tokenizer_dir, torch.from_numpy(token_byte_lengths(load_tokenizer(tokenizer_dir))))


def train(cfg: PretrainConfig, session: Session, data: Data) -> tuple[NemotronH, dict[str, Any]]:
    """The training loop. Returns the model, whole on rank 0, the last validation, and what was read of which source."""
    ranks, loader = session.ranks, data.loader
    steps, batch_size = cfg.train.train_iters, cfg.train.global_batch_size
    # ---- model: the same seed on every rank, hence the same initial weights
    architecture = config_from_dict(cfg.model.model_dump())
    tokens = cfg.train.micro_batch_size * cfg.dataset.seq_length
    needs = Needs(architecture, tokens, cfg.model, sharded=cfg.dist.use_torch_fsdp2)
    check_memory(session, needs, "train.micro_batch_size")
    torch.manual_seed(cfg.rng.seed)
    model = NemotronH(architecture)
    fp8 = cfg.mixed_precision == "bf16_with_fp8_subchannel_scaling_mixed"
    if fp8:
        train_in_fp8(model, cfg.model.num_layers_at_start_in_bf16, cfg.model.num_layers_at_end_in_bf16)
    # FP8 rounds the fp32 weights: sharded ones travel as they are.
    place_model(model, ranks, cfg.model, shard=cfg.dist.use_torch_fsdp2, bf16=session.bf16 and not fp8)
    optimizer = build_optimizer(model, cfg.optimizer)
    tokens_per_step = batch_size * cfg.dataset.seq_length
    flops_per_step = tokens_per_step * training_flops_per_token(model.config, cfg.dataset.seq_length)

    # ---- resume: the same command after a crash goes on here, to the same weights
    step, metrics = 0, dict[str, Any]()
    if (restored := session.begin("pretrain", steps, model, optimizer)) is not None:
        step = restored.step
        loader.load_state_dict(restored.state["loader"])

    model.train()
    session.choose_threads(batch_size, cfg.train.micro_batch_size, cfg.dataset.seq_length)
    while True:
        # ---- the head of a step: save where that is due, validate; nothing in it changes a weight. Here a signal is
        # answered with a checkpoint, on every rank; one that comes during an update waits for the next head.
        with session.head_of_step(step, {"loader": loader.state_dict()}):
            if step > 0 and (step % cfg.train.eval_interval == 0 or step == steps):
                metrics = validate(cfg, session, model, data)
                session.run.metrics.log(step, **metrics)
                bits = ", ".join(f"{source} {value:.3f}" for source, value in metrics["valid_bits_per_byte"].items())
                session.progress.note(f"step {step}: validation bits per byte {bits}")
        if step == steps:
            break

        # ---- gradients. Loss: mean over all tokens of the global batch; each micro-batch adds its share, as each rank
        lr = lr_at(step, steps, cfg.optimizer, cfg.scheduler)
        set_lr(optimizer, lr)
        phase = loader.blend.phase
        batch = loader.next_batch(batch_size).to(ranks.device)
        loss_sum, balance_sum = torch.zeros((), device=ranks.device), torch.zeros((), device=ranks.device)
        micro_batches = list(batch.micro_batches(cfg.train.micro_batch_size))
        for i, micro in enumerate(micro_batches, start=1):
            sync_gradients_in_backward(model, i == len(micro_batches))
            share = len(micro.input_ids_BL) / batch_size
            with session.autocast:
                out = model(micro.input_ids_BL)
            loss = next_token_loss(out.logits, micro.labels_BL) * share
            balance = out.load_balancing_loss * share
            (loss + cfg.model.moe_aux_loss_coeff * balance).backward()
            loss_sum += loss.detach()
            balance_sum += balance.detach()

        # ---- update
        sum_gradients(model)
        grad_norm = clip_gradients(model, cfg.optimizer.clip_grad).item()
        sums = sum_metrics({"loss": loss_sum, "load_balancing_loss": balance_sum}, ranks)
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
        session.progress.update(step, tokens=tokens_per_step, flops=flops_per_step, loss=loss_nats, lr=lr)
        if step % cfg.logger.log_interval == 0 or step == steps:
            tokens = step * tokens_per_step
            session.run.metrics.log(step, **sums, lr=lr, grad_norm=grad_norm, tokens=tokens, phase=phase)
    session.progress.close()
    mixture = [asdict(row) for row in loader.mixture()]  # realised beside requested
    return whole_model(model, ranks), {**metrics, "mixture": mixture, "epochs": loader.epochs()}


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
        (source, of): torch.zeros((), dtype=torch.float64, device=device)
        for source in streams
        for of in ("nats", "tokens", "bytes")
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
        nats, tokens, num_bytes = (totals[source, of] for of in ("nats", "tokens", "bytes"))
        loss[source] = nats / tokens
        bits[source] = bits_per_byte_of(nats, int(num_bytes))
    return {"valid_loss": loss, "valid_bits_per_byte": bits}


def evaluate(cfg: PretrainConfig, session: Session, data: Data, model: NemotronH) -> Results:
    """Bits per byte on all held-out text, beside the trigram baseline; pass@1 on held-out tasks, in plain text."""
    poll = session.stop.poll  # rank 0 is alone by now: there is nobody to agree with
    trained = data.loader.trained_tokens() if cfg.evaluation.trigram_baseline else None
    text = score_text(
        model, held_out_documents(cfg.dataset.path), trained, data.byte_lengths_V.numpy(),
        seq_len=cfg.dataset.seq_length, batch_size=cfg.train.micro_batch_size, poll=poll,
    )  # fmt: skip
    scores = score_tasks(model, data.tokenizer_dir, cfg.evaluation, template=None, poll=poll)
    return Results(metrics={"text": text, **scores}).save()


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
