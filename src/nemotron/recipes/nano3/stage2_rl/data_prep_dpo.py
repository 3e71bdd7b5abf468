# /// script
# [tool.runspec]
# docs = "Preference pairs from a model's own answers, right ones against wrong ones and hallucinated tools"
# name = "nano3/data/prep/dpo"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/data_prep_dpo"
# schema = "dpo_data_schema.py:DPODataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Nemotron 3 Nano, stage 2: a model answers tasks with and without tools -> pairs of its answers, for dpo.py.

    nemotron nano3 data prep dpo -c tiny
    python data_prep_dpo.py --config tiny tasks.num_tasks=50

On-policy preferences (tech report, arXiv 2512.20848, appendix C): of each task the model draws several answers, which
the task's verifier judges. A right answer is preferred to a wrong one, and to one that calls a tool which the prompt
does not declare. It is chosen only where it calls a tool if the demonstration does, and else none. `category`:

    hallucination_penalty   the rejected answer calls a tool that the prompt does not declare
    no_tools                the chosen answer calls no tool, and the rejected one is wrong
    with_tools              the chosen answer calls a tool, and the rejected one is wrong

Only answers whose responses ended by themselves, and whose text gives the very tokens that were drawn, are in a pair.
One that still calls tools in its last response is wrong, whatever that call would have led to.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.words import counted
from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.kit import Checkpoint, Preferences, Source, apply_scale, open_run, print_complete
from nemotron.kit.chat import (
    THINK,
    function_of,
    parse_response,
    parse_tool_calls,
    response_of,
    template_opens_reasoning,
)
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.metrics import Progress
from nemotron.stack.environments import (
    Split,
    Task,
    generate_tasks,
    open_episode,
    prompt_messages,
    prompt_tools,
    to_messages,
    verifiable_families,
)
from nemotron.stack.environments.task import SPLITS
from nemotron.stack.evaluation.model import load_tokenizer, stop_token_ids
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.dialogue import Dialogue, verdicts
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.dpo_data_schema import DPODataConfig

HALLUCINATION_PENALTY, NO_TOOLS, WITH_TOOLS = "hallucination_penalty", "no_tools", "with_tools"


def main() -> None:
    """Prepare the data and publish it."""
    cfg: DPODataConfig = load_script_config(__file__)
    families = verifiable_families(cfg.tasks.families, cfg.sandbox)
    with open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        sampler = open_sampler(cfg)
        scale = cfg.scale_all or "full"
        sizes: dict[Split, int] = {
            "train": apply_scale(cfg.tasks.num_tasks, scale),
            "valid": apply_scale(cfg.tasks.num_valid_tasks, scale) if cfg.tasks.num_valid_tasks else 0,
        }

        # --- Answers, judged and paired -------------------------------------------------------------------------------
        with run.phase("sample"):
            parts: dict[str, list[dict[str, Any]]] = {}
            trained_on: list[Task] = []
            for split, size in sizes.items():
                tasks = [
                    task
                    for family in families
                    for task in generate_tasks(
                        family, split, size, cfg.tasks.seed, cfg.tasks.difficulty.get(family), distinct=True
                    )
                ]
                trained_on += tasks if split == "train" else []
                parts[split] = [pair for answers in sampler.answer(tasks, split) for pair in make_pairs(cfg, answers)]
        print_responses(sampler.counts)
        check_verified(sampler.counts, cfg.max_error_rate)
        if not parts["train"]:
            raise RunFailed(
                f"no pair: {sampler.counts['right']:,} of {sampler.counts['responses']:,} answers are right",
                "a pair takes a right answer and a wrong one to the same task",
            )

        # --- Write and publish ----------------------------------------------------------------------------------------
        order = np.random.default_rng(cfg.seed).permutation(len(parts["train"]))
        write_jsonl(run.output_dir / "train.jsonl", (parts["train"][index] for index in order))
        write_jsonl(run.output_dir / "valid.jsonl", parts["valid"])
        # For the evaluation, which refuses tasks that were trained on.
        write_jsonl(run.output_dir / "tasks.jsonl", (task.to_dict() for task in trained_on))
        categories = Counter(pair["category"] for pair in parts["train"])
        dataset = Preferences(
            path=run.output_dir,
            num_examples=len(parts["train"]),
            train_path=run.output_dir / "train.jsonl",
            valid_path=run.output_dir / "valid.jsonl" if parts["valid"] else None,
            metrics={
                "categories": {name: categories[name] for name in (HALLUCINATION_PENALTY, NO_TOOLS, WITH_TOOLS)},
                "responses": dict(sorted(sampler.counts.items())),
            },
            sources=[
                Source(
                    name="task-generators",
                    detail=f"families: {', '.join(families)}; seed {cfg.tasks.seed}",
                )
            ],
        )
        dataset.save(move=True)
        shares = ", ".join(f"{count:,} {name}" for name, count in sorted(categories.items()))
        pairs = counted(len(parts["train"]), "pair")
        print(f"{dataset.ref}: {pairs} ({shares}), {len(parts['valid']):,} for validation", file=sys.stderr)
        print_complete({"data": dataset})


def check_verified(counts: Mapping[str, int], max_error_rate: float) -> None:
    """RunFailed where the verification of too large a share of the answers failed: what is left may be another kind."""
    errors, responses = counts["verifier_errors"], counts["responses"]
    if errors > max_error_rate * responses:
        raise RunFailed(f"verification failed for {errors:,} of {responses:,} answers", "see max_error_rate")


@dataclass
class Answer:
    """One answer: its messages after the prompt, its score, and the names of the tools that it called."""

    messages: list[dict[str, Any]]
    score: float
    called: list[str]


@dataclass
class Answers:
    """A task and those answers to it that may be in a pair, none twice."""

    task: Task
    answers: list[Answer] = field(default_factory=list)


@dataclass
class Sampler:
    """The model that answers. `counts`: all answers so far, and what they are."""

    cfg: DPODataConfig
    model: NemotronH
    tokenizer: Tokenizer
    template: str
    stop_ids: list[int]
    counts: Counter[str] = field(default_factory=Counter)

    def answer(self, tasks: Sequence[Task], split: Split) -> Iterator[Answers]:
        """Draw and judge the answers to all tasks, those that are decoded together at a time."""
        settings = self.cfg.generation
        per_call = max(1, settings.batch_size // settings.num_generations_per_prompt)
        progress = Progress(len(tasks), label=f"answers, {split}")
        for start in range(0, len(tasks), per_call):
            chunk = tasks[start : start + per_call]
            before = self.counts["tokens"]
            seed = np.random.SeedSequence([self.cfg.seed, SPLITS.index(split), start]).generate_state(1)[0]
            yield from self._answer(chunk, int(seed))
            progress.update(start + len(chunk), tokens=self.counts["tokens"] - before)
        progress.close()

    def _answer(self, tasks: Sequence[Task], seed: int) -> list[Answers]:
        cfg, thinking = self.cfg.generation, self.cfg.enable_thinking
        texts = [prompt_text(task, self.template, thinking) for task in tasks]
        opened = template_opens_reasoning(self.template, thinking)
        prompts = [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        judged: dict[int, list[tuple[float | None, list[str]]]] = {}

        def begin(index: int) -> Dialogue:
            episode = open_episode(tasks[index], opened, self.cfg.sandbox)
            return Dialogue(episode, self.tokenizer, self.template, thinking)

        def score(index: int, dialogues: list[Dialogue]) -> list[float | None]:
            scores = [
                None if verdict.status == "error" else verdict.score
                for verdict in verdicts(tasks[index], dialogues, self.cfg.sandbox)
            ]
            judged[index] = [(each, dialogue.called) for each, dialogue in zip(scores, dialogues, strict=True)]
            return scores

        rollouts = collect_rollouts(
            self.model, prompts, begin, score, samples_per_prompt=cfg.num_generations_per_prompt,
            max_new_tokens=cfg.max_new_tokens, max_turns=cfg.max_turns, stop_token_ids=self.stop_ids,
            prompts_per_call=len(prompts),
            generator=torch.Generator(device=self.model.lm_head.weight.device).manual_seed(seed),
        )  # fmt: skip
        by_task = [Answers(task) for task in tasks]
        outcomes = [outcome for index in sorted(judged) for outcome in judged[index]]
        for rollout, (points, called) in zip(rollouts, outcomes, strict=True):
            answers = by_task[rollout.prompt_index]
            ended = not (rollout.truncated or rollout.max_turns_reached)
            hallucinated = bool(set(called) - declared_by(answers.task))
            self.counts += Counter(
                responses=1, tokens=len(rollout.logprobs), right=int(points == 1.0), hallucinated=int(hallucinated),
                verifier_errors=int(points is None), truncated=int(not ended),
            )  # fmt: skip
            if points is None or rollout.completion_ids[-1] not in self.stop_ids:
                continue
            messages = self.messages_of(answers.task, rollout)
            if not self.gives_its_tokens(answers.task, messages, rollout):
                self.counts["other_tokens"] += 1
            elif all(messages != answer.messages for answer in answers.answers):
                answers.answers.append(Answer(messages, points if ended else 0.0, called))
        return by_task

    def messages_of(self, task: Task, rollout: Rollout) -> list[dict[str, Any]]:
        """What follows the prompt, as messages: an environment answers the same responses in the same way again."""
        opened = template_opens_reasoning(self.template, self.cfg.enable_thinking)
        episode = open_episode(task, opened, self.cfg.sandbox)
        declared = prompt_tools(task)
        messages: list[dict[str, Any]] = []
        position = 0
        for part in rollout.messages:
            ids = rollout.completion_ids[position : position + part.num_tokens]
            position += part.num_tokens
            if not part.generated:
                continue
            text = response_of(self.tokenizer.decode(ids, skip_special_tokens=False), self.template)
            reasoning, answer = parse_response(f"{THINK}{text}" if opened else text)
            content, calls = parse_tool_calls(answer, declared)
            message: dict[str, Any] = {"role": "assistant", "content": content}
            messages.append(
                message
                | ({"reasoning_content": reasoning} if reasoning else {})
                | ({"tool_calls": calls} if calls else {})
            )
            messages += (episode.respond(text) if episode else None) or []
        while messages[-1]["role"] == "tool":  # beyond the last response that was drawn
            messages.pop()
        return messages

    def gives_its_tokens(self, task: Task, messages: list[dict[str, Any]], rollout: Rollout) -> bool:
        """Whether the messages, tokenised as in training, are the tokens that were drawn."""
        conversation = Conversation("answer", [*prompt_messages(task), *messages], "train", prompt_tools(task) or None)
        ((ids, _),) = encode_conversations([conversation], self.tokenizer, self.template)
        drawn = rollout.prompt_ids + rollout.completion_ids
        return ids[: len(drawn)].tolist() == drawn


def open_sampler(cfg: DPODataConfig) -> Sampler:
    """The model of the config; UserError where it is a base model."""
    artifact = Checkpoint.load(cfg.run.model)
    if artifact.template is None:
        raise UserError(f"{artifact.ref} has no chat template", "preferences are drawn from a model after SFT")
    model = NemotronH.from_pretrained(artifact.path, device="cuda" if torch.cuda.is_available() else "cpu").eval()
    stop_ids = stop_token_ids(artifact.path, artifact.template)
    return Sampler(cfg, model, load_tokenizer(artifact.path), artifact.template, stop_ids)


def declared_by(task: Task) -> set[str]:
    """Names of the tools in the prompt of a task."""
    return {str(function_of(tool)["name"]) for tool in prompt_tools(task)}


def make_pairs(cfg: DPODataConfig, answers: Answers) -> list[dict[str, Any]]:
    """Pairs of the answers to one task, at most `max_pairs_per_task`; those against a hallucinated tool first.

    Every rejected answer is in a pair before one is in a second.
    """
    task, declared = answers.task, declared_by(answers.task)
    hallucinated = [answer for answer in answers.answers if set(answer.called) - declared]
    others = [answer for answer in answers.answers if not set(answer.called) - declared]
    calls = any(message.get("tool_calls") for message in to_messages(task))
    right = [answer for answer in others if answer.score == 1.0 and bool(answer.called) == calls]
    wrong = [answer for answer in others if answer.score < 1.0]
    rng = np.random.default_rng([cfg.seed, *task.canonical.encode()])
    rejected = [*rng.permutation(len(hallucinated)), *(len(hallucinated) + rng.permutation(len(wrong)))]
    chosen = rng.permutation(len(right))
    tools = {"tools": prompt_tools(task)} if declared else {}
    pairs: list[dict[str, Any]] = []
    for turn in range(len(right)):
        for number, index in enumerate(rejected):
            if len(pairs) == cfg.max_pairs_per_task:
                return pairs
            against = [*hallucinated, *wrong][index]
            category = WITH_TOOLS if calls else NO_TOOLS
            pairs.append(
                {
                    "prompt": prompt_messages(task), **tools,
                    "chosen": right[chosen[(number + turn) % len(right)]].messages, "rejected": against.messages,
                    "category": HALLUCINATION_PENALTY if index < len(hallucinated) else category,
                }
            )  # fmt: skip
    return pairs


def print_responses(counts: Counter[str]) -> None:
    """What the answers are, on stderr."""
    names = ("right", "hallucinated", "truncated", "verifier_errors", "other_tokens")
    of_all = ", ".join(f"{counts[name] / max(counts['responses'], 1):.1%} {name.replace('_', ' ')}" for name in names)
    print(f"{counts['responses']:,} answers: {of_all}", file=sys.stderr)


if __name__ == "__main__":
    run_data_script(main)
