"""The scan of Mamba-2 in its matmul form: state-space duality (Dao & Gu 2024, "Transformers are SSMs", section 6).

Per head, with log-decay l_t = dt_t A and state h of shape [N, P], the transpose of that in `mamba2.py`:

    h_t = exp(l_t) h_{t-1} + dt_t B_t x_t^T          y_t = C_t h_t

Unrolled, y = (C B^T . decay) (dt x) is attention without softmax. Splitting the length into chunks of Q tokens makes
the cost linear: inside a chunk the quadratic form (matmuls), between chunks the recurrence on states. The gradient is
written down as well: it is the same few matmuls, where autograd would make a dozen more passes over [Q, Q] tensors.

Shapes: B batch, L length, H heads, P head_dim, G groups (B and C are shared by h = H/G heads, like keys in GQA),
N state size, C chunks, Q chunk length. Next: `moe.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron.stack.models.layers import at_least_fp32


def ssd_chunk_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    chunk_size: int,
    seq_idx_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan from h = 0 at each document start. Computes in fp32, or in float64 for float64 inputs.

    Args:
        x_BLHP: inputs. dt_BLH: step sizes >= 0. A_H: decay rates < 0. B_BLGN, C_BLGN: in and out projections.
        chunk_size: Q; the result does not depend on it.
        seq_idx_BL: document index of each token, non-decreasing along a row.

    Returns:
        y [B, L, H, P] in the dtype of x, and the fp32 state [B, H, P, N] after the last token.
    """
    batch, length, num_heads, head_dim = x_BLHP.shape
    state_size = B_BLGN.shape[-1]
    chunk = min(chunk_size, length)
    pad = -length % chunk
    x, dt, B, C = (at_least_fp32(t) for t in (x_BLHP, dt_BLH, B_BLGN, C_BLGN))
    if pad:  # dt = 0 on padding: no decay and no input, so the final state stays that of the last real token
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
        if seq_idx_BL is not None:
            seq_idx_BL = torch.cat([seq_idx_BL, seq_idx_BL[:, -1:].expand(-1, pad)], dim=1)
    y_BLHP: Tensor
    y_BLHP, state = ChunkScan.apply(x, dt, at_least_fp32(A_H), B, C, chunk, seq_idx_BL)
    state_BHPN: Tensor = state.view(batch, num_heads, state_size, head_dim).transpose(-1, -2)
    return y_BLHP[:, :length].to(x_BLHP.dtype), state_BHPN


class ChunkScan(torch.autograd.Function):
    """The scan over whole chunks and its gradient. In and out as `ssd_chunk_scan`, the state as [B, G, h, N, P].

    With c_i the log-decay from the chunk's start through token i, D_ij = exp(c_i - c_j) for j < i, W = (C B^T) . D,
    u = dt x, S the state before the chunk and S' the one after it:

        p_i = (W u)_i + exp(c_i) C_i S              S' = exp(c_Q) S + sum_j exp(c_Q - c_j) B_j u_j^T
        y_i = p_i + (C_i B_i) u_i

    The log-decays occur in exponents only, so their gradient needs no [Q, Q] tensor: whatever c_i scales up is p_i,
    what token i reads of its past, and whatever it scales down is what the future reads of u_i. With f_i the gradient
    of u_i from there, hence

        dc_i = dy_i . p_i - u_i . f_i   (and + dS' . S' for the last token of the chunk)

    Both products could take in the token's own term, (C_i B_i) u_i, as it cancels. But that would leave its rounding,
    and in a head that forgets from one token to the next there is nothing else.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BLHP: Tensor, dt_BLH: Tensor, A_H: Tensor, B_BLGN: Tensor, C_BLGN: Tensor,
        chunk: int, seq_idx_BL: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        num_chunks, groups, heads = x_BLHP.shape[1] // chunk, B_BLGN.shape[2], x_BLHP.shape[2] // B_BLGN.shape[2]

        x_BCGhQP, dt_BCGhQ1 = _by_chunk(x_BLHP, chunk, groups), _by_chunk(dt_BLH.unsqueeze(-1), chunk, groups)
        u_BCGhQP = torch.mul(x_BCGhQP, dt_BCGhQ1, out=_empty(x_BCGhQP))
        B_BCGQN, C_BCGQN = (t.unflatten(1, (num_chunks, chunk)).transpose(2, 3) for t in (B_BLGN, C_BLGN))
        c_BCGhQ = (dt_BCGhQ1.squeeze(-1) * A_H.view(groups, heads, 1)).cumsum(-1)
        hidden, continues, reaches_end = _document_masks(seq_idx_BL, num_chunks, chunk, x_BLHP.device)

        # Inside chunks.
        D_BCGhQQ = (c_BCGhQ.unsqueeze(-1) - c_BCGhQ.unsqueeze(-2)).masked_fill_(hidden, float("-inf")).exp_()
        W_BCGhQQ = D_BCGhQQ * (C_BCGQN @ B_BCGQN.transpose(-1, -2)).unsqueeze(3)
        p_BCGhQP = W_BCGhQQ @ u_BCGhQP
        # What each chunk adds to the state at its end, and what decays over the whole of it.
        to_end_BCGhQ = (c_BCGhQ[..., -1:] - c_BCGhQ).exp_()
        from_start_BCGhQ = c_BCGhQ.exp()
        if reaches_end is not None and continues is not None:
            to_end_BCGhQ, from_start_BCGhQ = to_end_BCGhQ * reaches_end, from_start_BCGhQ * continues
        B_end_BCGhQN = B_BCGQN.unsqueeze(3) * to_end_BCGhQ.unsqueeze(-1)
        S_after_BCGhNP = B_end_BCGhQN.transpose(-1, -2) @ u_BCGhQP
        # Between chunks: the recurrence, one step a chunk.
        decay_BCGh11 = from_start_BCGhQ[..., -1, None, None]
        for i in range(1, num_chunks):
            S_after_BCGhNP[:, i].addcmul_(S_after_BCGhNP[:, i - 1], decay_BCGh11[:, i])
        # What the state before a chunk contributes to its tokens.
        C_start_BCGhQN = C_BCGQN.unsqueeze(3) * from_start_BCGhQ.unsqueeze(-1)
        if num_chunks > 1:
            p_BCGhQP[:, 1:] += C_start_BCGhQN[:, 1:] @ S_after_BCGhNP[:, :-1]

        # What a token reads of itself.
        own_BCG1Q = (C_BCGQN * B_BCGQN).sum(-1).unsqueeze(3)
        y_BCGhQP = torch.addcmul(p_BCGhQP, u_BCGhQP, own_BCG1Q.unsqueeze(-1))

        ctx.chunk = chunk
        ctx.save_for_backward(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, own_BCG1Q,
            u_BCGhQP, p_BCGhQP, D_BCGhQQ, to_end_BCGhQ, from_start_BCGhQ, S_after_BCGhNP,
        )  # fmt: skip
        return _by_length(y_BCGhQP), S_after_BCGhNP[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_BLHP, dS_BGhNP = grads
        (
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, own_BCG1Q,
            u_BCGhQP, p_BCGhQP, D_BCGhQQ, to_end_BCGhQ, from_start_BCGhQ, S_after_BCGhNP,
        ) = ctx.saved_tensors  # fmt: skip
        chunk, groups = ctx.chunk, B_BLGN.shape[2]
        num_chunks = S_after_BCGhNP.shape[1]
        B_BCGQN, C_BCGQN = (t.unflatten(1, (num_chunks, chunk)).transpose(2, 3) for t in (B_BLGN, C_BLGN))
        dy = _by_chunk(dy_BLHP, chunk, groups)
        dy_BCGhQP = _empty(dy).copy_(dy)

        # Between chunks, from the last to the first: dS_after is the gradient of the state after each chunk.
        C_start_BCGhQN = C_BCGQN.unsqueeze(3) * from_start_BCGhQ.unsqueeze(-1)
        read_BCGhNP = C_start_BCGhQN[:, 1:].transpose(-1, -2) @ dy_BCGhQP[:, 1:]
        dS_after_BCGhNP = torch.cat([read_BCGhNP, dS_BGhNP.unsqueeze(1)], dim=1)
        decay_BCGh11 = from_start_BCGhQ[..., -1, None, None]
        for i in range(num_chunks - 1, 0, -1):
            dS_after_BCGhNP[:, i - 1].addcmul_(dS_after_BCGhNP[:, i], decay_BCGh11[:, i])
        # Inside chunks.
        scores_BCGQQ = C_BCGQN @ B_BCGQN.transpose(-1, -2)
        W_BCGhQQ = D_BCGhQQ * scores_BCGQQ.unsqueeze(3)
        f_BCGhQP = W_BCGhQQ.transpose(-1, -2) @ dy_BCGhQP
        dscores_BCGQQ = torch.matmul(dy_BCGhQP, u_BCGhQP.transpose(-1, -2), out=W_BCGhQQ).mul_(D_BCGhQQ).sum(3)
        dB_BCGQN, dC_BCGQN = dscores_BCGQQ.transpose(-1, -2) @ C_BCGQN, dscores_BCGQQ @ B_BCGQN
        # Through the states.
        B_end_BCGhQN = torch.mul(B_BCGQN.unsqueeze(3), to_end_BCGhQ.unsqueeze(-1), out=C_start_BCGhQN)
        f_BCGhQP += B_end_BCGhQN @ dS_after_BCGhNP
        dB_end_BCGhQN = torch.matmul(u_BCGhQP, dS_after_BCGhNP.transpose(-1, -2), out=B_end_BCGhQN)
        dB_BCGQN += dB_end_BCGhQN.mul_(to_end_BCGhQ.unsqueeze(-1)).sum(3)
        if num_chunks > 1:
            dC_start_BCGhQN = dy_BCGhQP[:, 1:] @ S_after_BCGhNP[:, :-1].transpose(-1, -2)
            dC_BCGQN[:, 1:] += dC_start_BCGhQN.mul_(from_start_BCGhQ[:, 1:].unsqueeze(-1)).sum(3)

        # Through the log-decays l = dt A, whose cumulative sum c is; u = dt x; what a token reads of itself.
        x_BCGhQP, dt_BCGhQ1 = _by_chunk(x_BLHP, chunk, groups), _by_chunk(dt_BLH.unsqueeze(-1), chunk, groups)
        dt_BCGhQ, A_Gh1 = dt_BCGhQ1.squeeze(-1), A_H.view(groups, -1, 1)
        fx_BCGhQ, dyx_BCGhQ = (f_BCGhQP * x_BCGhQP).sum(-1), (dy_BCGhQP * x_BCGhQP).sum(-1)
        dc_BCGhQ = (dy_BCGhQP * p_BCGhQP).sum(-1) - fx_BCGhQ * dt_BCGhQ
        dc_BCGhQ[..., -1] += (dS_after_BCGhNP * S_after_BCGhNP).sum((-1, -2))
        dl_BCGhQ = dc_BCGhQ.flip(-1).cumsum(-1).flip(-1)
        dA_H = (dl_BCGhQ * dt_BCGhQ).sum((0, 1, 4)).flatten()
        ddt_BCGhQ = fx_BCGhQ.addcmul_(dyx_BCGhQ, own_BCG1Q).addcmul_(dl_BCGhQ, A_Gh1)
        dx_BCGhQP = f_BCGhQP.addcmul_(dy_BCGhQP, own_BCG1Q.unsqueeze(-1)).mul_(dt_BCGhQ1)
        d_own_BCGQ1 = (dyx_BCGhQ * dt_BCGhQ).sum(3).unsqueeze(-1)
        dB_BCGQN.addcmul_(d_own_BCGQ1, C_BCGQN)
        dC_BCGQN.addcmul_(d_own_BCGQ1, B_BCGQN)
        dB_BLGN, dC_BLGN = (t.transpose(2, 3).reshape(B_BLGN.shape) for t in (dB_BCGQN, dC_BCGQN))
        ddt_BLH = _by_length(ddt_BCGhQ.unsqueeze(-1)).squeeze(-1)
        return _by_length(dx_BCGhQP), ddt_BLH, dA_H, dB_BLGN, dC_BLGN, None, None


def _by_chunk(t_BLHX: Tensor, chunk: int, groups: int) -> Tensor:
    """View [B, L, H, X] as [B, C, G, h, Q, X]."""
    return t_BLHX.unflatten(2, (groups, -1)).unflatten(1, (-1, chunk)).permute(0, 1, 3, 4, 2, 5)


def _by_length(t_BCGhQX: Tensor) -> Tensor:
    """[B, C, G, h, Q, X] in the order [B, L, H, X]."""
    return t_BCGhQX.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)


def _empty(like: Tensor) -> Tensor:
    """Uninitialised memory of a tensor's shape in the order of its dimensions, whatever the tensor's own strides."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _document_masks(
    seq_idx_BL: Tensor | None, num_chunks: int, chunk: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Where a token does not see another of its chunk as its past [.., Q, Q]; which continue the document before the
    chunk, and which are of the document at its end [.., Q]."""
    not_past_QQ = torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu()
    if seq_idx_BL is None:
        return not_past_QQ, None, None
    seq_BCQ = seq_idx_BL.unflatten(1, (num_chunks, chunk))
    hidden_BCQQ = (seq_BCQ.unsqueeze(-1) != seq_BCQ.unsqueeze(-2)) | not_past_QQ
    last_BC = seq_BCQ[:, :, -1]
    before_BC = torch.cat([seq_BCQ[:, :1, 0], last_BC[:, :-1]], dim=1)  # document at the end of the chunk before
    continues_BCQ, reaches_BCQ = seq_BCQ == before_BC.unsqueeze(-1), seq_BCQ == last_BC.unsqueeze(-1)
    return hidden_BCQQ[:, :, None, None], continues_BCQ[:, :, None, None], reaches_BCQ[:, :, None, None]
