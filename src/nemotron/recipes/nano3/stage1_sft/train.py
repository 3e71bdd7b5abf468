#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Supervised fine-tuning on packed conversations with the embedded stack: a CPU, one GPU, or torchrun."
# name = "nano3/sft"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "schema.py:SFTConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 1: teach the base model to answer, with reasoning on and off.

    nemotron nano3 sft -c tiny
    nemotron nano3 sft -c lora run.model=my-model run.data=my-chats
    nemotron super3 sft -c tiny-conversation
    python train.py --config tiny optimizer.lr=1e-3
    torchrun --nproc-per-node 8 train.py --config small [dist.use_torch_fsdp2=true]

Reads the base model and the packed conversations that `nemotron nano3 data prep sft` publishes; publishes the weights
of the best validation loss, and their results: pass@1 on held-out verifiable tasks, greedy and sampled. With
`peft.peft_scheme=lora` adapters are trained on the frozen model: it is published with them merged, and they beside it
in the folder `adapter`, as PEFT reads them.

Shapes: B packed rows, L tokens a row, T trained tokens, V vocabulary, K depths of multi-token prediction.

Simplified against the papers (Nano: arXiv 2512.20848, section 3.1; Super: arXiv 2604.12374): rows of a few hundred
tokens instead of 256k; no agent data. Loss mask, packing without leakage between conversations (attention, convolution
and SSM state), the means over tokens and over conversations, multi-token prediction and the load-balancing loss are the
papers'. They train a fixed number of steps; here the final decay begins when validation stops improving, which WSD
allows at any time.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, Results, SFTPack, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.model_folder import ADAPTER_FOLDER
from nemotron.stack.environments import verifiable_families
from nemotron.stack.evaluation.model import score_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.models.published.hub import open_weights
from nemotron.stack.models.published.peft_adapter import save_adapter
from nemotron.stack.training.distributed import (
    Ranks,
    clip_gradients,
    deal,
    stop_distributed,
    sum_gradients,
    sum_metrics,
    sum_over_ranks,
)
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.loaders import PackedLoader
from nemotron.stack.training.lora import add_lora, count_lora_parameters, merge_lora
from nemotron.stack.training.losses import mtp_loss_sums, mtp_trained_tokens, selected_loss_sum
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session
from nemotron.stack.training.sharding import place_model, sync_gradients_in_backward, whole_model, whole_weights

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: SFTConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model, best = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        pack = data.pack
        if cfg.peft.peft_scheme:
            save_adapter(session.run.output_dir / ADAPTER_FOLDER, model, cfg.peft, data.base)
            merge_lora(model)
        published = publish_model(
            session.run, model, data.base.path, {"valid_loss": best.loss, "steps": session.last_step},
            num_steps=best.step, tokens=best.step * cfg.train.global_batch_size * pack.seq_len, dataset_path=pack.path,
            chat_template=pack.chat_template, reasoning=pack.reasoning, move=True,
        )  # fmt: skip
        with session.run.phase("evaluate"):
            # Under the chat template, with reasoning on unless it was trained without.
            scores = score_tasks(
                model, data.base.path, cfg.evaluation, template=str(pack.chat_template),
                thinking=pack.reasoning is not False, poll=session.stop.poll,
            )  # fmt: skip
            results = Results(metrics={"valid_loss": best.loss, **scores}).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, and packed rows to train on and to validate on."""

    base: Checkpoint
    pack: SFTPack
    loader: PackedLoader
    valid: PackedLoader


def open_data(cfg: SFTConfig, ranks: Ranks) -> Data:
    """Refuses data of another tokenizer than the model's, whose ids would mean other text, and data without a trained
    token, among them validation rows of which `train.eval_iters` reads none that has one."""
    pack, base = SFTPack.load(path=cfg.dataset.path), Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint)
    tokenizer = (pack.tokenizer_path or pack.path) / "tokenizer.json"
    if pack.tokenizer_path is not None and not tokenizer.is_file():
        raise UserError(f"{pack.ref}: no tokenizer at {tokenizer}", "prepare the data again, which copies it there")
    if tokenizer.is_file() and tokenizer.read_bytes() != (base.path / "tokenizer.json").read_bytes():
        raise UserError(
            f"{pack.ref} was tokenised with another tokenizer than that of {base.ref}",
            f"prepare the data again with run.tokenizer={base.ref} text.path=null, or train on the other data",
        )
    ranks.check_divides("train.global_batch_size", cfg.train.global_batch_size)
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    if pack.train_path is None or pack.valid_path is None:
        what = "training" if pack.train_path is None else "validation"
        hint = "valid_fraction of a source of data prep is the share held out; of few conversations it may be none"
        raise UserError(f"{pack.ref} has no {what} rows", hint if what == "validation" else None)
    seq_len, seed, reduction = pack.seq_len, cfg.rng.seed, cfg.train.loss_reduction
    loader = PackedLoader(pack.train_path, seq_len, seed, ranks, reduction)
    valid = PackedLoader(pack.valid_path, seq_len, seed, reduction=reduction)  # whole on every rank: `validate` deals
    valid.check_first_rows(cfg.train.eval_iters * cfg.train.global_batch_size, "train.eval_iters")
    return Data(base, pack, loader, valid)


@dataclass
class Best:
    """The best validation so far, and how many since then were no better."""

    loss: float = math.inf
    step: int = 0
    since: int = 0


def train(cfg: SFTConfig, session: Session, data: Data) -> tuple[NemotronH, Best]:
    """The training loop. Returns the model, on rank 0 whole with the best weights, and the record of validations."""
    ranks, loader, batch_size = session.ranks, data.loader, cfg.train.global_batch_size
    tokens = cfg.train.micro_batch_size * data.pack.seq_len
    config, lora, sharded = load_config(data.base.path), cfg.peft.peft_scheme == "lora", cfg.dist.use_torch_fsdp2
    adapters = count_lora_parameters(config, cfg.peft) if lora else None
    # Where products are bf16 anyway, frozen weights keep the dtype of their file: bf16 takes half the memory. The
    # embeddings are frozen, so the residual stream is bf16, too. FSDP2 wants one dtype.
    as_stored = lora and session.bf16 and not sharded
    needs = Needs(
        config, tokens, cfg.model, sharded=sharded, best_weights=True, trained=adapters,
        frozen_bytes=sum(tensor.num_bytes for tensor in open_weights(data.base.path).values()) if as_stored else None,
    )  # fmt: skip
    check_memory(session, needs, "train.micro_batch_size")
    torch.manual_seed(cfg.rng.seed)
    # Straight to a GPU, so that the machine's own memory need not hold 63 GB; where it is sliced, on the CPU first.
    place = torch.device("cpu") if sharded else ranks.device
    model = NemotronH.from_pretrained(data.base.path, "auto" if as_stored else torch.float32, place)
    if lora:
        try:
            add_lora(model, cfg.peft)
        except ValueError as error:
            raise UserError(f"peft.target_modules: {error}") from error
    num_depths = model.config.mtp_num_layers if model.mtp is not None and cfg.model.mtp_loss_scaling_factor else 0
    place_model(model, ranks, cfg.model, shard=sharded, bf16=session.bf16)
    optimizer = build_optimizer(model, cfg.optimizer)
    tokens_per_step = batch_size * data.pack.seq_len
    trained = replace(model.config, mtp_num_layers=num_depths)  # depths of this stage
    flops_per_step = tokens_per_step * training_flops_per_token(trained, data.pack.seq_len)

    # ---- resume: the same command after a crash goes on here, to the same weights
    step, best, best_weights = 0, Best(), dict[str, torch.Tensor]()
    if (restored := session.begin("sft", cfg.train.train_iters, model, optimizer)) is not None:
        step, best, best_weights = restored.step, Best(**restored.state["best"]), restored.tensors
        loader.load_state_dict(restored.state["loader"])

    model.train()
    session.choose_threads(batch_size, cfg.train.micro_batch_size, data.pack.seq_len, packed=True)
    while True:
        # ---- the head of a step: save where that is due, validate; nothing in it changes a weight
        state = {"loader": loader.state_dict(), "best": asdict(best)}
        with session.head_of_step(step, state, best_weights.copy):
            if step > 0 and (step % cfg.train.eval_interval == 0 or step == session.last_step):
                valid_loss = validate(cfg, session, model, data)
                if valid_loss < best.loss:
                    best_weights = whole_weights(model, ranks, trained_only=True)
                note_validation(cfg, session, best, step, valid_loss)
        if step == session.last_step:
            break

        # ---- gradients. Loss: mean over the trained tokens of the global batch, wherever they are, by their weights in
        # the mask: all 1, or that of the conversation. With train.loss_reduction "conversation" a weight is divided by
        # the number of trained tokens of its conversation, and so this is the mean over conversations of their means.
        # Depth k of multi-token prediction: mean over the trained tokens of the global batch that are at least k behind
        # the beginning of their sequence. Each of them weighs the same, under either reduction.
        lr = lr_at(step, session.last_step, cfg.optimizer, cfg.scheduler)
        set_lr(optimizer, lr)
        batch = loader.next_batch(batch_size).to(ranks.device)
        trained_tokens, sum_of_weights = batch.loss_mask_BL.bool().sum().float(), batch.loss_mask_BL.sum().float()
        mtp_tokens_K = mtp_trained_tokens(batch.loss_mask_BL.bool(), batch.seq_idx_BL, num_depths)
        sum_over_ranks([trained_tokens, sum_of_weights, mtp_tokens_K])
        sum_of_weights = sum_of_weights.where(sum_of_weights > 0, 1.0)
        loss_sum, balance_sum = torch.zeros((), device=ranks.device), torch.zeros((), device=ranks.device)
        mtp_sums_K = torch.zeros(num_depths, device=ranks.device)
        micro_batches = list(batch.micro_batches(cfg.train.micro_batch_size))
        for i, micro in enumerate(micro_batches, start=1):
            sync_gradients_in_backward(model, i == len(micro_batches))
            share = len(micro.input_ids_BL) / batch_size
            answers_BL = micro.loss_mask_BL.bool()  # prompts need no logits, which is most of the output head saved
            with session.autocast:
                out = model(micro.input_ids_BL, micro.seq_idx_BL, answers_BL, mtp_depths=num_depths)
            weights_T = micro.loss_mask_BL[answers_BL]
            loss = selected_loss_sum(out.logits, micro.labels_BL[answers_BL], weights_T) / sum_of_weights
            balance = out.load_balancing_loss * share
            total = loss + cfg.model.moe_aux_loss_coeff * balance
            if num_depths:
                nats_K, _ = mtp_loss_sums(out.mtp_logits, micro.labels_BL, micro.seq_idx_BL, answers_BL)
                mtp_K = nats_K / mtp_tokens_K.clamp(min=1)
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
        # Experts that saw fewer tokens than the mean become likelier to be chosen, the others less (aux-loss-free).
        model.update_expert_bias(cfg.model.moe_router_bias_update_rate)

        # ---- records
        step += 1
        session.progress.update(step, tokens=tokens_per_step, flops=flops_per_step, loss=loss_nats, lr=lr)
        if step % cfg.logger.log_interval == 0 or step == session.last_step:
            session.run.metrics.log(
                step, **sums, lr=lr, grad_norm=grad_norm, trained_tokens=trained_tokens, epochs=loader.epochs
            )
    session.progress.close()
    model = whole_model(model, ranks)
    if ranks.is_main:
        model.load_state_dict(model.state_dict() | best_weights)
    return model, best


@torch.no_grad()
def validate(cfg: SFTConfig, session: Session, model: NemotronH, data: Data) -> float:
    """Held-out loss in nats: the mean that is trained, over tokens by their weights or over conversations."""
    device = session.ranks.device
    batches = islice(data.valid.all_batches(cfg.train.global_batch_size), cfg.train.eval_iters)
    micro_batches = (micro for batch in batches for micro in batch.micro_batches(cfg.train.micro_batch_size))
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("nats", "weights")}
    num_rows = min(data.valid.num_rows, cfg.train.eval_iters * cfg.train.global_batch_size)
    progress, rows = session.progress_of_pass("validate", -(-num_rows // session.ranks.world_size)), 0
    model.eval()
    for batch, counts in deal(micro_batches, session.ranks):
        session.poll()
        batch = batch.to(device)
        answers_BL = batch.loss_mask_BL.bool()
        with session.autocast:
            logits_TV = model(batch.input_ids_BL, batch.seq_idx_BL, answers_BL).logits
        if counts:
            weights_T = batch.loss_mask_BL[answers_BL]
            sums["nats"] += selected_loss_sum(logits_TV, batch.labels_BL[answers_BL], weights_T).double()
            sums["weights"] += weights_T.sum()
        rows += len(batch.input_ids_BL)
        progress.update(rows, tokens=batch.input_ids_BL.numel())
    model.train()
    totals = sum_metrics(sums, session.ranks)
    return totals["nats"] / totals["weights"]


def note_validation(cfg: SFTConfig, session: Session, best: Best, step: int, loss: float) -> None:
    """Log a validation and count it: a better one, or one more without improvement.

    When patience is lost, the steps left are those of the final decay: with WSD it may begin at any time.
    """
    best.since = 0 if loss < best.loss - cfg.train.early_stop_min_delta else best.since + 1
    if loss < best.loss:
        best.loss, best.step = loss, step
    session.run.metrics.log(step, valid_loss=loss)
    session.progress.note(f"step {step}: validation loss {loss:.4f}, best {best.loss:.4f} at step {best.step}")
    decay = cfg.scheduler.lr_wsd_decay_iters if cfg.scheduler.lr_decay_style == "WSD" else 0
    patience_lost = 0 < cfg.train.early_stop_patience <= best.since and step >= cfg.scheduler.lr_warmup_iters
    if patience_lost and step + decay < session.last_step:
        session.end_at(step + decay)
        session.progress.note(f"step {step}: no improvement in {best.since} validations; the last {decay} steps begin")


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
