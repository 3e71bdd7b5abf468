"""`M`: the Mamba-2 block (Dao & Gu 2024, "Transformers are SSMs"), state-space duality in its matmul form.

Per head, with scalar decay a_t = exp(dt_t A) and state h of shape [P, N]:

    h_t = a_t h_{t-1} + dt_t x_t B_t^T          y_t = h_t C_t + D x_t

Unrolled, y = (C B^T . decay . dt) x is attention without softmax. Splitting the length into chunks of Q tokens
makes the cost linear: inside a chunk the quadratic form (matmuls), between chunks the recurrence on states.

Shapes: B batch, L length, D hidden, H heads, P head_dim, I = H P inner width, G groups (B and C are shared by H/G
heads, like keys in GQA), N state size, K conv width, C chunks, Q chunk length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.cache import MambaCache
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.layers import GatedGroupRMSNorm, at_least_fp32


class Mamba2(nn.Module):
    """in_proj -> [z | x B C | dt] -> causal conv + SiLU on x B C -> SSD scan -> gated group norm -> out_proj."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.num_groups, self.state_size = config.n_groups, config.ssm_state_size
        self.inner_size, self.conv_size = config.mamba_inner_size, config.mamba_conv_size
        self.chunk_size = config.chunk_size
        self.in_proj = nn.Linear(config.hidden_size, self.inner_size + self.conv_size + self.num_heads, bias=False)
        self.conv1d = DepthwiseConv(self.conv_size, config.conv_kernel)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.norm = GatedGroupRMSNorm(self.inner_size, self.num_groups, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(self.inner_size, config.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor, seq_idx_BL: Tensor | None = None, cache: MambaCache | None = None) -> Tensor:
        """Whole sequences: training, and prefill when a cache is given (its states are then set to the row ends).

        Args:
            x_BLD: [B, L, D].
            seq_idx_BL: document index of each token; neither the convolution nor the state crosses a change of it.
            cache: receives the states after the last token.
        """
        z_BLI, xBC_BLc, dt_BLH = self._project(x_BLD)
        if cache is not None:
            cache.conv.copy_(self._last_inputs(xBC_BLc, seq_idx_BL, cache.conv.shape[1]))
        xBC_BLc = F.silu(self.conv1d(xBC_BLc, seq_idx_BL))
        x_BLHP, B_BLGN, C_BLGN = self._split(xBC_BLc)
        with torch.autocast(x_BLD.device.type, enabled=False):  # the state sums over the whole past: fp32
            y_BLHP, state_BHPN = ssd_chunk_scan(
                x_BLHP, dt_BLH, -torch.exp(at_least_fp32(self.A_log)), B_BLGN, C_BLGN, self.chunk_size, seq_idx_BL
            )
        if cache is not None:
            cache.ssm.copy_(state_BHPN)
        y_BLHP = y_BLHP + self.D.unsqueeze(-1) * x_BLHP
        return self.out_proj(self.norm(y_BLHP.flatten(-2), z_BLI))

    def step(self, x_B1D: Tensor, cache: MambaCache) -> Tensor:
        """One token a row, [B, 1, D] -> [B, 1, D]; the recurrence itself, states updated in place."""
        z_B1I, xBC_B1c, dt_B1H = self._project(x_B1D)
        window_BKc = torch.cat([cache.conv, xBC_B1c], dim=1)
        cache.conv.copy_(window_BKc[:, 1:])
        xBC_Bc = F.silu((window_BKc * self.conv1d.weight.squeeze(1).T).sum(1) + self.conv1d.bias)
        x_BHP, B_BGN, C_BGN = (t.squeeze(1) for t in self._split(xBC_Bc.unsqueeze(1)))
        dt_BH = dt_B1H.squeeze(1)
        decay_BH = torch.exp(dt_BH * -torch.exp(at_least_fp32(self.A_log)))
        batch, heads_per_group = x_BHP.shape[0], self.num_heads // self.num_groups
        # Heads of a group share B and C: outer product and read-out run as [B G] batches of (heads P) x N.
        dtx = (at_least_fp32(x_BHP) * dt_BH.unsqueeze(-1)).reshape(
            batch, self.num_groups, heads_per_group * self.head_dim, 1
        )
        cache.ssm.mul_(decay_BH[:, :, None, None])
        grouped = cache.ssm.view(batch, self.num_groups, heads_per_group * self.head_dim, self.state_size)
        grouped.addcmul_(dtx, at_least_fp32(B_BGN).unsqueeze(2))
        with torch.autocast(x_B1D.device.type, enabled=False):  # as in the scan
            y_BGp1 = grouped @ at_least_fp32(C_BGN).unsqueeze(-1)
        y_BHP = y_BGp1.view(batch, self.num_heads, self.head_dim).to(x_BHP.dtype)
        y_BHP = y_BHP + self.D.unsqueeze(-1) * x_BHP
        return self.out_proj(self.norm(y_BHP.flatten(-2), z_B1I.squeeze(1))).unsqueeze(1)

    def _project(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, xBC, dt = self.in_proj(x_BLD).split([self.inner_size, self.conv_size, self.num_heads], dim=-1)
        # fp32 step sizes: their errors add up over the whole past.
        return z, xBC, F.softplus(at_least_fp32(dt) + at_least_fp32(self.dt_bias))

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gn = self.num_groups * self.state_size
        x, B, C = xBC.split([self.inner_size, gn, gn], dim=-1)
        groups = (self.num_groups, self.state_size)
        return x.unflatten(-1, (self.num_heads, self.head_dim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    @staticmethod
    def _last_inputs(xBC_BLc: Tensor, seq_idx_BL: Tensor | None, count: int) -> Tensor:
        """The last `count` conv inputs of each row, zero where they belong to an earlier document or do not exist."""
        if seq_idx_BL is not None:
            xBC_BLc = xBC_BLc * (seq_idx_BL == seq_idx_BL[:, -1:]).unsqueeze(-1)
        missing = max(0, count - xBC_BLc.shape[1])
        return F.pad(xBC_BLc[:, xBC_BLc.shape[1] - count + missing :], (0, 0, missing, 0))


class DepthwiseConv(nn.Module):
    """Causal convolution of each channel by itself, [B, L, c] -> [B, L, c]; stops at document boundaries.

    Weights are shaped and initialised like those of `nn.Conv1d(c, c, K, groups=c)`, whose place they take.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(self, x_BLc: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
        out: Tensor = CausalConv.apply(x_BLc, self.weight, self.bias, seq_idx_BL)
        return out


class CausalConv(torch.autograd.Function):
    """y[t] = bias + sum_s w[s] x[t - s] over the shifts s = 0 .. K-1 that stay within the document.

    K multiply-adds on slices keep the [B, L, c] layout; a Conv1d would transpose twice and cannot stop at a boundary.
    The gradient is written down because autograd would fill and pad a whole tensor for each shift:

        dx[t] = sum_s w[s] dy[t + s]      dw[s] = sum_t dy[t] x[t - s]      dbias = sum_t dy[t]
    """

    @staticmethod
    def forward(ctx: Any, x_BLc: Tensor, weight_c1K: Tensor, bias_c: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
        taps_Kc = weight_c1K.squeeze(1).T.flip(0).contiguous()  # taps_Kc[s] multiplies x[t - s]
        out_BLc = torch.addcmul(bias_c, x_BLc, taps_Kc[0])
        for shift in range(1, min(len(taps_Kc), x_BLc.shape[1])):
            source = _within(x_BLc[:, :-shift], seq_idx_BL, shift)
            out_BLc[:, shift:].addcmul_(source, taps_Kc[shift])
        ctx.save_for_backward(x_BLc, taps_Kc)
        ctx.seq_idx_BL = seq_idx_BL
        return out_BLc

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad_BLc,) = grads
        x_BLc, taps_Kc = ctx.saved_tensors
        grad_x_BLc = grad_BLc * taps_Kc[0]
        grad_taps_Kc = torch.zeros_like(taps_Kc)
        grad_taps_Kc[0] = (grad_BLc * x_BLc).sum((0, 1))
        for shift in range(1, min(len(taps_Kc), x_BLc.shape[1])):
            arriving = _within(grad_BLc[:, shift:], ctx.seq_idx_BL, shift)
            grad_x_BLc[:, :-shift].addcmul_(arriving, taps_Kc[shift])
            grad_taps_Kc[shift] = (arriving * x_BLc[:, :-shift]).sum((0, 1))
        return grad_x_BLc, grad_taps_Kc.flip(0).T.unsqueeze(1), grad_BLc.sum((0, 1)), None


def _within(values_BTc: Tensor, seq_idx_BL: Tensor | None, shift: int) -> Tensor:
    """Values of T = L - shift pairs of positions (t - shift, t), zero where the two are of different documents."""
    if seq_idx_BL is None:
        return values_BTc
    return values_BTc * (seq_idx_BL[:, shift:] == seq_idx_BL[:, :-shift]).unsqueeze(-1)


def ssd_chunk_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    chunk_size: int,
    seq_idx_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t, from h = 0 at each document start.

    Args:
        x_BLHP: inputs. dt_BLH: fp32 step sizes > 0. A_H: fp32 decay rates < 0. B_BLGN, C_BLGN: in and out projections.
        chunk_size: Q; the result does not depend on it.
        seq_idx_BL: document index of each token, non-decreasing along a row.

    Returns:
        y [B, L, H, P] in the dtype of x, and the fp32 state [B, H, P, N] after the last token.
    """
    batch, length, num_heads, head_dim = x_BLHP.shape
    num_groups, state_size = B_BLGN.shape[2:]
    heads_per_group = num_heads // num_groups
    chunk = min(chunk_size, length)
    pad = -length % chunk
    if pad:  # dt = 0 on padding: no decay and no input, so the final state stays that of the last real token
        x_BLHP, B_BLGN, C_BLGN = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x_BLHP, B_BLGN, C_BLGN))
        dt_BLH = F.pad(dt_BLH, (0, 0, 0, pad))
        if seq_idx_BL is not None:
            seq_idx_BL = torch.cat([seq_idx_BL, seq_idx_BL[:, -1:].expand(-1, pad)], dim=1)
    num_chunks = (length + pad) // chunk

    # Chunked layouts, heads grouped: [B, C, G, h, Q, ...] with H = G h.
    dtx = (at_least_fp32(x_BLHP) * dt_BLH.unsqueeze(-1)).view(
        batch, num_chunks, chunk, num_groups, heads_per_group, head_dim
    )
    dtx_BCGhQP = dtx.permute(0, 1, 3, 4, 2, 5)
    log_decay_BCGhQ = (dt_BLH * A_H).view(batch, num_chunks, chunk, num_groups, heads_per_group).permute(0, 1, 3, 4, 2)
    B_BCGQN = at_least_fp32(B_BLGN).view(batch, num_chunks, chunk, num_groups, state_size).transpose(2, 3)
    C_BCGQN = at_least_fp32(C_BLGN).view(batch, num_chunks, chunk, num_groups, state_size).transpose(2, 3)
    cum_BCGhQ = log_decay_BCGhQ.cumsum(-1)  # log of the decay from the chunk's start through token q

    visible_QQ = torch.ones(chunk, chunk, dtype=torch.bool, device=x_BLHP.device).tril()
    if seq_idx_BL is None:
        hidden = ~visible_QQ
        reads_past = feeds_end = None
    else:
        seq_BCQ = seq_idx_BL.view(batch, num_chunks, chunk)
        same = seq_BCQ.unsqueeze(-1) == seq_BCQ.unsqueeze(-2)
        hidden = ~(same & visible_QQ)[:, :, None, None]
        last_BC = seq_BCQ[:, :, -1]
        before_BC = torch.cat([seq_BCQ[:, :1, 0], last_BC[:, :-1]], dim=1)  # document at the end of the chunk before
        reads_past = (seq_BCQ == before_BC.unsqueeze(-1))[:, :, None, None]  # tokens that continue that document
        feeds_end = (seq_BCQ == last_BC.unsqueeze(-1))[:, :, None, None]  # tokens whose document reaches the chunk end

    # 1. Inside chunks: y = (C B^T . decay) dt x, with decay[i, j] = exp(cum_i - cum_j) for j <= i.
    decay_BCGhQQ = (cum_BCGhQ.unsqueeze(-1) - cum_BCGhQ.unsqueeze(-2)).masked_fill(hidden, float("-inf")).exp()
    scores_BCGQQ = C_BCGQN @ B_BCGQN.transpose(-1, -2)
    y_BCGhQP = (scores_BCGQQ.unsqueeze(3) * decay_BCGhQQ) @ dtx_BCGhQP

    # 2. What each chunk adds to the state at its end: sum_j exp(cum_end - cum_j) dt_j x_j B_j^T.
    to_end_BCGhQ = (cum_BCGhQ[..., -1:] - cum_BCGhQ).exp()
    if feeds_end is not None:
        to_end_BCGhQ = to_end_BCGhQ * feeds_end
    added_BCGhPN = (dtx_BCGhQP * to_end_BCGhQ.unsqueeze(-1)).transpose(-1, -2) @ B_BCGQN.unsqueeze(3)

    # 3. Between chunks: the recurrence, one step a chunk.
    chunk_decay_BCGh = cum_BCGhQ[..., -1].exp()
    if reads_past is not None:
        chunk_decay_BCGh = chunk_decay_BCGh * reads_past[..., -1]
    state = torch.zeros_like(added_BCGhPN[:, 0])
    before: list[Tensor] = []
    for decay_BGh, added_BGhPN in zip(chunk_decay_BCGh.unbind(1), added_BCGhPN.unbind(1), strict=True):
        before.append(state)
        state = state * decay_BGh[:, :, :, None, None] + added_BGhPN

    # 4. What the state before a chunk contributes to its tokens: exp(cum_i) C_i h.
    if num_chunks > 1:
        from_start_BCGhQ = cum_BCGhQ.exp()
        if reads_past is not None:
            from_start_BCGhQ = from_start_BCGhQ * reads_past
        carried = C_BCGQN.unsqueeze(3) @ torch.stack(before, dim=1).transpose(-1, -2)
        y_BCGhQP = y_BCGhQP + carried * from_start_BCGhQ.unsqueeze(-1)

    y_BLHP = y_BCGhQP.permute(0, 1, 4, 2, 3, 5).reshape(batch, num_chunks * chunk, num_heads, head_dim)
    return y_BLHP[:, :length].to(x_BLHP.dtype), state.reshape(batch, num_heads, head_dim, state_size)
