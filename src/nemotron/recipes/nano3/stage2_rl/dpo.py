#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Direct preference optimisation on pairs of a chosen and a rejected answer."
# name = "nano3/dpo"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/dpo"
# schema = "dpo_schema.py:DPORunConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 2: direct preference optimisation (DPO), a study outside the released model.

    nemotron nano3 rl dpo -c own
    python dpo.py --config own dpo.max_num_steps=5
    torchrun --nproc-per-node 8 dpo.py --config own

A step: draw pairs of a chosen and a rejected answer, ask the policy for the log-probability of both, and take one
optimiser step that lets the chosen one gain on the rejected one, compared with the reference: the model as it was
before the first step. What the reference gives is computed once, before training, with the very weights that are then
trained, so there is no second model in memory. Publishes the weights of the last step, and their results.

Shapes: P pairs of this rank, T tokens of their answers, one after another.

The published study (tech report, arXiv 2512.20848, appendix C) does this against calls of tools that the prompt does
not declare. docs/guides/rl-metrics.md explains every number that is logged.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemo_runspec.words import counted
from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.kit import Checkpoint, Preferences, Results, print_complete, read_pipe
from nemotron.kit.chat import control_tokens
from nemotron.kit.commands import command_hint
from nemotron.stack.evaluation.model import load_tokenizer, score_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.rl.pairs import Answer, Pair, answer_logprobs, pack_pairs, pair_logprobs
from nemotron.stack.rl.policy import step_policy, warmed_up_lr
from nemotron.stack.rl.preferences import PairRecord, dpo_loss
from nemotron.stack.rl.prompts import shuffled
from nemotron.stack.training.distributed import Ranks, stop_distributed
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.memory import Needs, check_memory
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.publish import publish_model
from nemotron.stack.training.session import Session, open_session

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.dpo_schema import DPORunConfig


def main() -> None:
    """Config, then train, publish, evaluate."""
    cfg: DPORunConfig = load_script_config(__file__, inputs=read_pipe)
    with open_session(cfg, script=__file__) as session:
        with session.run.phase("train"):
            data = open_data(cfg, session.ranks)
            model = train(cfg, session, data)
        stop_distributed()
        if not session.ranks.is_main:  # one process publishes
            return
        steps, initial = cfg.dpo.max_num_steps, data.initial
        published = publish_model(
            session.run, model, initial.path, {"pairs": steps * cfg.policy.train_global_batch_size},
            num_steps=steps, dataset_path=data.preferences.path, chat_template=initial.chat_template,
            reasoning=initial.reasoning,
        )  # fmt: skip
        with session.run.phase("evaluate"):
            scores = score_tasks(
                model, initial.path, cfg.evaluation, template=data.template, thinking=initial.reasoning is not False,
                poll=session.stop.poll,
            )  # fmt: skip
            results = Results(metrics=scores).save()
    print_complete({"model": published, "results": results})


@dataclass
class Data:
    """The model to start from, and pairs to train on and to validate on."""

    initial: Checkpoint
    template: str
    preferences: Preferences
    train: list[Pair]
    valid: list[Pair]


def open_data(cfg: DPORunConfig, ranks: Ranks) -> Data:
    """Model and pairs. Which pairs a step draws is a function of the seed and the step."""
    preferences, initial = Preferences.load(path=cfg.data.path), Checkpoint.load(path=cfg.policy.model_name)
    ranks.check_divides("policy.train_global_batch_size", cfg.policy.train_global_batch_size)
    if (template := initial.template) is None:
        raise UserError(f"{initial.ref} has no chat template", "DPO starts from a model after SFT")
    if preferences.train_path is None:
        raise UserError(f"{preferences.ref} has no pairs to train on")
    tokenizer, row_len = load_tokenizer(initial.path), cfg.policy.max_total_sequence_length
    pairs, left_out = read_pairs(preferences.train_path, tokenizer, template, row_len)
    if ranks.is_main:
        print(f"{preferences.ref}: {counted(len(pairs), 'pair')}", file=sys.stderr)
        for reason, count in left_out.items():
            print(f"left out: {count:,} {reason}", file=sys.stderr)
    if not pairs:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        raise UserError(f"{preferences.ref}: no pair is left: {reasons}", "see policy.max_total_sequence_length")
    valid: list[Pair] = []
    if preferences.valid_path and cfg.dpo.val_period:
        valid, _ = read_pairs(preferences.valid_path, tokenizer, template, row_len)
    return Data(initial, template, preferences, pairs, valid[: cfg.dpo.val_pairs])


def read_pairs(path: Path, tokenizer: Tokenizer, template: str, row_len: int) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a file in tokens, and how many were left out for which reason.

    The same messages give the same tokens as in SFT; trained is what the model would write after the prompt, not what
    tools answer in between.
    """
    reserved, left_out = control_tokens(template), Counter[str]()
    conversations = []
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if any(token in text for text in texts_in(record) for token in reserved):
                left_out["with a control token of the chat template in a text"] += 1
                continue
            # Earlier turns of the assistant are of neither answer.
            prompt = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in record["prompt"]]
            for name in ("chosen", "rejected"):
                messages = [*prompt, *record[name]]
                conversations.append(Conversation(name, messages, "train", record.get("tools")))
    encoded = encode_conversations(conversations, tokenizer, template)
    answers = [Answer(ids.tolist(), mask.astype(bool).tolist()) for ids, mask in encoded]
    pairs = []
    for pair in map(Pair, answers[::2], answers[1::2]):
        if pair.num_tokens > row_len:
            left_out[f"longer than policy.max_total_sequence_length {row_len}"] += 1
        elif not any(pair.chosen.predicts) or not any(pair.rejected.predicts):
            left_out["with an answer of which the chat template trains nothing"] += 1
        else:
            pairs.append(pair)
    return pairs, left_out


def texts_in(value: Any) -> Iterable[str]:
    """Every text in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def train(cfg: DPORunConfig, session: Session, data: Data) -> NemotronH:
    """The DPO loop. Returns the trained model."""
    ranks, steps, size = session.ranks, cfg.dpo.max_num_steps, cfg.policy.train_global_batch_size
    tokens = cfg.policy.train_micro_batch_size * cfg.policy.max_total_sequence_length
    check_memory(session, Needs(load_config(data.initial.path), tokens), "policy.train_micro_batch_size")
    torch.manual_seed(cfg.seed)
    model = NemotronH.from_pretrained(data.initial.path, device=ranks.device)
    if cfg.policy.freeze_moe_router:
        for moe in model.moe_blocks():
            moe.gate.weight.requires_grad_(False)
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    without_mtp = replace(model.config, mtp_num_layers=0)
    flops_per_token = training_flops_per_token(without_mtp, cfg.policy.max_total_sequence_length)

    # ---- the reference: what the model gives before its first update, of the pairs that this rank will train on. A
    # resumed run computes it again, before it loads the weights of its checkpoint.
    batches = [
        shuffled(len(data.train), range(step * size, (step + 1) * size), cfg.seed)[ranks.rank :: ranks.world_size]
        for step in range(steps)
    ]
    valid = data.valid[ranks.rank :: ranks.world_size]
    with session.dealt_out():
        drawn = sorted({index for batch in batches for index in batch})
        of_drawn = reference_logprobs(cfg, session, model, [data.train[index] for index in drawn])
        of_train = dict(zip(drawn, of_drawn, strict=True))
        of_valid = reference_logprobs(cfg, session, model, valid)

    # ---- resume: pairs are a function of (seed, step), so weights and optimiser are the whole state
    restored = session.begin("dpo", steps, model, optimizer)
    step = restored.step if restored else 0

    while True:
        # ---- 1. What changes no weight: save where that is due, validate
        with session.head_of_step(step, {}):
            if data.valid and cfg.dpo.val_period and (step % cfg.dpo.val_period == 0 or step == steps):
                metrics = validate(cfg, session, model, valid, of_valid)
                session.run.metrics.log(step, **{f"valid_{name}": value for name, value in metrics.items()})
                session.progress.note(
                    f"step {step}: validation loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}"
                )
            if step == steps:
                break

        # ---- 2. One update
        lr = warmed_up_lr(step, cfg.policy)
        set_lr(optimizer, lr)
        pairs = [data.train[index] for index in batches[step]]
        grad_norm, record = update(cfg, session, pairs, [of_train[index] for index in batches[step]])
        if not math.isfinite(grad_norm):
            raise RunFailed(f"gradient norm is {grad_norm} at step {step + 1}", "a smaller policy.optimizer.lr helps")

        # ---- 3. Records
        step += 1
        metrics = record.metrics(ranks)
        session.run.metrics.log(step, **metrics, grad_norm=grad_norm, lr=lr)
        trained = metrics["trained_tokens"]
        shown = {name: metrics[name] for name in ("loss", "accuracy")}
        session.progress.update(step, tokens=int(trained), flops=flops_per_token * trained, **shown)
    session.progress.close()
    return model


def reference_logprobs(cfg: DPORunConfig, session: Session, model: NemotronH, pairs: Sequence[Pair]) -> list[Tensor]:
    """Of each pair, the log-probabilities of the chosen answer's tokens, then of the rejected one's, on the CPU."""
    of_pairs: dict[int, Tensor] = {}
    for micro in pack_pairs(pairs, cfg.policy.max_total_sequence_length, cfg.policy.train_micro_batch_size):
        session.stop.poll()
        of_pairs |= {i: logp_T.cpu() for i, logp_T in pair_logprobs(model, micro, session.autocast).items()}
    return [of_pairs[index] for index in range(len(pairs))]


def update(
    cfg: DPORunConfig, session: Session, pairs: Sequence[Pair], references: Sequence[Tensor]
) -> tuple[float, PairRecord]:
    """One step on this rank's pairs of a batch. Loss: sum over pairs / number of pairs of the global batch.

    Returns the norm of the gradient and what was measured.
    """
    model, record = session.model, PairRecord()
    model.train()
    for micro in pack_pairs(pairs, cfg.policy.max_total_sequence_length, cfg.policy.train_micro_batch_size):
        logp_T = answer_logprobs(model, micro, session.autocast)
        reference_T = torch.cat([references[index] for index in micro.pairs]).to(logp_T.device)
        loss = dpo_loss(logp_T, reference_T, micro.lengths_S, cfg.dpo)
        (loss.loss / cfg.policy.train_global_batch_size).backward()
        record.add(loss, micro.input_ids_BL.numel())
    return step_policy(session, cfg.policy), record


def validate(
    cfg: DPORunConfig, session: Session, model: NemotronH, pairs: Sequence[Pair], references: Sequence[Tensor]
) -> dict[str, float]:
    """The metrics of the validation pairs, of which each rank has a share."""
    record = PairRecord()
    progress, num_scored = session.progress_of_pass("validate", len(pairs)), 0
    with session.dealt_out():
        for micro in pack_pairs(pairs, cfg.policy.max_total_sequence_length, cfg.policy.train_micro_batch_size):
            session.stop.poll()
            of_pairs = pair_logprobs(model, micro, session.autocast)
            logp_T = torch.cat([of_pairs[index] for index in micro.pairs])
            reference_T = torch.cat([references[index] for index in micro.pairs]).to(logp_T.device)
            record.add(dpo_loss(logp_T, reference_T, micro.lengths_S, cfg.dpo), micro.input_ids_BL.numel())
            num_scored += len(micro.pairs)
            progress.update(num_scored, tokens=micro.input_ids_BL.numel())
    return record.metrics(session.ranks)


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
