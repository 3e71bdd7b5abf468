"""What is better of two answers, and a model that has learned it: what reward training, RLHF and evaluation share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nemotron.kit import Checkpoint
from nemotron.kit.artifact import Artifact
from nemotron.recipes.nano2.stage2_rl.sampling import Policy, load_policy
from nemotron.stack.environments import Verdict
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.comparisons import preference
from nemotron.stack.rl.genrm import Response
from nemotron.stack.rl.reward_model import answer_rewards
from nemotron.stack.rl.rollouts import Rollout


class RewardModel(Artifact):
    """Weights that judge, and the policy whose answers they know."""

    policy_path: Path
    dataset_path: Path

    @classmethod
    def role(cls) -> str:
        """Beside the `model` that it judges."""
        return "reward"

    def load_judge(self) -> Policy:
        """The weights, with the tokenizer of the policy."""
        policy = load_policy(Checkpoint.load(path=self.policy_path))
        policy.model = NemotronH.from_pretrained(self.path).eval()
        return policy


def better_first(answers: Sequence[Rollout], policy: Policy) -> list[tuple[int, int]]:
    """Every two answers to one prompt of which one is better, by their positions, that one first.

    Right is better than wrong; of two right answers the one with less reasoning, then the shorter one (`preference`).
    Worst is an answer that did not end, or is none. Nothing is said of two wrong ones: that the shorter is better would
    be learned instead of what is right.
    """
    responses = [Response.of(policy.text(answer)) for answer in answers]
    verdicts = [Verdict("error" if answer.reward is None else "score", answer.reward or 0.0) for answer in answers]
    pairs = []
    for i, j in itertools.combinations(range(len(answers)), 2):
        ended = not answers[i].truncated, not answers[j].truncated
        truth = preference(responses[i], responses[j], (verdicts[i], verdicts[j]), ended)
        if truth is not None and (verdicts[i].score > 0 or verdicts[j].score > 0):
            pairs.append((i, j) if truth.ranking <= 3 else (j, i))  # 1 to 6: from the first is better to the second is
    return pairs


def rewards_of(judge: Policy, groups: Sequence[Sequence[Rollout]], beta: float = 1.0) -> Tensor:
    """What a reward model gives the answers to each of several prompts, one after another, [S].

    `beta` is a scale: it matters to the loss that rewards are trained with, not to who is better.
    """
    tokens = [(answers[0].prompt_ids, [answer.completion_ids for answer in answers]) for answers in groups]
    return answer_rewards(judge.model, tokens, beta)
