"""Evaluation: pass@1 on verifiable tasks, bits per byte on text, and how sure one may be of either."""

from nemotron.stack.evaluation.intervals import (
    bootstrap_interval,
    holm,
    paired_difference,
    wilson_interval,
)
from nemotron.stack.evaluation.language_model import (
    bits_per_byte_of,
    model_bits_per_byte,
    score_text,
    token_byte_lengths,
)
from nemotron.stack.evaluation.model import (
    evaluate_model,
    held_out_tasks,
    load_tokenizer,
    model_generate_fn,
    score_tasks,
    stop_token_ids,
)
from nemotron.stack.evaluation.scoring import (
    Completion,
    Evaluation,
    GenerateFn,
    compare,
    evaluate_tasks,
    prompt_text,
)
from nemotron.stack.evaluation.trigram import InterpolatedTrigram

__all__ = [
    "Completion",
    "Evaluation",
    "GenerateFn",
    "InterpolatedTrigram",
    "bits_per_byte_of",
    "bootstrap_interval",
    "compare",
    "evaluate_model",
    "evaluate_tasks",
    "held_out_tasks",
    "holm",
    "load_tokenizer",
    "model_bits_per_byte",
    "model_generate_fn",
    "paired_difference",
    "prompt_text",
    "score_tasks",
    "score_text",
    "stop_token_ids",
    "token_byte_lengths",
    "wilson_interval",
]
