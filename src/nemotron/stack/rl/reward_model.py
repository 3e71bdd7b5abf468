"""A reward model that is a language model, and nothing else: the reward is how likely it finds an answer.

    r = beta / |y|  sum_t log p(y_t | prompt, y_<t)

SimPO's reward (Meng et al. 2024, arXiv 2405.14734, eq. 4), trained with the Bradley-Terry loss on rewards. No weight is
added to the model that it is a copy of, so a reward model is saved and loaded like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH

# Shapes: S answers to all prompts together, T their tokens, P pairs of them; B prompts, L tokens of the longest row.


def answer_rewards(
    model: NemotronH, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], beta: float
) -> Tensor:
    """The rewards of the answers to each of several prompts, [S], in nats a token, times `beta`.

    With gradient where that is on. A row holds a prompt once and all answers to it, each as if it alone followed. Equal
    answers to a prompt are read once: at two places of a row they differ by 1e-6, and where seven of eight answers are
    equal GRPO divides by the deviation of those, which has to be 0.

    Args:
        groups: prompt and answers, in tokens; none is empty.
    """
    distinct = [(prompt, list(dict.fromkeys(map(tuple, answers)))) for prompt, answers in groups]
    rows = [(list(prompt), [[prompt[-1], *answer] for answer in answers]) for prompt, answers in distinct]
    width = max(len(prompt) - 1 + sum(map(len, answers)) for prompt, answers in rows)
    device = model.lm_head.weight.device
    input_ids_BL = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
    document_BL = torch.full_like(input_ids_BL, -1)
    predicts_BL = torch.zeros_like(input_ids_BL, dtype=torch.bool)  # a token of the answer from the ones before it
    for b, (prompt, answers) in enumerate(rows):
        start = len(prompt) - 1  # the last token of the prompt begins each answer
        input_ids_BL[b, :start] = torch.tensor(prompt[:-1], device=device)
        document_BL[b, :start] = 0
        for document, ids in enumerate(answers, start=1):
            end = start + len(ids)
            input_ids_BL[b, start:end] = torch.tensor(ids, device=device)
            document_BL[b, start:end] = document
            predicts_BL[b, start : end - 1] = True
            start = end
    logits_TV = model(input_ids_BL, document_BL, predicts_BL, 0, shared_prompt=True).logits
    keys = [(b, answer) for b, (_, answers) in enumerate(distinct) for answer in answers]
    targets_T = torch.tensor([token for _, answer in keys for token in answer], device=device)
    logp_T = -F.cross_entropy(logits_TV, targets_T, reduction="none")
    means = [logp.mean() for logp in logp_T.split([len(answer) for _, answer in keys])]
    of = dict(zip(keys, means, strict=True))
    return beta * torch.stack([of[b, tuple(answer)] for b, (_, answers) in enumerate(groups) for answer in answers])


def bradley_terry_loss(rewards_S: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """-log sigmoid(r_better - r_worse), mean over the pairs (Bradley and Terry 1952). `pairs`: positions in [S]."""
    better_P, worse_P = rewards_S[torch.tensor(pairs, device=rewards_S.device)].unbind(-1)
    return -F.logsigmoid(better_P - worse_P).mean()
