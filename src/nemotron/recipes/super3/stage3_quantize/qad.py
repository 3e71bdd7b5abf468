#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Train a quantised model to predict what the full one predicts: distillation through the rounding, by logits."
# name = "super3/qad"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/qad"
# format = "omegaconf"
# schema = "qad_schema.py:QADConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 3, second step: quantisation-aware distillation (QAD) wins back what quantisation lost.

    nemotron super3 qad -c tiny
    python qad.py --config tiny optimizer.lr=3e-4 train.train_iters=100

Reads the quantised model that `nemotron super3 quantize` publishes, and the full one that it was made from. The student
begins as the full model, whose weights are rounded in each forward pass with the scales of the quantised one, as are
activations, keys and values; gradients pass the rounding unchanged, to weights that are not rounded. Scales stay as
they are. Loss: forward KL of the student to the full model over the whole vocabulary, temperature 1, and nothing else.

Published as the quantised model is, with the same scales and new codes, and measured in the same way.

Shapes: B packed rows, L tokens a row, T trained tokens, V vocabulary, D hidden size.

Simplified against the papers (Super 3: 5 B tokens of SFT samples and RL prompts, 60 to 40; Lightning 3.5: 200 steps of
64 x 32,768 tokens): rows of SFT data alone, one process. The multi-token prediction block, which nothing quantises, is
not trained, and neither is the correction bias of the router.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.kit import Checkpoint, QuantizedModel, Results, SFTPack, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.recipes.super3.stage3_quantize.measure import HeldOut, held_out_recovery, measure, open_held_out
from nemotron.stack.compression.distillation import Recovery, forward_kl_sum
from nemotron.stack.environments import verifiable_families
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import kept_values
from nemotron.stack.quantization.export import load_model, read_quantization, save_quantized, stored_bytes
from nemotron.stack.quantization.layers import Quantization, matrix, quantized_weights, repacked, round_activations
from nemotron.stack.training.loaders import PackedLoader
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr
from nemotron.stack.training.publish import publish_written
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.super3.stage3_quantize.qad_schema import QADConfig


def main() -> None:
    """Config, then distil, publish, measure."""
    cfg: QADConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        data = open_data(cfg)
        with session.run.phase("train"):
            student, teacher, quantization, curve = distil(cfg, session, data)

        # ---- publish: new codes under the old scales
        packed = {name: repacked(matrix(student, name).detach(), old) for name, old in quantization.packed.items()}
        kept = kept_values(data.full.path)
        save_quantized(session.run.output_dir, student, replace(quantization, packed=packed), kept)
        quantized, steps, sizes = data.quantized, session.last_step, stored_bytes(student, quantization.plan)
        published = publish_written(
            session.run, student, quantized.path, QuantizedModel, {"bytes": sizes, "steps": steps},
            num_steps=steps, tokens=steps * cfg.train.global_batch_size * data.pack.seq_len,
            dataset_path=data.pack.path, chat_template=quantized.chat_template, reasoning=quantized.reasoning,
            quant_algo=quantized.quant_algo, full_path=quantized.full_path,
        )  # fmt: skip

        with session.run.phase("evaluate"):
            read_back = load_model(published.path, device=session.ranks.device)
            held_out = HeldOut(data.valid, cfg.dataset.eval_rows, cfg.evaluation)
            metrics = measure(teacher, read_back, published, held_out, session.stop.poll)
            won_back = 1 - metrics["recovery"]["kl"] / curve[0].kl if curve[0].kl else 0.0
            print(f"KL a token: {curve[0].kl:.5f} before, {won_back:.0%} of it won back", file=sys.stderr)
            before = {"ptq": asdict(curve[0]), "kl_won_back": won_back}
            results = Results(metrics=before | metrics).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The quantised model, the full one, and packed rows to train on and to validate on."""

    quantized: QuantizedModel
    full: Checkpoint
    pack: SFTPack
    loader: PackedLoader
    valid: PackedLoader


def open_data(cfg: QADConfig) -> Data:
    """Refuses a model that is not quantised, and a pack that lacks rows of a kind, or a trained token in them."""
    quantized = QuantizedModel.load(path=cfg.checkpoint.pretrained_checkpoint)
    full, pack = Checkpoint.load(path=quantized.full_path), SFTPack.load(path=cfg.dataset.path)
    if pack.train_path is None:
        raise UserError(f"{pack.ref} has no training rows")
    cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
    loader = PackedLoader(pack.train_path, pack.seq_len, cfg.rng.seed)
    return Data(quantized, full, pack, loader, open_held_out(pack, cfg.dataset.eval_rows, cfg.rng.seed))


def distil(cfg: QADConfig, session: Session, data: Data) -> tuple[NemotronH, NemotronH, Quantization, list[Recovery]]:
    """The training loop. Returns the student with its weights unrounded, the teacher, the scales, the validations."""
    device, loader, batch_size = session.ranks.device, data.loader, cfg.train.global_batch_size
    student, teacher = (NemotronH.from_pretrained(data.full.path, torch.bfloat16).float().to(device) for _ in range(2))
    teacher.eval().requires_grad_(False)
    student.eval()  # no load is counted, and multi-token prediction does not run; nothing else depends on the mode
    if student.mtp is not None:
        student.mtp.requires_grad_(False)
    quantization = read_quantization(data.quantized.path, student).to(device)
    round_activations(student, quantization)
    optimizer = build_optimizer(student, cfg.optimizer)
    tokens_per_step = batch_size * data.pack.seq_len

    # ---- resume: the same command after a crash goes on here, to the same weights
    step, curve = 0, list[Recovery]()
    if (restored := session.begin("qad", cfg.train.train_iters, student, optimizer)) is not None:
        step, curve = restored.step, [Recovery(**each) for each in restored.state["curve"]]
        loader.load_state_dict(restored.state["loader"])

    while True:
        # ---- the head of a step: save where that is due, validate; nothing in it changes a weight
        with session.head_of_step(step, {"loader": loader.state_dict(), "curve": [asdict(each) for each in curve]}):
            if step % cfg.train.eval_interval == 0 or step == session.last_step:
                with quantized_weights(student, quantization):
                    curve.append(held_out_recovery(student, teacher, data.valid, cfg.dataset.eval_rows))
                session.run.metrics.log(step, valid_kl=curve[-1].kl, valid_accuracy=curve[-1].accuracy)
                session.progress.note(f"step {step}: {curve[-1].kl:.5f} nats of KL a token, held out")
        if step == session.last_step:
            break

        # ---- gradients. Loss: KL, mean over the trained tokens of the batch, wherever they are
        lr = lr_at(step, session.last_step, cfg.optimizer, cfg.scheduler)
        set_lr(optimizer, lr)
        batch = loader.next_batch(batch_size).to(device)
        loss_nats = 0.0
        with quantized_weights(student, quantization):
            for micro in batch.micro_batches(cfg.train.micro_batch_size):
                trained_BL = micro.loss_mask_BL.bool()
                with session.autocast:
                    student_TV = student(micro.input_ids_BL, micro.seq_idx_BL, trained_BL).logits
                    with torch.no_grad():
                        teacher_TD = teacher.hidden_states(micro.input_ids_BL, micro.seq_idx_BL)[0][trained_BL]
                    kl = forward_kl_sum(student_TV, teacher_TD, teacher.lm_head.weight) / max(1, batch.num_trained)
                kl.backward()
                loss_nats += kl.item()

        # ---- update of the weights that are not rounded
        grad_norm = torch.nn.utils.clip_grad_norm_(student.parameters(), cfg.optimizer.clip_grad).item()
        if not math.isfinite(loss_nats) or not math.isfinite(grad_norm):  # before it reaches a weight
            raise RunFailed(
                f"KL is {loss_nats}, gradient norm {grad_norm} at step {step + 1}", "try a smaller optimizer.lr"
            )
        optimizer.step()
        optimizer.zero_grad()

        # ---- records
        step += 1
        session.progress.update(step, tokens=tokens_per_step, loss=loss_nats, lr=lr)
        if step % cfg.logger.log_interval == 0 or step == session.last_step:
            session.run.metrics.log(step, loss=loss_nats, lr=lr, grad_norm=grad_norm, epochs=loader.epochs)
    session.progress.close()
    return student, teacher, quantization, curve


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
