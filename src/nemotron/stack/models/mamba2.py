"""`M`: the Mamba-2 block (Dao & Gu 2024, "Transformers are SSMs").

Per head, with scalar decay a_t = exp(dt_t A) and state h of shape [P, N]:

    h_t = a_t h_{t-1} + dt_t x_t B_t^T          y_t = h_t C_t + D x_t

`ssd.py` computes it for whole sequences, `decoding/` token by token.

Shapes: B batch, L length, D hidden, H heads, P head_dim, I = H P inner width, G groups (B and C are shared by H/G
heads, like keys in GQA), N state size, K conv width, c conv channels; E early tokens, as in `shared_prompt.py`.

The convolution with its SiLU is in `kernels/cuda.py`: plain PyTorch, or the authors' CUDA kernels where they are
installed, which then take the place of the scan, too. Next: `ssd.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.cuda import causal_conv_silu, scan_kernel
from nemotron.stack.models.kernels.linear import Linear, Rounding, rounded
from nemotron.stack.models.layers import GatedGroupRMSNorm, at_least_fp32
from nemotron.stack.models.shared_prompt import SharedPrompts
from nemotron.stack.models.ssd import ssd_chunk_scan


@dataclass
class MambaCache:
    """What decoding needs of the tokens so far: the states of the convolution and of the recurrence.

    conv: the last K - 1 inputs of the convolution, oldest first, each [B, c]; a step drops one and appends one, so no
    input is moved, but where steps are replayed (`decoding/replay.py`). ssm: fp32 [B, G, N, I/G]: in this order, what a
    step reads from it, C h, is a row vector times a matrix; BLAS takes ten times longer the other way round.
    """

    conv: list[Tensor]
    ssm: Tensor

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B'])."""
        self.conv, self.ssm = [x_Bc[rows] for x_Bc in self.conv], self.ssm.index_select(0, rows)

    def clone(self) -> MambaCache:
        """A copy that can be advanced without changing this one."""
        return MambaCache([x_Bc.clone() for x_Bc in self.conv], self.ssm.clone())


class Mamba2(nn.Module):
    """in_proj -> [z | x B C | dt] -> causal conv + SiLU on x B C -> SSD scan -> gated group norm -> out_proj.

    `round_state` rounds the state that is kept between decoding steps, where it is kept in fewer bits than fp32.
    """

    round_state: Rounding | None = None

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

    def forward(
        self,
        x_BLD: Tensor,
        seq_idx_BL: Tensor | None = None,
        cache: MambaCache | None = None,
        prompts: SharedPrompts | None = None,
    ) -> Tensor:
        """Whole sequences: training, and prefill when a cache is given (its states are then set to the row ends).

        Args:
            x_BLD: [B, L, D].
            seq_idx_BL: document index of each token; neither the convolution nor the state crosses a change of it.
            cache: receives the states after the last token.
            prompts: of rows whose documents all go on from the first one.
        """
        z_BLI, xBC_BLc, dt_BLH = self.project(x_BLD)
        if cache is not None:
            cache.conv = self._last_inputs(xBC_BLc, seq_idx_BL, len(cache.conv))
        if prompts is None:
            conv_BLc = causal_conv_silu(xBC_BLc, self.conv1d.weight, self.conv1d.bias, seq_idx_BL)
        else:  # where a document begins, the convolution of the row takes in what stands before it, and is replaced
            conv_BLc = causal_conv_silu(xBC_BLc, self.conv1d.weight, self.conv1d.bias, None)
            early_EKc = prompts.early_inputs(xBC_BLc) * self.conv1d.weight.squeeze(1).T
            conv_BLc[prompts.rows_E, prompts.tokens_E] = F.silu(early_EKc.sum(1) + self.conv1d.bias).to(conv_BLc.dtype)
        x_BLHP, B_BLGN, C_BLGN = self.split(conv_BLc)
        with torch.autocast(x_BLD.device.type, enabled=False):  # the state sums over the whole past: fp32
            scan = scan_kernel(x_BLHP) or ssd_chunk_scan
            A_H = -torch.exp(at_least_fp32(self.A_log))
            y_BLHP, state_BHPN = scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, self.chunk_size, seq_idx_BL)
            if prompts is not None:
                y_BLHP = y_BLHP + prompts.read_states(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN).to(y_BLHP.dtype)
        if cache is not None:
            cache.ssm.unflatten(-1, (-1, self.head_dim)).copy_(
                state_BHPN.unflatten(1, (self.num_groups, -1)).permute(0, 1, 4, 2, 3)
            )
            cache.ssm = rounded(cache.ssm, self.round_state)
        y_BLHP = y_BLHP + self.D.unsqueeze(-1) * x_BLHP
        return self.out_proj(self.norm(y_BLHP.flatten(-2), z_BLI))

    def project(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate z [B, L, I], input of the convolution [B, L, c] and fp32 step sizes dt [B, L, H]."""
        z, xBC, dt = self.in_proj(x_BLD).split([self.inner_size, self.conv_size, self.num_heads], dim=-1)
        # fp32 step sizes: their errors add up over the whole past.
        return z, xBC, F.softplus(at_least_fp32(dt) + at_least_fp32(self.dt_bias))

    def split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, H, P], B and C [B, L, G, N] from the output of the convolution [B, L, c]."""
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


class DepthwiseConv(nn.Module):
    """The weights of the causal convolution of each channel by itself, which `causal_conv_silu` computes: shaped and
    initialised like those of `nn.Conv1d(c, c, K, groups=c)`, whose place they take."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))
