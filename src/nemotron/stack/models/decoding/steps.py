"""One decoding step: each block reads one more token a row, with the cache of the tokens before it.

The function is that of the blocks' forward passes, in the form that suits one token: the recurrence instead of the
scan, one query instead of a triangle of them, no autograd. `prepare` converts all weights once a generation and returns
the function that is called for every token. A step of a small batch is a few hundred operations of a microsecond each,
so their number is kept low; a step of a large batch is memory traffic, so states change in place and views replace
copies.

Shapes: B batch, D hidden, V vocabulary. Mamba-2: H heads, P head_dim, I = H P inner width, G groups, i = I / G, N state
size, c conv channels. Attention: A query heads, J key/value heads, a = A / J, X head_dim, S key slots. Experts: T = B
tokens, E experts, K experts a token, F expert width, R = T K routed rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.attention import Attention, AttentionCache, without_cudnn
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.replay import ReplayedStep
from nemotron.stack.models.kernels.experts import choose_implementation, dispatch, weighted_sum
from nemotron.stack.models.kernels.linear import Rounding, matmul_nt, onednn_serves, rounded
from nemotron.stack.models.layers import MLP, at_least_fp32
from nemotron.stack.models.mamba2 import Mamba2, MambaCache
from nemotron.stack.models.moe import Experts, MoE
from nemotron.stack.models.nemotron_h import NemotronH

# oneDNN (see linear.py) compiles a kernel for each number of rows: worth it for batches that are a multiple of this,
# which `generate` keeps to, from this many multiply-adds on, and for a single row where the weights are larger than a
# core's cache, which it reads twice as fast.
ONEDNN_ROWS, ONEDNN_SIZE, ONEDNN_WEIGHTS = 16, 1 << 20, 1 << 18
# Bytes of the SSM state that are updated and read while they stay in the processor's cache.
STATE_BLOCK = 4 << 20
# Compute capabilities, up to the dot, whose grouped product is one kernel; for others PyTorch reads each one's rows.
GROUPED_MM_MAJORS = (9, 10)

Step = Callable[[Tensor], Tensor]
ExpertStep = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens, weights and choices: [T, D], [T, K], [T, K]


def prefill(model: NemotronH, input_ids_BL: Tensor, is_token_BL: Tensor, capacity: int) -> tuple[Tensor, Cache]:
    """Read left-padded prompts at once. Returns logits of the last position [B, V] and the filled cache.

    Args:
        input_ids_BL: int64 [B, L].
        is_token_BL: bool [B, L], False where a row is padded.
        capacity: tokens a row that the cache has room for, padding included.

    Padding is treated as a document of its own (index 0, the prompt is 1), which is exactly what packing isolates.
    """
    weight = model.lm_head.weight
    cache = Cache.allocate(model.config, len(input_ids_BL), capacity, compute_dtype(weight), weight.device)
    is_padded = not bool(is_token_BL.all())
    if is_padded:
        cache.key_mask_BS = F.pad(is_token_BL, (0, capacity - is_token_BL.shape[1]), value=True)
    hidden_BLD, _ = model.hidden_states(input_ids_BL, is_token_BL.long() if is_padded else None, cache.layers)
    cache.length = input_ids_BL.shape[1]
    logits_BV: Tensor = model.lm_head(hidden_BLD[:, -1])
    return logits_BV, cache


@torch.no_grad()
def step(model: NemotronH, input_ids_B: Tensor, cache: Cache) -> Tensor:
    """One more token a row: int64 [B] -> logits [B, V]; the cache moves on by one slot. No gradient.

    The first step after `prefill` prepares the weights: after a change of weights, a new prefill is needed.
    """
    if cache.step is None:
        cache.step = prepare(model, cache)
    return cache.step(input_ids_B)


def prepare(model: NemotronH, cache: Cache) -> Step:
    """The step function of a generation: int64 [B], the newest token of each row -> logits of the next [B, V].

    Every call moves the cache on by one token. The weights are those at the time of preparation, in the dtype of
    autocast where that is on; there is no gradient.
    """
    device = model.lm_head.weight.device.type
    embedding = model.backbone.embeddings.weight
    steps: list[tuple[Step, Step]] = []
    for block, state in zip(model.blocks(), cache.layers, strict=True):
        norm, mixer = prepare_norm(block.norm.weight, block.norm.eps), block.mixer
        if isinstance(mixer, Mamba2) and isinstance(state, MambaCache):
            steps.append((norm, prepare_mamba2(mixer, state, cache)))
        elif isinstance(mixer, Attention) and isinstance(state, AttentionCache):
            steps.append((norm, prepare_attention(mixer, state, cache)))
        elif isinstance(mixer, MoE):
            steps.append((norm, prepare_moe(mixer, prepare_experts(mixer.experts))))
        elif isinstance(mixer, MLP):
            steps.append((norm, prepare_mlp(mixer)))
    norm_f = prepare_norm(model.backbone.norm_f.weight, model.backbone.norm_f.eps)
    lm_head = prepare_linear(model.lm_head.weight, model.lm_head.round_input)
    own_dtypes = explicit_dtypes(device)

    def step(input_ids_B: Tensor) -> Tensor:
        with own_dtypes:
            x_BD = F.embedding(input_ids_B, embedding)
            for norm, mixer in steps:
                x_BD = x_BD + mixer(norm(x_BD))
            cache.length += 1
            return lm_head(norm_f(x_BD))

    return ReplayedStep(step, cache) if can_be_recorded(model) else step


def can_be_recorded(model: NemotronH) -> bool:
    """Whether a step runs on a GPU and asks it for no number: as roundings may, and experts unless they are multiplied
    as a grouped product that is one kernel (`GROUPED_MM_MAJORS`)."""
    device, moes = model.lm_head.weight.device, model.moe_blocks()
    if device.type != "cuda" or (moes and torch.cuda.get_device_capability(device)[0] not in GROUPED_MM_MAJORS):
        return False
    roundings = ("round_input", "round_output", "round_active", "round_state")
    if any(getattr(module, name, None) is not None for module in model.modules() for name in roundings):
        return False
    ups = [moe.experts.up_proj for moe in moes]
    inputs = [up_EFD.new_empty(1, up_EFD.shape[2], dtype=compute_dtype(up_EFD)) for up_EFD in ups]
    ways = [choose_implementation(x_TD, 1, up_EFD.shape[1])[1] for x_TD, up_EFD in zip(inputs, ups, strict=True)]
    return all(way == "grouped_mm" for way in ways)


def explicit_dtypes(device: str) -> contextlib.AbstractContextManager[None]:
    """Around prepared steps, which say themselves what is computed in which dtype: without autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which matrices are multiplied: autocast's where that is on, else that of the weights."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def prepare_linear(weight_NK: Tensor, round_input: Rounding | None = None) -> Step:
    """x W^T, [B, K] -> [B, N]; x is rounded first where the model's activations are quantised."""
    weight_NK = weight_NK.to(compute_dtype(weight_NK))
    dtype, size = weight_NK.dtype, weight_NK.numel()
    has_onednn = onednn_serves(weight_NK)

    def step(x_BK: Tensor) -> Tensor:
        rows, x_BK = x_BK.shape[0], rounded(x_BK, round_input)
        is_large = size > ONEDNN_WEIGHTS or (rows % ONEDNN_ROWS == 0 and rows * size >= ONEDNN_SIZE)
        if has_onednn and is_large:
            return matmul_nt(x_BK, weight_NK)
        return F.linear(x_BK.to(dtype), weight_NK)

    return step


def prepare_norm(weight: Tensor, eps: float) -> Step:
    """x w / sqrt(mean x^2 + eps) over the last dimension, as x (w sqrt(d)) / hypot(|x|, sqrt(d eps))."""
    size = weight.shape[-1]
    weight = at_least_fp32(weight) * size**0.5
    floor = torch.tensor((size * eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def step(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight.dtype)
        return (x * weight).div_(length.hypot_(floor)).to(x.dtype)

    return step


def prepare_mamba2(mixer: Mamba2, state: MambaCache, cache: Cache) -> Step:
    """`M`: convolution over the last K inputs, then the recurrence."""
    block = PreparedMamba2(mixer)

    def step(x_BD: Tensor) -> Tensor:
        z_BI, xBC_Bc, dt_BH = block.project(x_BD)
        conv_Bc = torch.addcmul(block.conv_bias_c, xBC_Bc, block.tap_c)
        for past_Bc, past_tap_c in zip(state.conv, block.past_taps, strict=True):
            conv_Bc.addcmul_(past_Bc, past_tap_c)
        if cache.slot_1 is None:
            state.conv = [*state.conv, xBC_Bc][1:]
        else:
            for older_Bc, newer_Bc in pairwise([*state.conv, xBC_Bc]):
                older_Bc.copy_(newer_Bc)
        x_BI, *inputs = block.recurrence_inputs(conv_Bc, dt_BH)
        y_BG1i = recurrence(state.ssm, *inputs)
        state.ssm = rounded(state.ssm, mixer.round_state)  # after it was read, as it is stored
        return block.finish(y_BG1i, x_BI, z_BI)

    return step


class PreparedMamba2:
    """The weights of an `M` block as steps take them, and what a step does around convolution and recurrence.

    R rows, one for each row of the batch, or one for each token of each. All between the projections is fp32.
    tap_c, past_taps: what the convolution multiplies its newest input by, and those before it, oldest first, each [c].
    """

    def __init__(self, mixer: Mamba2) -> None:
        self.head_dim, self.groups, self.state_size = mixer.head_dim, mixer.num_groups, mixer.state_size
        self.inner_size, self.group_size = mixer.inner_size, mixer.inner_size // mixer.num_groups
        self.in_sizes = [mixer.inner_size, mixer.conv_size, mixer.num_heads]
        self.xBC_sizes = [mixer.inner_size, *[mixer.num_groups * mixer.state_size] * 2]
        self.in_proj = prepare_linear(mixer.in_proj.weight, mixer.in_proj.round_input)
        self.out_proj = prepare_linear(mixer.out_proj.weight, mixer.out_proj.round_input)
        *self.past_taps, self.tap_c = at_least_fp32(mixer.conv1d.weight).squeeze(1).T.contiguous().unbind(0)
        self.conv_bias_c, self.dt_bias_H = at_least_fp32(mixer.conv1d.bias), at_least_fp32(mixer.dt_bias)
        self.A_H = -torch.exp(at_least_fp32(mixer.A_log))
        self.D_I = at_least_fp32(mixer.D).repeat_interleave(mixer.head_dim)
        self.norm = prepare_norm(mixer.norm.weight.view(self.groups, self.group_size), mixer.norm.eps)

    def project(self, x_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate z [R, I], input of the convolution [R, c] and raw step sizes [R, H]."""
        z_RI, xBC_Rc, dt_RH = self.in_proj(x_RD).split(self.in_sizes, dim=-1)
        return z_RI, xBC_Rc, dt_RH

    def recurrence_inputs(self, conv_Rc: Tensor, dt_RH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """From what the convolution gives, which changes, x [R, I] and the arguments of `recurrence` behind the state:
        decay and dt x [R, G, 1, i], B [R, G, N, 1], C [R, G, 1, N]."""
        x_RI, B_Rn, C_Rn = F.silu(conv_Rc, inplace=True).split(self.xBC_sizes, dim=-1)
        dt_RH = F.softplus(dt_RH + self.dt_bias_H)
        decay_RI = torch.exp(dt_RH * self.A_H).repeat_interleave(self.head_dim, dim=1)
        dtx_RHP = x_RI.view(*dt_RH.shape, self.head_dim) * dt_RH.unsqueeze(-1)
        return (
            x_RI,
            decay_RI.view(-1, self.groups, 1, self.group_size),
            dtx_RHP.view(-1, self.groups, 1, self.group_size),
            B_Rn.view(-1, self.groups, self.state_size, 1),
            C_Rn.view(-1, self.groups, 1, self.state_size),
        )

    def finish(self, y_RG1i: Tensor, x_RI: Tensor, z_RI: Tensor) -> Tensor:
        """The block's output [R, D] from what the recurrence gives, which changes."""
        y_RI = y_RG1i.view(-1, self.inner_size).addcmul_(x_RI, self.D_I)
        gated_RGi = F.silu(at_least_fp32(z_RI)).mul_(y_RI).view(-1, self.groups, self.group_size)
        return self.out_proj(self.norm(gated_RGi).view(-1, self.inner_size))


def recurrence(ssm_BGNi: Tensor, decay_BG1i: Tensor, dtx_BG1i: Tensor, B_BGN1: Tensor, C_BG1N: Tensor) -> Tensor:
    """h = decay h + B (dt x)^T in place, and y = C h [B, G, 1, i].

    Three passes over the state. A state that does not fit a core's cache is taken some rows at a time, so that it
    comes from memory once and not three times.
    """
    rows = max(1, STATE_BLOCK // (ssm_BGNi[0].numel() * ssm_BGNi.element_size()))
    if len(ssm_BGNi) > rows and ssm_BGNi.device.type == "cpu":
        parts = zip(*(t.split(rows) for t in (ssm_BGNi, decay_BG1i, dtx_BG1i, B_BGN1, C_BG1N)), strict=True)
        return torch.cat([recurrence(*part) for part in parts])
    ssm_BGNi.mul_(decay_BG1i).addcmul_(B_BGN1, dtx_BG1i)
    return C_BG1N @ ssm_BGNi


def prepare_attention(mixer: Attention, state: AttentionCache, cache: Cache) -> Step:
    """`*`: the A / J query heads that share keys stand as rows of one small matrix, so that no key is copied."""
    heads, kv_heads, head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    project, o_proj = prepare_qkv(mixer), prepare_linear(mixer.o_proj.weight, mixer.o_proj.round_input)

    def step(x_BD: Tensor) -> Tensor:
        q, *newest = project(x_BD)
        for kept, new in zip((state.k, state.v), newest, strict=True):
            write_newest(kept, new.view(-1, kv_heads, 1, head_dim), cache)
        end = cache.length + 1 if cache.slot_1 is None else cache.window
        with without_cudnn(state.k.device):
            out_BJaX = F.scaled_dot_product_attention(
                q.view(-1, kv_heads, heads // kv_heads, head_dim).to(state.k.dtype),
                state.k[:, :, :end],
                state.v[:, :, :end],
                attn_mask=mask_of_keys(cache, end),
            )
        return o_proj(out_BJaX.reshape(-1, heads * head_dim))

    return step


def write_newest(kept_BJSX: Tensor, new_BJ1X: Tensor, cache: Cache) -> None:
    """Put keys or values where the newest token's belong; where the slot is a tensor, by a pass over those in sight.

    (Writing by index takes as long, and sorts indices first where sums have one order.)
    """
    if cache.slot_1 is None:
        kept_BJSX[:, :, cache.length] = new_BJ1X.squeeze(2)
        return
    kept_BJSX = kept_BJSX[:, :, : cache.window]
    is_newest_S1 = (torch.arange(cache.window, device=kept_BJSX.device) == cache.slot_1).unsqueeze(-1)
    torch.where(is_newest_S1, new_BJ1X.to(kept_BJSX.dtype), kept_BJSX, out=kept_BJSX)


def mask_of_keys(cache: Cache, end: int) -> Tensor | None:
    """Which of the first `end` slots the newest token sees, bool [B or 1, 1, 1, end]; None: all."""
    mask = None if cache.key_mask_BS is None else cache.key_mask_BS[:, None, None, :end]
    if cache.slot_1 is None:
        return mask
    is_there_S = torch.arange(end, device=cache.slot_1.device) <= cache.slot_1
    return is_there_S.view(1, 1, 1, end) if mask is None else mask & is_there_S


def prepare_qkv(mixer: Attention) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Queries [R, A X], keys and values [R, J X], these as the cache has them."""
    sizes = [heads * mixer.head_dim for heads in (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)]
    qkv_weight = torch.cat([mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight])
    qkv_proj = prepare_linear(qkv_weight, mixer.q_proj.round_input)  # all three read the same
    round_k, round_v = mixer.k_proj.round_output, mixer.v_proj.round_output

    def project(x_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv_proj(x_RD).split(sizes, dim=-1)
        return q, rounded(k, round_k), rounded(v, round_v)

    return project


def prepare_mlp(mixer: MLP) -> Step:
    """`-`, and the shared expert of `E`."""
    up_proj = prepare_linear(mixer.up_proj.weight, mixer.up_proj.round_input)
    down_proj = prepare_linear(mixer.down_proj.weight, mixer.down_proj.round_input)

    def step(x_BD: Tensor) -> Tensor:
        return down_proj(up_proj(x_BD).relu_().square_())

    return step


def prepare_moe(mixer: MoE, experts: ExpertStep) -> Step:
    """`E`: router, routed experts (at the latent width where there is one), shared expert."""
    gate, shared_experts = mixer.gate, prepare_mlp(mixer.shared_experts)
    into, out_of = (
        None if latent is None else prepare_linear(latent.weight, latent.round_input)
        for latent in (mixer.fc1_latent_proj, mixer.fc2_latent_proj)
    )

    def step(x_TD: Tensor) -> Tensor:
        weights_TK, chosen_TK, _ = gate(x_TD)
        routed = experts(x_TD if into is None else into(x_TD), weights_TK, chosen_TK)
        return shared_experts(x_TD) + (routed if out_of is None else out_of(routed))

    return step


def prepare_experts(experts: Experts) -> ExpertStep:
    """sum_k weights[t, k] down[e] relu(up[e] x[t])^2 with e = chosen[t, k]."""
    up_EFD, down_EDF = (weight.to(compute_dtype(weight)) for weight in (experts.up_proj, experts.down_proj))
    ups_FD, downs_DF = up_EFD.unbind(), down_EDF.unbind()
    round_input, round_active = experts.round_input, experts.round_active

    def one(x_1D: Tensor, expert: int) -> Tensor:
        active_1F = F.linear(x_1D, ups_FD[expert]).relu_().square_()
        return F.linear(rounded(active_1F, round_active), downs_DF[expert])

    def step(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        x_TD, num_experts = rounded(x_TD, round_input).to(up_EFD.dtype), len(up_EFD)
        if len(x_TD) == 1 and x_TD.device.type == "cpu":
            y_KD = torch.cat([one(x_TD, index) for index in chosen_TK[0].tolist()])
            return (weights_TK @ at_least_fp32(y_KD)).to(x_TD.dtype)
        # An expert has few rows: on a CPU one product of all takes as little as half the time of one for each.
        multiple, implementation = choose_implementation(x_TD, chosen_TK.numel() // num_experts, up_EFD.shape[1])
        rows = dispatch(chosen_TK, num_experts, multiple, "batched_mm" if implementation == "eager" else implementation)
        active_SF = rows.products(x_TD.index_select(0, rows.token_S), up_EFD).relu_().square_()
        return weighted_sum(rows.products(rounded(active_SF, round_active), down_EDF), rows.slot_TK, weights_TK)

    return step
