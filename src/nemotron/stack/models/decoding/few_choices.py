"""Experts of a decoding step for choices too few to share weights.

Shapes: T tokens, K experts a token, E experts, D width in, F expert width, C = T K choices, R rows of a table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.decoding.steps import ExpertStep, compute_dtype, prepare_experts
from nemotron.stack.models.moe import Experts

# Choices of experts in a pass, K a token, up to which summing rows of their weights beats a matmul for each expert, and
# the weights of a matrix above which reading them takes longer than calling the matmul: no copy of such is made.
FEW_CHOICES, SMALL_EXPERT = 512, 1 << 16


def prepare_few_choices(experts: Experts) -> ExpertStep:
    """What `prepare_experts` gives, for choices too few to share weights, in two operations instead of two an expert.

    A matrix times a vector is a sum of rows, weighted by the vector: `embedding_bag` takes any rows of a table. Here
    the rows are those of all chosen experts, and the bags are up x for each choice, and sum_k w_k down relu(up x)^2 for
    each token. Large experts, a GPU, lower precisions and rounded operands are left to `prepare_experts`.
    """
    by_expert = prepare_experts(experts)
    up_EFD, down_EDF = experts.up_proj, experts.down_proj
    num_experts, width, size = up_EFD.shape
    if experts.round_input is not None or experts.round_active is not None:
        return by_expert
    exact = compute_dtype(up_EFD) in (torch.float32, torch.float64)
    if up_EFD.device.type != "cpu" or not exact or width * size > SMALL_EXPERT:
        return by_expert
    up_RF = up_EFD.transpose(1, 2).reshape(num_experts * size, width)
    down_RD = down_EDF.transpose(1, 2).reshape(num_experts * width, size)
    column_D, column_F = torch.arange(size), torch.arange(width)

    def step(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        if chosen_TK.numel() > FEW_CHOICES:
            return by_expert(x_TD, weights_TK, chosen_TK)
        chosen_TK1 = chosen_TK.unsqueeze(-1)
        x_TKD = x_TD.unsqueeze(1).expand(-1, chosen_TK.shape[1], -1)
        rows_TKD = torch.add(column_D, chosen_TK1, alpha=size)
        up_CF = F.embedding_bag(rows_TKD.view(-1, size), up_RF, per_sample_weights=x_TKD.reshape(-1, size), mode="sum")
        active_TKF = up_CF.relu_().square_().view(*chosen_TK.shape, width).mul_(weights_TK.unsqueeze(-1))
        rows_TKF = torch.add(column_F, chosen_TK1, alpha=width)
        return F.embedding_bag(rows_TKF.flatten(1), down_RD, per_sample_weights=active_TKF.flatten(1), mode="sum")

    return step
