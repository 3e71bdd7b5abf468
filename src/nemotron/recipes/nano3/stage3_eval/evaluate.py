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
    nemotron nano3 eval 'run.models=[nano3-sft-model-tiny, nano3-rl-model-tiny]' 'questions=[quiz.jsonl]'

The models are those of the recipe's stages and, in `run.models`, any others. What one was trained on stands in its
record: whether it knows a chat template, whether it reasons, which data it has seen. `questions` are files of your own,
beside the generated tasks or in their place.

For each model: pass@1, greedy and sampled at temperature 1, of families of verifiable tasks, with 95 % intervals;
greedy also with reasoning off, and cut after so many tokens (`tasks.reasoning_budgets`); and bits per byte on held-out
text. Beside them what understanding nothing would score: the best constant answer, and the answer of the most similar
training task; and an upper bound on the share of all possible tasks that training saw: those that its data list. Models
are compared in pairs, task by task, with Holm's correction over the families. The numbers are published, then held
against `bands`: outside them the exit code is 1.

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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.data_prep.sources.questions import read_questions
from nemotron.kit import Model, PretrainBlend, Results, Run, open_run, print_complete, read_pipe
from nemotron.kit.chat_template import load_template
from nemotron.kit.commands import command_hint
from nemotron.kit.lineage import iterate, walk
from nemotron.kit.stop import StopFlag
from nemotron.recipes.nano3.stage3_eval.bands import check_bands
from nemotron.recipes.nano3.stage3_eval.table import format_table
from nemotron.stack.environments import Task, questions, read_tasks, verifiable_families
from nemotron.stack.environments.code_generation import FAMILY as CODE_GENERATION
from nemotron.stack.evaluation.baselines import score_baselines
from nemotron.stack.evaluation.language_model import model_bits_per_byte, token_byte_lengths
from nemotron.stack.evaluation.model import evaluate_model, held_out_tasks, load_tokenizer, reasoning_budget
from nemotron.stack.evaluation.scoring import Evaluation, compare
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import held_out_documents

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage3_eval.schema import EvalConfig

# In the order of training. A stage is compared with those before it that it should improve on.
ROLES = ("base", "sft", "sft_continued", "rl", "rlhf", "final")
STAGES = {"pretrain": "base", "sft": "sft", "rl": "rl", "rlhf": "rlhf"}  # of a producer's name -> role
COMPARED = (
    ("base", "sft"), ("sft", "sft_continued"), ("sft", "rl"), ("sft_continued", "rl"),
    ("rl", "rlhf"), ("rlhf", "final"), ("rl", "final"), ("sft", "final"),
)  # fmt: skip


def main() -> None:
    """Evaluate all models, publish, then judge."""
    cfg: EvalConfig = load_script_config(__file__, inputs=piped_model)
    models = models_of(cfg)
    if not models:
        raise UserError("no model to evaluate", "name some: run.models=[NAME, NAME:VERSION, ./DIRECTORY]")
    configured = cfg  # the run's fingerprint is of this, whatever the machine can verify
    families = verifiable_families(cfg.tasks.families, cfg.tasks.sandbox)
    cfg = cfg.model_copy(update={"tasks": cfg.tasks.model_copy(update={"families": families})})
    tasks = [*held_out_tasks(cfg.tasks.per_family, cfg.tasks), *own_tasks(cfg)]
    if not tasks:
        raise UserError("nothing to evaluate on: tasks.per_family is 0, and there are no questions")
    with open_run(configured, script=__file__) as run, StopFlag() as stop:
        for version in trained_on(cfg, run):
            run.add_input(version, version.ref)
        artifacts = {role: Model.load(reference) for role, reference in models.items()}
        for artifact in artifacts.values():
            check_budgets(cfg, artifact)
        with run.phase("baselines"):
            data = [version.path for version in run.inputs.values() if "Dataset" in version.record["types"]]
            seen = [task for path in data for task in read_tasks(path)]
            baselines = score_baselines(tasks, seen, cfg.tasks, cfg.tasks.lookup_tasks, stop.poll)
        evaluations: dict[str, Evaluation] = {}
        reasoning: dict[str, dict[str, Evaluation]] = {}
        text: dict[str, dict[str, float]] = {}
        for role, reference in models.items():
            with run.phase(f"evaluate {role}"):
                artifact = artifacts[role]
                model = NemotronH.from_pretrained(artifact.path).to("cuda" if torch.cuda.is_available() else "cpu")
                evaluations[role], reasoning[role] = answer_tasks(cfg, artifact, model, tasks, stop)
                text[role] = score_text(cfg, artifact, model, stop)
            scores = evaluations[role].mean("greedy")
            print(f"{role} ({reference}): greedy pass@1 {scores.estimate:.3f}", file=sys.stderr)

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
        stated = Results.load(cfg.run.pretrain_results).metrics.get("text") if cfg.run.pretrain_results else None
        metrics: dict[str, Any] = {
            "models": models,
            "tasks": {role: evaluation.metrics() for role, evaluation in evaluations.items()},
            "baselines": baselines,
            "comparisons": comparisons,
            "reasoning": {
                role: {control: evaluation.metrics() for control, evaluation in controlled.items()}
                for role, controlled in reasoning.items()
                if controlled
            },
            "not_run": [family for family in configured.tasks.families if family not in families],
            "sandbox": cfg.tasks.sandbox if CODE_GENERATION in cfg.tasks.families else None,
            "text": text,
            "pretrain_text": stated or {},  # of the base model on all held-out text, beside the trigram's
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


def stage_of(record: dict[str, Any]) -> str:
    """The stage that made what `record` is of: `sft` of `nano3/sft`."""
    return str((record.get("producer") or {}).get("name")).rpartition("/")[2]


def models_of(cfg: EvalConfig) -> dict[str, str]:
    """What is evaluated, by role: those of the recipe's stages, then `run.models`, each under its name."""
    models = {role: getattr(cfg.run, role) for role in ROLES if getattr(cfg.run, role)}
    for reference in cfg.run.models:
        name = reference.partition(":")[0]
        models[name if name not in models else reference] = reference
    return models


def pairs_of(models: dict[str, str]) -> list[tuple[str, str]]:
    """Which models are compared, before and after: stages as in COMPARED, any other with the one before it."""
    order = list(models)
    stages = [pair for pair in COMPARED if pair[0] in models and pair[1] in models]
    return stages + [(order[i - 1], role) for i, role in enumerate(order) if i > 0 and role not in ROLES]


def own_tasks(cfg: EvalConfig) -> list[Task]:
    """The questions of the user's files, as tasks."""
    return read_questions(cfg.questions, lambda source, row: questions.make_task(source.name, row, source.match))


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


def answer_tasks(
    cfg: EvalConfig, artifact: Model, model: NemotronH, tasks: list[Task], stop: StopFlag
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """The tasks as the model was trained to answer them (a base model: as plain text), and with less reasoning.

    The latter greedily: `off`, and each of `tasks.reasoning_budgets`.
    """

    def score(samples: int, thinking: bool, max_reasoning: int | None = None) -> Evaluation:
        return evaluate_model(
            model, artifact.path, tasks, cfg.tasks.model_copy(update={"samples": samples}), template=template,
            thinking=thinking, max_reasoning=max_reasoning, poll=stop.poll, show_progress=True,
        )  # fmt: skip

    template, reasons = artifact.template, artifact.reasoning is not False
    evaluation = score(cfg.tasks.base_samples if template is None else cfg.tasks.samples, thinking=reasons)
    if template is None or not reasons:
        return evaluation, {}
    controlled = {str(budget): score(0, True, budget) for budget in cfg.tasks.reasoning_budgets}
    if cfg.tasks.reasoning_off and load_template(template).has_switch("enable_thinking"):
        controlled["off"] = score(0, thinking=False)
    return evaluation, controlled


def score_text(cfg: EvalConfig, artifact: Model, model: NemotronH, stop: StopFlag) -> dict[str, float]:
    """Bits per byte of the first `text.max_tokens` held-out tokens of each source of the blend, if there is one."""
    if not (cfg.run.pretrain_data and cfg.text.max_tokens):
        return {}
    blend = PretrainBlend.load(cfg.run.pretrain_data)
    tokenizers = [folder / "tokenizer.json" for folder in (blend.tokenizer_path or blend.path, artifact.path)]
    if len({file.read_bytes() for file in tokenizers}) > 1:
        print(f"{artifact.ref}: no bits per byte: the held-out text has tokens of another tokenizer", file=sys.stderr)
        return {}
    byte_lengths = token_byte_lengths(load_tokenizer(artifact.path))
    return {
        source: model_bits_per_byte(
            model, np.concatenate(documents)[: cfg.text.max_tokens], byte_lengths, seq_len=cfg.text.seq_length,
            batch_size=cfg.text.batch_size, poll=stop.poll, label=source,
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
