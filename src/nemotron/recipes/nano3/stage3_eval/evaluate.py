#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Evaluate base, SFT and RL models side by side on the same held-out tasks and text."
# name = "nano3/eval"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "schema.py:EvalConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 3: what every stage has reached, on the same held-out tasks.

    nemotron nano3 eval -c tiny
    python evaluate.py --config tiny run.rl=nano3-rl-model-tiny:2
    python evaluate.py --config tiny run.rlhf=null run.final=null    # before there are these; likewise base, sft, rl
    nemotron nano3 eval -c own 'run.models=[nano3-sft-model-tiny, nano3-rl-model-tiny]' 'questions=[quiz.jsonl]'

The models are those of the recipe's stages and, in `run.models`, any others. What one was trained on stands in its
record: whether it knows a chat template, whether it reasons, which data it has seen. `questions` are files of your own,
beside the generated tasks or in their place.

For each model: pass@1, greedy and sampled at temperature 1, of families of verifiable tasks, with 95 % intervals, and
pass@k and majority@k of the samples; greedy also with reasoning off, and cut after so many tokens
(`tasks.reasoning_budgets`); bits per byte on held-out text; RULER's tasks where `ruler.lengths` names some. Beside them
what understanding nothing would score: the best constant answer, and the answer of the most similar training task; and
an upper bound on the share of all possible tasks that training saw: those that its data list. Models are compared in
pairs, task by task, with Holm's correction over the families. The numbers are published, then held against `bands`:
outside them the exit code is 1. docs/guides/evaluation.md says what each number means.

Simplified against the paper (tech report, arXiv 2512.20848, section 4 and table 2): its benchmarks need models of its
size; these tasks have the same shapes (math, multiple choice, instruction following, structured output, code, tools)
and, like them, an answer that a program checks. The base model, which knows no chat template, is given the tasks as the
plain documents that it met in pretraining. Where no sandbox starts, code generation is left out: its band is "not run".
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.data_prep.sources.questions import read_questions
from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
from nemotron.kit import Model, PretrainBlend, Results, Run, open_run, print_complete, read_pipe
from nemotron.kit.chat_template import load_template
from nemotron.kit.commands import command_hint
from nemotron.kit.lineage import iterate, walk
from nemotron.kit.schemas.evaluation import RulerConfig
from nemotron.kit.schemas.questions import Questions
from nemotron.kit.stop import stop_at_once
from nemotron.recipes.nano3.stage3_eval.bands import check_bands
from nemotron.recipes.nano3.stage3_eval.schema import EvalConfig, TasksConfig, TextConfig
from nemotron.recipes.nano3.stage3_eval.table import format_table
from nemotron.stack.environments import Task, questions, read_tasks, runs_programs, verifiable_families
from nemotron.stack.evaluation.baselines import score_baselines
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.language_model import model_bits_per_byte, token_byte_lengths
from nemotron.stack.evaluation.model import evaluate_model, held_out_tasks, load_tokenizer, reasoning_budget
from nemotron.stack.evaluation.ruler_score import score_ruler
from nemotron.stack.evaluation.scoring import Evaluation
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.hub import open_weights
from nemotron.stack.quantization.export import load_model
from nemotron.stack.training.loaders import held_out_documents

# In the order of training, of Super 3 too. A stage is compared with those before it that it should improve on or equal.
ROLES = (
    "base", "sft", "sft_continued", "rl", "swe1", "swe2", "rlhf", "final", "healed", "quantized", "qad",
)  # fmt: skip
STAGES = {"pretrain": "base", "sft": "sft", "rl": "rl", "rlhf": "rlhf"}  # of a producer's name -> role
COMPARED = (
    ("base", "sft"), ("sft", "sft_continued"), ("sft", "rl"), ("sft_continued", "rl"),
    ("rl", "swe1"), ("swe1", "swe2"), ("sft", "swe2"), ("swe2", "rlhf"),
    ("rl", "rlhf"), ("rlhf", "final"), ("rl", "final"), ("sft", "final"),
    ("rlhf", "healed"), ("sft", "healed"), ("healed", "quantized"), ("quantized", "qad"), ("healed", "qad"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What every model is asked, by how many processes side by side: of the config what can be sent to a process."""

    tasks: TasksConfig
    questions: Questions
    text: TextConfig
    ruler: RulerConfig
    pretrain_data: str | None
    processes: int
    dtype: str


@dataclass(frozen=True)
class Measured:
    """A model on the tasks, with less reasoning by the name of the control; bits per byte; recall in long text."""

    evaluation: Evaluation
    reasoning: dict[str, Evaluation]
    text: dict[str, float]
    ruler: dict[str, dict[str, dict[str, Any]]]

    def with_tasks(self, tasks: list[Task]) -> Measured:
        """The same with these as its tasks."""
        controlled = {control: replace(evaluation, tasks=tasks) for control, evaluation in self.reasoning.items()}
        return Measured(replace(self.evaluation, tasks=tasks), controlled, self.text, self.ruler)


def main() -> None:
    """Evaluate all models, publish, then judge."""
    cfg: EvalConfig = load_script_config(__file__, inputs=piped_model)
    models = models_of(cfg)
    if not models:
        raise UserError("no model to evaluate", "name some: run.models=[NAME, NAME:VERSION, ./DIRECTORY]")
    configured = cfg  # the run's fingerprint is of this, whatever the machine can verify
    families = verifiable_families(cfg.tasks.families, cfg.tasks.sandbox)
    cfg = cfg.model_copy(update={"tasks": cfg.tasks.model_copy(update={"families": families})})
    processes = 1 if torch.cuda.is_available() else cfg.processes
    asked = Asked(cfg.tasks, cfg.questions, cfg.text, cfg.ruler, cfg.run.pretrain_data, processes, cfg.dtype)
    tasks = tasks_of(asked)
    if not tasks:
        raise UserError("nothing to evaluate on: tasks.per_family is 0, and there are no questions")
    stop_at_once()
    with open_run(configured, script=__file__) as run:
        for version in trained_on(cfg, run):
            run.add_input(version, version.ref)
        artifacts = {role: Model.load(reference) for role, reference in models.items()}
        for artifact in artifacts.values():
            check_budgets(cfg, artifact)
        with run.phase("baselines"):
            data = [version.path for version in run.inputs.values() if "Dataset" in version.record["types"]]
            seen = [task for path in data for task in read_tasks(path)]
            baselines = score_baselines(tasks, seen, cfg.tasks, cfg.tasks.lookup_tasks)
        with run.phase("evaluate"), PoolEngine(processes) if processes > 1 else SerialEngine() as engine:
            measured: dict[str, Measured] = {}
            first = first_with_same_answers(artifacts)
            of_models = engine.map_ordered(measure, (artifacts[role] for role in models if first[role] == role), asked)
            for role, reference in models.items():
                measured[role] = next(of_models).with_tasks(tasks) if first[role] == role else measured[first[role]]
                scores = measured[role].evaluation.mean("greedy")
                same = "" if first[role] == role else f", as {first[role]}: at most multi-token prediction differs"
                print(f"{role} ({reference}): greedy pass@1 {scores.estimate:.3f}{same}", file=sys.stderr)
        evaluations = {role: each.evaluation for role, each in measured.items()}

        # --- Compare in pairs, task by task; what chance alone would explain is no difference -------------------------
        with run.phase("compare"):
            comparisons = {}
            for before, after in pairs_of(models):
                pair = evaluations[before], evaluations[after]
                comparisons[f"{after} - {before}"] = {
                    which: compare(*pair, which).metrics()
                    for which in ("greedy", "sampled")
                    if which == "greedy" or all(evaluation.sampled_TS.size for evaluation in pair)
                }
        stated = stated_in(cfg.run.pretrain_results).get("text")
        quantized = {"quantized": stated_in(cfg.run.quantized_results), "qad": stated_in(cfg.run.qad_results)}
        metrics: dict[str, Any] = {
            "models": models,
            "tasks": {role: evaluation.metrics() for role, evaluation in evaluations.items()},
            "baselines": baselines,
            "comparisons": comparisons,
            "reasoning": {
                role: {control: evaluation.metrics() for control, evaluation in each.reasoning.items()}
                for role, each in measured.items()
                if each.reasoning
            },
            "not_run": [family for family in configured.tasks.families if family not in families],
            "sandbox": cfg.tasks.sandbox if runs_programs(cfg.tasks.families) else None,
            "text": {role: each.text for role, each in measured.items()},
            "ruler": {role: each.ruler for role, each in measured.items() if each.ruler},
            "pretrain_text": stated or {},  # of the base model on all held-out text, beside the trigram's
            "acceptance_length": stated_in(cfg.run.healed_results).get("acceptance_length", {}),
            "quantization": {
                role: {**results["recovery"], "bytes": results.get("bytes")}
                for role, results in quantized.items()
                if results
            },
            "generations": side_by_side(evaluations, cfg.tasks.generations),
        }
        checks = check_bands(cfg.bands.model_dump(), metrics)
        metrics["bands"] = [check.as_dict() for check in checks]
        metrics["in_band"] = all(check.passed for check in checks)

        # --- Publish first: numbers outside the bands are the ones that somebody will want to look at -----------------
        results = Results(metrics=metrics).save()
        print(format_table(metrics), file=sys.stderr)
        print_complete({"results": results})
    missed = [check.line() for check in checks if not check.passed]
    if missed:
        raise RunFailed(f"{len(missed)} of {len(checks)} numbers are outside their bands", "; ".join(missed))


def piped_model() -> dict[str, str]:
    """What a model from the pipe is evaluated as: the stage that its record names, without the stages after it."""
    reference = read_pipe().get("model")
    if reference is None:
        return {}
    record = Registry.default().resolve(reference).record
    role = STAGES.get(stage_of(record))
    if role == "rl":
        with contextlib.suppress(UserError):  # what it was trained from may be gone
            if stage_of(Registry.default().resolve(record["inputs"]["model"]).record) == "rlhf":
                role = "final"  # the second pass of the same script
    if role is None:  # from elsewhere
        return {"models": f"[{reference}]", **dict.fromkeys(ROLES, "null")}
    return {role: reference, **dict.fromkeys(ROLES[ROLES.index(role) + 1 :], "null")}


def stated_in(results: str | None) -> dict[str, Any]:
    """The metrics of results that an earlier step published; none without a name."""
    return dict(Results.load(results).metrics) if results else {}


def stage_of(record: dict[str, Any]) -> str:
    """The stage that made what `record` is of: `sft` of `nano3/sft`."""
    return str((record.get("producer") or {}).get("name")).rpartition("/")[2]


def models_of(cfg: EvalConfig) -> dict[str, str]:
    """What is evaluated, by role: those of the recipe's stages, then `run.models`, each under its name.

    Where the name is taken, or that of a stage, it is the whole reference.
    """
    models = {role: getattr(cfg.run, role) for role in ROLES if getattr(cfg.run, role)}
    for reference in cfg.run.models:
        name = reference.partition(":")[0]
        models[reference if name in models or name in ROLES else name] = reference
    return models


def pairs_of(models: dict[str, str]) -> list[tuple[str, str]]:
    """Which models are compared, before and after: stages as in COMPARED, any other with the one before it."""
    order = list(models)
    stages = [pair for pair in COMPARED if pair[0] in models and pair[1] in models]
    return stages + [(order[i - 1], role) for i, role in enumerate(order) if i > 0 and role not in ROLES]


def tasks_of(asked: Asked) -> list[Task]:
    """The held-out tasks, then the questions of the user's files."""
    own = read_questions(asked.questions, lambda source, row: questions.make_task(source.name, row, source.match))
    return [*held_out_tasks(asked.tasks.per_family, asked.tasks), *own]


def trained_on(cfg: EvalConfig, run: Run) -> list[Version]:
    """The data in the lineage of `run.models`, as far as it is still there."""
    versions = {}
    for reference in cfg.run.models:
        for node in iterate(walk(reference, run.registry)):
            with contextlib.suppress(UserError):
                version = run.registry.resolve(f"{node.ref}@{node.digest}")
                if "Dataset" in version.record["types"]:
                    versions[version.ref] = version
    return list(versions.values())


def check_budgets(cfg: EvalConfig, artifact: Model) -> None:
    """UserError if the model cannot be asked with one of `tasks.reasoning_budgets`, before any model is."""
    if artifact.template is None or artifact.reasoning is False:
        return
    for budget in cfg.tasks.reasoning_budgets:
        reasoning_budget(artifact.path, artifact.template, budget, cfg.tasks.max_new_tokens)


def first_with_same_answers(models: dict[str, Model]) -> dict[str, str]:
    """By role the first role whose model gives the same answers, most often its own; nobody need be asked twice."""
    first: dict[object, str] = {}
    return {role: first.setdefault(origin_of_answers(model), role) for role, model in models.items()}


def origin_of_answers(model: Model) -> object:
    """Equal for models that differ at most in the block of multi-token prediction: it only drafts, as after healing."""
    digests = {name: weight.sha256 for name, weight in open_weights(model.path).items() if not name.startswith("mtp.")}
    if None in digests.values():  # not written here
        return model.path
    files = [(model.path / name).read_bytes() for name in ("config.json", "tokenizer.json")]
    return frozenset(digests.items()), *files, model.template, model.reasoning


def measure(artifact: Model, asked: Asked) -> Measured:
    """The tasks as the model was trained to answer them (a base model: as plain text), with less reasoning, and text.

    With less reasoning greedily: `off`, and each of `tasks.reasoning_budgets`. The tasks stay in this process, since an
    environment of the user's own cannot be sent; who asks has the same ones.
    """
    if asked.processes > 1:  # two threads of one process generate no faster than one
        torch.set_num_threads(max(1, torch.get_num_threads() // asked.processes))
    tasks = tasks_of(asked)
    model = load_model(artifact.path, asked.dtype, "cuda" if torch.cuda.is_available() else "cpu")

    def score(samples: int, thinking: bool, max_reasoning: int | None = None, control: str = "") -> Evaluation:
        return evaluate_model(
            model, artifact.path, tasks, asked.tasks.model_copy(update={"samples": samples}), template=template,
            thinking=thinking, max_reasoning=max_reasoning, show_progress=asked.processes == 1,
            label=f"{artifact.ref} {control}".strip(),
        )  # fmt: skip

    template, reasons = artifact.template, artifact.reasoning is not False
    long_text = dict[str, dict[str, dict[str, Any]]]()
    if asked.ruler.lengths:  # first: what cannot be asked is refused soon
        held_out = held_out_documents(PretrainBlend.load(asked.pretrain_data).path) if asked.pretrain_data else {}
        documents = [document for several in held_out.values() for document in several]
        long_text = score_ruler(model, artifact.path, documents, asked.ruler, template=template, thinking=reasons)
    evaluation = score(asked.tasks.base_samples if template is None else asked.tasks.samples, thinking=reasons)
    controlled: dict[str, Evaluation] = {}
    if template is not None and reasons:
        controlled = {
            str(budget): score(0, True, budget, f"reasoning {budget}") for budget in asked.tasks.reasoning_budgets
        }
        if asked.tasks.reasoning_off and load_template(template).has_switch("enable_thinking"):
            controlled["off"] = score(0, thinking=False, control="reasoning off")
    return Measured(evaluation, controlled, score_text(asked, artifact, model), long_text).with_tasks([])


def score_text(asked: Asked, artifact: Model, model: NemotronH) -> dict[str, float]:
    """Bits per byte of the first `text.max_tokens` held-out tokens of each source of the blend, if there is one."""
    if not (asked.pretrain_data and asked.text.max_tokens):
        return {}
    blend = PretrainBlend.load(asked.pretrain_data)
    tokenizers = [folder / "tokenizer.json" for folder in (blend.tokenizer_path or blend.path, artifact.path)]
    if len({file.read_bytes() for file in tokenizers}) > 1:
        print(f"{artifact.ref}: no bits per byte: the held-out text has tokens of another tokenizer", file=sys.stderr)
        return {}
    byte_lengths = token_byte_lengths(load_tokenizer(artifact.path))
    return {
        source: model_bits_per_byte(
            model, np.concatenate(documents)[: asked.text.max_tokens], byte_lengths, seq_len=asked.text.seq_length,
            batch_size=asked.text.batch_size, label=source,
        )
        for source, documents in held_out_documents(blend.path).items()
    }  # fmt: skip


def side_by_side(evaluations: dict[str, Evaluation], per_family: int) -> list[dict[str, Any]]:
    """The first tasks of each family with what each model wrote."""
    of_tasks = zip(*(evaluation.generations(per_family) for evaluation in evaluations.values()), strict=True)
    return [
        {name: records[0][name] for name in ("family", "prompt", "demonstration")}
        | {
            role: {"text": each["greedy"], "right": each["greedy_right"]}
            for role, each in zip(evaluations, records, strict=True)
        }
        for records in of_tasks
    ]


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
