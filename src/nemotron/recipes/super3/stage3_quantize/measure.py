"""A quantised model beside the full one that it was made from, on the same held-out rows and tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit import QuantizedModel, SFTPack
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.stack.compression.distillation import Recovery, measure_recovery
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.model import evaluate_model, held_out_tasks
from nemotron.stack.evaluation.scoring import Evaluation
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import PackedLoader

ROWS = 8  # a forward pass


@dataclass(frozen=True)
class HeldOut:
    """What both models are measured on: so many packed rows for the KL, and tasks."""

    loader: PackedLoader
    rows: int
    evaluation: EvaluationConfig


def open_held_out(pack: SFTPack, rows: int, seed: int) -> PackedLoader:
    """The validation rows of a pack. UserError: there are none, or no token is trained in those that are measured."""
    if pack.valid_path is None:
        raise UserError(f"{pack.ref} has no validation rows")
    valid = PackedLoader(pack.valid_path, pack.seq_len, seed)
    valid.check_first_rows(-(-rows // ROWS) * ROWS, "dataset.eval_rows")
    return valid


def held_out_recovery(quantized: NemotronH, full: NemotronH, valid: PackedLoader, rows: int) -> Recovery:
    """KL a token and next-token accuracy over the first `rows` rows, rounded up to whole passes."""
    device = full.lm_head.weight.device
    batches = (batch.to(device) for batch in islice(valid.all_batches(ROWS), -(-rows // ROWS)))
    return measure_recovery(quantized, full, batches)


def measure(
    full: NemotronH,
    quantized: NemotronH,
    published: QuantizedModel,
    held_out: HeldOut,
    poll: Callable[[], None],
) -> dict[str, Any]:
    """What both scripts of this stage publish: `recovery`, and `tasks` of the quantised model with those of `bf16`.

    `comparison` is after - before on the same tasks, greedily, with 95 % intervals. No task with `tasks_per_family` 0.
    """
    evaluation = held_out.evaluation
    recovery = held_out_recovery(quantized, full, held_out.loader, held_out.rows)
    print(
        f"held out: {recovery.kl:.5f} nats of KL a token; next token right {recovery.accuracy:.4f}, "
        f"in bf16 {recovery.teacher_accuracy:.4f}",
        file=sys.stderr,
    )
    metrics: dict[str, Any] = {"recovery": asdict(recovery)}
    tasks = held_out_tasks(evaluation.tasks_per_family, evaluation)
    if not tasks:
        return metrics

    def evaluate(model: NemotronH, label: str) -> Evaluation:
        return evaluate_model(
            model, published.path, tasks, evaluation, template=published.template,
            thinking=published.reasoning is not False, poll=poll, show_progress=True, label=label,
        )  # fmt: skip

    before, after = evaluate(full, "bf16"), evaluate(quantized, "quantised")
    comparison = compare(before, after, "greedy")
    print(
        f"greedy pass@1: {after.mean('greedy').estimate:.4f}, in bf16 {before.mean('greedy').estimate:.4f}, "
        f"difference {comparison.mean.low:+.4f} .. {comparison.mean.high:+.4f}",
        file=sys.stderr,
    )
    return metrics | {
        "tasks": after.metrics(),
        "bf16": before.metrics(),
        "comparison": comparison.metrics(),
        "generations": after.generations(per_family=2),
    }
