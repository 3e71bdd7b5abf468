"""What lm-eval wrote, as NeMo Evaluator reports it."""

import json
from pathlib import Path

from nemo_evaluator.api.api_dataclasses import EvaluationResult, MetricResult, Score, ScoreStats, TaskResult


def parse_output(output_dir: str) -> EvaluationResult:
    """The accuracy of each task in the newest results; the standard error is over tasks."""
    newest = sorted(Path(output_dir).rglob("results_*.json"), key=lambda file: file.name)[-1]
    tasks = {}
    for name, numbers in json.loads(newest.read_text(encoding="utf-8"))["results"].items():
        if "acc,none" in numbers:  # the group itself has no number
            error = numbers["acc_stderr,none"]
            stats = ScoreStats(stderr=None if error == "N/A" else error)
            accuracy = Score(value=numbers["acc,none"], stats=stats)
            tasks[name] = TaskResult(metrics={"acc": MetricResult(scores={"acc": accuracy})})
    return EvaluationResult(tasks=tasks)
