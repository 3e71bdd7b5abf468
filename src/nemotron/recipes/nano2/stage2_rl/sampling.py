"""What the trainings of this stage share: a policy, prompts, and verified answers of the one to the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset
from nemotron.kit.chat import THINK, opens_reasoning, response_of
from nemotron.kit.model_folder import copy_tokenizer
from nemotron.stack.environments import Task
from nemotron.stack.evaluation.model import load_tokenizer, stop_token_ids
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.calls import Call, Drawn, RolloutSettings, cut_into_calls, draw_call, merge_calls
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.training.lanes import LANES, Lanes

Prompt = tuple[Task, bool]
"""A task, and whether the model is to reason."""
ANSWERS_AT_ONCE = 256  # decoded together in a lane, at most


@dataclass
class Policy:
    """A model that answers under a chat template."""

    model: NemotronH
    tokenizer: Tokenizer
    template: str
    stop_ids: list[int]
    lanes: Lanes

    def encode(self, task: Task, thinking: bool) -> list[int]:
        """The tokens up to where it is to answer."""
        ids: list[int] = self.tokenizer.encode(prompt_text(task, self.template, thinking), add_special_tokens=False).ids
        return ids

    def text(self, answer: Rollout) -> str:
        """What an answer says, with the tag that its prompt ends with."""
        written = response_of(self.tokenizer.decode(answer.completion_ids, skip_special_tokens=False), self.template)
        prompt = self.tokenizer.decode(answer.prompt_ids, skip_special_tokens=False)
        return f"{THINK}{written}" if opens_reasoning(prompt) else written


def load_policy(checkpoint: Checkpoint, threads: int = LANES) -> Policy:
    """The model of a checkpoint, which answers on so many threads; UserError for a base model."""
    if checkpoint.template is None:
        raise UserError(f"{checkpoint.ref} is a base model: it has no chat template", "RL goes on from SFT")
    folder = checkpoint.tokenizer_path or checkpoint.path
    model = NemotronH.from_pretrained(checkpoint.checkpoint_path or checkpoint.path).eval()
    stop_ids = stop_token_ids(folder, checkpoint.template)
    return Policy(model, load_tokenizer(folder), checkpoint.template, stop_ids, Lanes(threads))


def save_policy(model: NemotronH, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the weights, with the tokenizer of the checkpoint that they began as."""
    model.save_pretrained(folder)
    copy_tokenizer(checkpoint.tokenizer_path or checkpoint.path, folder)


def read_prompts(dataset: Dataset, name: str, scale: str | None = None) -> list[Prompt]:
    """The prompts of a file of `data_curation.py`, or a scale's share of them; UserError where it is missing."""
    path = dataset.path / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{dataset.path} has no {name}.jsonl", "data_curation.py of this folder makes one")
    with path.open(encoding="utf-8") as lines:
        prompts = [(Task.from_dict(row["task"]), row["thinking"]) for row in map(json.loads, lines)]
    return prompts[: dataset.at_scale(len(prompts), scale)]


def batches(prompts: Sequence[Prompt], size: int, keep_rest: bool = False) -> list[list[Prompt]]:
    """Batches of prompts in their order, with and without reasoning by turns, as far as there are both.

    What is left of either kind and fills no batch is kept as a smaller one, or not. UserError if there is no batch.
    """
    of_kind = [[prompt for prompt in prompts if prompt[1] is thinking] for thinking in (True, False)]
    spare = 0 if keep_rest else size - 1
    cut = [[kind[i : i + size] for i in range(0, len(kind) - spare, size)] for kind in of_kind]
    if not any(cut):
        raise UserError(
            f"{len(prompts)} prompts, those with reasoning and those without apart, are not one batch of {size}",
            "--prompts-per-step takes fewer",
        )
    shared = min(map(len, cut))
    by_turns = [batch for pair in zip(*cut, strict=False) for batch in pair]
    return [*by_turns, *cut[0][shared:], *cut[1][shared:]]


def sample(
    policy: Policy, prompts: Sequence[Prompt], samples: int, max_turns: int, seed: Sequence[int]
) -> list[Rollout]:
    """`samples` verified answers to each prompt, drawn at temperature 1; those of a prompt stand together.

    All `prompts` are with reasoning, or all without. `Rollout.reward` is the verdict: 1 right, 0 wrong, None where
    verification failed.
    """
    if not prompts:
        raise UserError("no prompt is left to answer", "take fewer rounds, or a larger --scale")
    tasks, thinking = [task for task, _ in prompts], prompts[0][1]
    settings = RolloutSettings(
        policy.template, thinking, sandbox="bubblewrap", effort_levels=None, samples_per_prompt=samples,
        max_new_tokens=64, max_turns=max_turns, max_length=2048, stop_token_ids=policy.stop_ids,
    )  # fmt: skip
    encoded = [policy.encode(task, thinking) for task in tasks]
    rounds = -(-len(tasks) * samples // (LANES * ANSWERS_AT_ONCE))  # in which every lane has one call
    calls = cut_into_calls(tasks, encoded, -(-len(tasks) // (LANES * rounds)), list(seed))
    policy.model.eval()  # here: decoding switches back to how it found the model, and two would switch at once

    def draw(call: Call) -> Drawn:
        return draw_call(call, policy.model, policy.tokenizer, settings, policy.lanes.poll)

    return merge_calls(calls, policy.lanes.map(draw, calls)).rollouts


def in_groups(answers: Sequence[Rollout], size: int) -> list[list[Rollout]]:
    """The answers to each prompt."""
    return [list(answers[start : start + size]) for start in range(0, len(answers), size)]
