"""A reward model: a language model whose opinion of an answer is one logit at the end of it.

No weight is added to the language model that it is a copy of. The logit is that of a token which its tokenizer has and
no text uses, so a reward model is saved and loaded like any other. Its row of the output head begins at 0: before
training all rewards are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH

# Shapes: S answers to all prompts together, P pairs of them; B prompts, L tokens of the longest row.


def reset_reward(model: NemotronH, reward_id: int) -> None:
    """Every reward becomes 0."""
    with torch.no_grad():
        model.lm_head.weight[reward_id] = 0.0


def answer_rewards(
    model: NemotronH, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], reward_id: int
) -> Tensor:
    """The rewards of the answers to each of several prompts, [S]: the logit of `reward_id` at the last token of each.

    With gradient where that is on. A row holds a prompt once and all answers to it, each as if it alone followed.

    Args:
        groups: prompt and answers, in tokens; none is empty.
    """
    rows = [(list(prompt), [[prompt[-1], *answer] for answer in answers]) for prompt, answers in groups]
    width = max(len(prompt) - 1 + sum(map(len, answers)) for prompt, answers in rows)
    device = model.lm_head.weight.device
    input_ids_BL = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
    document_BL = torch.full_like(input_ids_BL, -1)
    is_last_BL = torch.zeros_like(input_ids_BL, dtype=torch.bool)
    for b, (prompt, answers) in enumerate(rows):
        start = len(prompt) - 1  # the last token of the prompt begins each answer
        input_ids_BL[b, :start] = torch.tensor(prompt[:-1], device=device)
        document_BL[b, :start] = 0
        for document, ids in enumerate(answers, start=1):
            end = start + len(ids)
            input_ids_BL[b, start:end] = torch.tensor(ids, device=device)
            document_BL[b, start:end] = document
            is_last_BL[b, end - 1] = True
            start = end
    rewards_S: Tensor = model(input_ids_BL, document_BL, is_last_BL, 0, shared_prompt=True).logits[:, reward_id]
    return rewards_S


def bradley_terry_loss(rewards_S: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """-log sigmoid(r_better - r_worse), mean over the pairs (Bradley and Terry 1952). `pairs`: positions in [S]."""
    better_P, worse_P = rewards_S[torch.tensor(pairs, device=rewards_S.device)].unbind(-1)
    return -F.logsigmoid(better_P - worse_P).mean()
