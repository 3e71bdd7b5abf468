"""`M`: the Mamba-2 block (Dao & Gu 2024, "Transformers are SSMs").

Per head, with scalar decay a_t = exp(dt_t A) and state h of shape [P, N]:

    h_t = a_t h_{t-1} + dt_t x_t B_t^T          y_t = h_t C_t + D x_t

`ssd.py` computes it for whole sequences, `step` for one token.

Shapes: B batch, L length, D hidden, H heads, P head_dim, I = H P inner width, G groups (B and C are shared by H/G
heads, like keys in GQA), N state size, K conv width, C chunks, Q chunk length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.decoding.cache import MambaCache
from nemotron.stack.models.kernels.conv import CausalConv
from nemotron.stack.models.kernels.cuda import causal_conv_silu, chunk_scan
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.models.layers import GatedGroupRMSNorm, at_least_fp32


class Mamba2(nn.Module):
    """in_proj -> [z | x B C | dt] -> causal conv + SiLU on x B C -> SSD scan -> gated group norm -> out_proj."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.num_groups, self.state_size = config.n_groups, config.ssm_state_size
        self.inner_size, self.conv_size = config.mamba_inner_size, config.mamba_conv_size
        self.chunk_size = config.chunk_size
        self.in_proj = Linear(config.hidden_size, self.inner_size + self.conv_size + self.num_heads)
        self.conv1d = DepthwiseConv(self.conv_size, config.conv_kernel)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.norm = GatedGroupRMSNorm(self.inner_size, self.num_groups, config.layer_norm_epsilon)
        self.out_proj = Linear(self.inner_size, config.hidden_size)

    def forward(self, x_BLD: Tensor, seq_idx_BL: Tensor | None = None, cache: MambaCache | None = None) -> Tensor:
        """Whole sequences: training, and prefill when a cache is given (its states are then set to the row ends).

        Args:
            x_BLD: [B, L, D].
            seq_idx_BL: document index of each token; neither the convolution nor the state crosses a change of it.
            cache: receives the states after the last token.
        """
        z_BLI, xBC_BLc, dt_BLH = self._project(x_BLD)
        if cache is not None:
            cache.conv = self._last_inputs(xBC_BLc, seq_idx_BL, len(cache.conv))
        xBC_BLc = causal_conv_silu(xBC_BLc, self.conv1d.weight, self.conv1d.bias, seq_idx_BL)
        x_BLHP, B_BLGN, C_BLGN = self._split(xBC_BLc)
        with torch.autocast(x_BLD.device.type, enabled=False):  # the state sums over the whole past: fp32
            y_BLHP, state_BHPN = chunk_scan(
                x_BLHP, dt_BLH, -torch.exp(at_least_fp32(self.A_log)), B_BLGN, C_BLGN, self.chunk_size, seq_idx_BL
            )
        if cache is not None:
            cache.ssm.unflatten(-1, (-1, self.head_dim)).copy_(
                state_BHPN.unflatten(1, (self.num_groups, -1)).permute(0, 1, 4, 2, 3)
            )
        y_BLHP = y_BLHP + self.D.unsqueeze(-1) * x_BLHP
        return self.out_proj(self.norm(y_BLHP.flatten(-2), z_BLI))

    def extend(self, x_BTD: Tensor, cache: MambaCache) -> tuple[Tensor, PendingTokens]:
        """T further tokens a row at once, [B, T, D] -> [B, T, D], of which only some may come to stay.

        The cache is read, not changed: `PendingTokens.accept` moves its states on by as many tokens as hold. One chunk
        of the scan, with a state before it: y_i = exp(c_i) C_i h + sum_(j <= i) exp(c_i - c_j) (C_i B_j) dt_j x_j.
        """
        z_BTI, xBC_BTc, dt_BTH = self._project(x_BTD)
        inputs_BSc = torch.cat([*(x_Bc.unsqueeze(1) for x_Bc in cache.conv), xBC_BTc], dim=1)
        windows_BTcK = inputs_BSc.unfold(1, self.conv1d.weight.shape[-1], 1)
        xBC_BTc = F.silu((windows_BTcK * self.conv1d.weight.squeeze(1)).sum(-1) + self.conv1d.bias)
        x_BTHP, B_BTGN, C_BTGN = self._split(xBC_BTc)
        with torch.autocast(x_BTD.device.type, enabled=False):  # as in the scan
            heads = (self.num_groups, self.num_heads // self.num_groups)  # H = G h: heads of a group share B and C
            B_BGTN, C_BGTN = (at_least_fp32(t).transpose(1, 2) for t in (B_BTGN, C_BTGN))
            dtx_BGhTP = (at_least_fp32(x_BTHP) * dt_BTH.unsqueeze(-1)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
            c_BTH = (dt_BTH * -torch.exp(at_least_fp32(self.A_log))).cumsum(1)
            c_BGhT = c_BTH.transpose(1, 2).unflatten(1, heads)
            future_TT = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool, device=x_BTD.device).triu(1)
            decay_BGhTT = (c_BGhT.unsqueeze(-1) - c_BGhT.unsqueeze(-2)).masked_fill_(future_TT, float("-inf")).exp_()
            among_BGhTP = (decay_BGhTT * (C_BGTN @ B_BGTN.transpose(-1, -2)).unsqueeze(2)) @ dtx_BGhTP
            from_state_BGhTP = (C_BGTN @ cache.ssm).unflatten(-1, (-1, self.head_dim)).transpose(2, 3)
            y_BGhTP = torch.addcmul(among_BGhTP, from_state_BGhTP, c_BGhT.exp().unsqueeze(-1))
        y_BTHP = y_BGhTP.permute(0, 3, 1, 2, 4).flatten(2, 3).to(x_BTHP.dtype) + self.D.unsqueeze(-1) * x_BTHP
        out_BTD: Tensor = self.out_proj(self.norm(y_BTHP.flatten(-2), z_BTI))
        return out_BTD, PendingTokens(inputs_BSc, c_BGhT, dtx_BGhTP, B_BGTN)

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
    def _last_inputs(xBC_BLc: Tensor, seq_idx_BL: Tensor | None, count: int) -> list[Tensor]:
        """The last `count` conv inputs of each row, zero where they belong to an earlier document or do not exist."""
        xBC_BLc, seq_idx_BL = xBC_BLc[:, -count - 1 :], None if seq_idx_BL is None else seq_idx_BL[:, -count - 1 :]
        if seq_idx_BL is not None:
            xBC_BLc = xBC_BLc * (seq_idx_BL == seq_idx_BL[:, -1:]).unsqueeze(-1)
        missing = max(0, count - xBC_BLc.shape[1])
        last_BKc = F.pad(xBC_BLc[:, xBC_BLc.shape[1] - count + missing :], (0, 0, missing, 0))
        return [x_Bc.clone() for x_Bc in last_BKc.unbind(1)]  # not views that keep the whole sequence alive


@dataclass
class PendingTokens:
    """T tokens that `Mamba2.extend` has read but not yet written into the states.

    inputs: of the convolution, the cached ones first [B, K-1+T, c]. c: log-decay up to and with each token
    [B, G, h, T]. dtx: dt x [B, G, h, T, P]. B: [B, G, T, N]. H = G h.
    """

    inputs: Tensor
    c: Tensor
    dtx: Tensor
    B: Tensor

    def accept(self, cache: MambaCache, counts_B: Tensor) -> None:
        """Move the states on by the first `counts` tokens of each row (int64 [B], 0 .. T); the others never were.

        h = exp(c_n) h + sum_(j <= n) exp(c_n - c_j) dt_j x_j B_j^T for the last accepted token n: the state is written
        once, whatever the number of tokens.
        """
        row_B = torch.arange(len(counts_B), device=counts_B.device)
        cache.conv = [self.inputs[row_B, counts_B + i] for i in range(len(cache.conv))]
        count_B111 = counts_B.view(-1, 1, 1, 1)
        last_BGh1 = F.pad(self.c, (1, 0)).take_along_dim(count_B111, dim=-1)  # no token, no decay
        rejected_B11T = torch.arange(self.c.shape[-1], device=counts_B.device) >= count_B111
        to_last_BGhT = (last_BGh1 - self.c).masked_fill_(rejected_B11T, float("-inf")).exp_()
        added_BGNi = self.B.transpose(-1, -2) @ (self.dtx * to_last_BGhT.unsqueeze(-1)).transpose(2, 3).flatten(3)
        decay_BG1i = last_BGh1.exp().expand(-1, -1, -1, self.dtx.shape[-1]).flatten(2).unsqueeze(2)
        cache.ssm.mul_(decay_BG1i).add_(added_BGNi)


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
