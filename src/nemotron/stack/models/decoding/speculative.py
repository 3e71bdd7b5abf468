"""Speculative decoding (Leviathan et al. 2023) with the model's own multi-token prediction block as the drafter.

A round, for all rows of a batch at once:

1. Draft. The multi-token prediction block reads the trunk's hidden states of the tokens that the last round settled,
   each with the token after it, and predicts draft 1. Then it is applied to its own output and draft 1, and predicts
   draft 2, and so on: one shared block, so there may be more drafts than depths in training.
2. Verify. The trunk reads the newest token and the k drafts in one pass and predicts what follows each of them. As
   many drafts as agree are kept, and one more token comes from the trunk itself: 1 .. k+1 a round.
3. Settle. States and cache move on by the kept tokens of each row; what was written for the rest is overwritten.

Greedy output is that of `generate`, token for token; at a temperature > 0 its distribution is. In both cases up to
rounding: a pass over k+1 tokens sums in another order than k+1 single steps, which can tip a tie in fp32 or bf16.

Rows keep different numbers of tokens, so each row has its own length and writes its keys behind its own last one.

Shapes: B batch, L prompt length, T tokens read at once, D hidden, V vocabulary, S key slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.decoding.generate import COMPACT_AT, Generation, draw, pad_left, uniforms
from nemotron.stack.models.decoding.multi_token import CachedStack
from nemotron.stack.models.decoding.steps import explicit_dtypes, prepare_linear, prepare_norm
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.mtp import shift_left
from nemotron.stack.models.nemotron_h import NemotronH


@dataclass
class Acceptance:
    """How well the drafts did. Counted per row and round, before a row is cut at its stop token or length limit.

    rounds: passes of the trunk over a row. accepted: in how many of them draft 1, 2, ... was kept.
    """

    rounds: int
    accepted: list[int]

    @property
    def length(self) -> float:
        """Acceptance length: mean number of tokens a round, drafts kept plus the one from the trunk; 1 .. k+1."""
        return 1 + sum(self.accepted) / max(self.rounds, 1)

    @property
    def rates(self) -> list[float]:
        """Share of the rounds in which draft 1, 2, ... was kept; draft i only can be if all before it are."""
        return [count / max(self.rounds, 1) for count in self.accepted]


@torch.inference_mode()
def generate_speculative(
    model: NemotronH,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_draft_tokens: int = 2,
    temperature: float = 0.0,
    stop_token_ids: Sequence[int] = (11,),
    generator: torch.Generator | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[Generation, Acceptance]:
    """Continue each prompt by up to `max_new_tokens` tokens, several a pass; completions as `generate` returns them.

    Args:
        model: with a multi-token prediction block; put into eval mode for the call and restored after it.
        prompts: non-empty lists of token ids.
        num_draft_tokens: k, drafts a round; may exceed the `mtp_num_layers` of training.
        temperature: 0 is greedy. Above, tokens are distributed as `generate` draws them at that temperature.
        stop_token_ids: end a row after one of these.
        generator: source of randomness; the same generator state gives the same tokens.
        poll: called before every round; raises to stop (a signal arrived).

    Raises:
        ValueError: a model without the block, an empty prompt, less than one draft, a negative temperature.
    """
    if model.mtp is None:
        raise ValueError(
            "the model has no multi-token prediction block (num_nextn_predict_layers 0): nothing can draft"
        )
    if num_draft_tokens < 1 or temperature < 0:
        raise ValueError(
            f"num_draft_tokens >= 1 and temperature >= 0 expected, got {num_draft_tokens} and {temperature}"
        )
    total, k = len(prompts), num_draft_tokens
    result = Generation([[] for _ in range(total)], [[] for _ in range(total)], [False] * total, [0.0] * total)
    acceptance = Acceptance(0, [0] * k)
    device = model.lm_head.weight.device
    input_ids_BL, is_token_BL = pad_left(prompts, device)
    if not prompts or max_new_tokens <= 0:
        return result, acceptance
    stops = set(stop_token_ids)
    capacity = input_ids_BL.shape[1] + max_new_tokens + k  # a row that wants one more token still verifies k drafts
    trunk, drafter = Trunk(model, is_token_BL, capacity, k), Drafter(model, is_token_BL, capacity, k)

    was_training = model.training
    if was_training:  # every module's flag: at the size of a laptop a part of what a short answer costs
        model.eval()
    try:
        # ---- read the prompts: the trunk, its first token, then the drafter, one token behind
        hidden_BLD = trunk.read(input_ids_BL)
        logits_B1V = at_least_fp32(model.lm_head(hidden_BLD[:, -1:]))
        newest_B1, _ = _draw(logits_B1V[:, 0], temperature, generator)
        rows = list(range(total))  # which prompt each live row belongs to
        live = _record(result, rows, [True] * total, newest_B1, [1] * total, logits_B1V, max_new_tokens, stops)
        next_ids_BL = shift_left(input_ids_BL, 1, is_token_BL.long(), fill=0)
        next_ids_BL[:, -1:] = newest_B1
        drafter.read(next_ids_BL, hidden_BLD)

        while any(live):
            poll()
            if live.count(False) >= COMPACT_AT * len(live):  # until then finished rows are decoded and not recorded
                keep = [i for i, alive in enumerate(live) if alive]
                rows, live = [rows[i] for i in keep], [True] * len(keep)
                newest_B1 = newest_B1[keep]
                trunk.stack.keep_rows(keep)
                drafter.keep_rows(keep)

            drafts_Bk, probs = drafter.draft(lambda logits_BV: _draw(logits_BV, temperature, generator))
            hidden_BTD, logits_BTV = trunk.extend(torch.cat([newest_B1, drafts_Bk], dim=1))
            kept, tokens_BT = _verify(drafts_Bk, probs, logits_BTV, temperature, generator)

            # ---- settle: the kept drafts, then the trunk's own token; whatever follows is ignored
            for count, alive in zip(kept, live, strict=True):
                if alive:
                    acceptance.rounds += 1
                    for depth in range(count):
                        acceptance.accepted[depth] += 1
            counts = [count + 1 for count in kept]
            live = _record(result, rows, live, tokens_BT, counts, logits_BTV, max_new_tokens, stops)
            newest_B1 = tokens_BT.gather(1, torch.tensor(kept, device=device).unsqueeze(1))
            counts = [count * alive for count, alive in zip(counts, live, strict=True)]  # at its end a row stays there
            trunk.stack.accept(counts)
            if any(live):
                drafter.settle(tokens_BT, hidden_BTD, counts)
    finally:
        for stack in (trunk.stack, drafter.stack):
            stack.steps.clear()  # they hold the stack: the memory of both comes back now
        if was_training:
            model.train()
    for row, tokens in enumerate(result.tokens):
        result.finished[row] = bool(tokens) and tokens[-1] in stops
        result.entropies[row] /= max(len(tokens), 1)
    return result, acceptance


class Trunk:
    """The model without its multi-token prediction block, with a cache: reads the newest token and k drafts at once."""

    def __init__(self, model: NemotronH, is_token_BL: Tensor, capacity: int, num_drafts: int) -> None:
        self.model, norm_f = model, model.backbone.norm_f
        self.stack = CachedStack(model.blocks(), model.config, is_token_BL, capacity, num_drafts + 1)
        self.embedding = model.backbone.embeddings.weight
        self.norm_f = prepare_norm(norm_f.weight, norm_f.eps)
        self.lm_head = prepare_linear(model.lm_head.weight, model.lm_head.round_input)
        self.own_dtypes = explicit_dtypes(is_token_BL.device.type)

    def read(self, input_ids_BL: Tensor) -> Tensor:
        """The prompts; returns hidden states after the final norm, [B, L, D]."""
        hidden_BLD: Tensor = self.model.backbone.norm_f(self.stack.read(F.embedding(input_ids_BL, self.embedding)))
        return hidden_BLD

    def extend(self, input_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """T further tokens a row, pending: hidden states after the final norm [B, T, D], and logits [B, T, V]."""
        with self.own_dtypes:
            hidden_BTD = self.norm_f(self.stack.extend(F.embedding(input_ids_BT, self.embedding)))
            logits_RV = at_least_fp32(self.lm_head(hidden_BTD.flatten(0, 1)))
        return hidden_BTD, logits_RV.unflatten(0, input_ids_BT.shape)


class Drafter:
    """The multi-token prediction block with a cache, one token behind the trunk's.

    hidden_BD: its output for the newest token, which the next first draft comes from.
    """

    hidden_BD: Tensor

    def __init__(self, model: NemotronH, is_token_BL: Tensor, capacity: int, num_drafts: int) -> None:
        assert model.mtp is not None
        self.mtp, self.num_drafts = model.mtp, num_drafts
        blocks, config = self.mtp.blocks(), model.config
        config = replace(config, hybrid_override_pattern=config.mtp_hybrid_override_pattern)
        self.stack = CachedStack(blocks, config, is_token_BL, capacity, num_drafts + 1)
        self.embedding = model.backbone.embeddings.weight
        first, last = blocks[0], blocks[-1]
        self.both_norms = prepare_norm(torch.stack([first.enorm.weight, first.hnorm.weight]), first.enorm.eps)
        self.eh_proj = prepare_linear(first.eh_proj.weight)
        self.final_norm = prepare_norm(last.final_layernorm.weight, last.final_layernorm.eps)
        self.lm_head = prepare_linear(model.lm_head.weight, model.lm_head.round_input)
        self.own_dtypes = explicit_dtypes(is_token_BL.device.type)

    def read(self, next_ids_BL: Tensor, hidden_BLD: Tensor) -> None:
        """The prompts: the trunk's hidden state of each token, with the token after it."""
        x_BLD = self.stack.read(self.mtp.merge(F.embedding(next_ids_BL, self.embedding), hidden_BLD))
        self.hidden_BD = self.mtp.finish(x_BLD[:, -1])

    def draft(self, draw: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """Drafts [B, k], and the distribution that each was drawn from, k times [B, V]; greedy ones come from none.

        `draw` gives one of each, [B, 1] and [B, V], for logits [B, V].
        """
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        hidden_BD = self.hidden_BD
        with self.own_dtypes:
            for depth in range(self.num_drafts):
                if depth > 0:  # the block goes on from its own output
                    hidden_BD = self.final_norm(self._extend(drafts[-1], hidden_BD.unsqueeze(1)).squeeze(1))
                draft_B1, probs_BV = draw(at_least_fp32(self.lm_head(hidden_BD)))
                drafts.append(draft_B1)
                probs.append(probs_BV)
        self.stack.accept([0] * len(hidden_BD))
        return torch.cat(drafts, dim=1), probs

    def settle(self, tokens_BT: Tensor, hidden_BTD: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts` tokens of each row, now with the trunk's hidden states instead of the block's own."""
        most = max(counts)
        with self.own_dtypes:
            x_BTD = self._extend(tokens_BT[:, :most], hidden_BTD[:, :most])
            last_B = torch.tensor(counts, device=x_BTD.device) - 1
            self.hidden_BD = self.final_norm(x_BTD[torch.arange(len(counts), device=x_BTD.device), last_B])
        self.stack.accept(counts)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop every row but `rows`."""
        self.stack.keep_rows(rows)
        self.hidden_BD = self.hidden_BD[rows]

    def _extend(self, tokens_BT: Tensor, hidden_BTD: Tensor) -> Tensor:
        both_BT2D = torch.stack([F.embedding(tokens_BT, self.embedding), hidden_BTD], dim=-2)
        merged_RD = self.eh_proj(self.both_norms(both_BT2D).flatten(0, 1).flatten(1))
        return self.stack.extend(merged_RD.unflatten(0, tokens_BT.shape))


def _draw(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One token a row [B, 1], and the distribution that it was drawn from [B, V]; greedy, the likeliest, from none."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True), logits_BV
    probs_BV = torch.softmax(logits_BV / temperature, dim=-1)
    return draw(probs_BV, uniforms(probs_BV, generator)), probs_BV


def _verify(
    drafts_Bk: Tensor,
    probs: Sequence[Tensor],
    logits_BTV: Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[list[int], Tensor]:
    """How many drafts of each row are kept, and the tokens [B, T] that begin with those and the one that follows them.

    T = k + 1. Greedy: the drafts up to the first that is not the trunk's choice, then that choice. Otherwise draft x,
    drawn with probability q(x), is kept as `keep_drafts` says, and the token that follows is drawn from what it leaves.
    """
    if temperature == 0:
        choice_BT = logits_BTV.argmax(-1)
        kept_B = (drafts_Bk == choice_BT[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        return kept_B.tolist(), choice_BT
    p_BTV, q_BkV = torch.softmax(logits_BTV / temperature, dim=-1), torch.stack(list(probs), dim=1)
    uniform_Bk = torch.rand(drafts_Bk.shape, generator=generator, dtype=p_BTV.dtype, device=p_BTV.device)
    kept_B, remaining_BV = keep_drafts(drafts_Bk, p_BTV, q_BkV, uniform_Bk)
    tokens_BT = F.pad(drafts_Bk, (0, 1))
    tokens_BT.scatter_(1, kept_B.unsqueeze(1), draw(remaining_BV, uniforms(remaining_BV, generator)))
    return kept_B.tolist(), tokens_BT


def keep_drafts(drafts_Bk: Tensor, p_BTV: Tensor, q_BkV: Tensor, uniform_Bk: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are kept [B], and what the token behind them is drawn from, not normalised [B, V].

    Draft x, drawn with probability q(x), is kept with probability min(1, p(x) / q(x)); at the first that is not, the
    token is drawn from max(p - q, 0), and behind k kept ones from p (Leviathan et al., algorithm 1). What is kept or
    drawn is then distributed as p, whatever q is.
    """
    row_B = torch.arange(len(drafts_Bk), device=drafts_Bk.device)
    p_Bk, q_Bk = (t.gather(-1, drafts_Bk.unsqueeze(-1)).squeeze(-1) for t in (p_BTV[:, :-1], q_BkV))
    kept_B = (uniform_Bk * q_Bk < p_Bk).long().cumprod(dim=1).sum(dim=1)
    # q = 0 behind the last draft: what remains there is p itself.
    p_BV, q_BV = p_BTV[row_B, kept_B], F.pad(q_BkV, (0, 0, 0, 1))[row_B, kept_B]
    remaining_BV = (p_BV - q_BV).clamp_(min=0)
    # Nothing remains where p = q up to rounding; such a draft is all but never refused.
    return kept_B, torch.where(remaining_BV.sum(-1, keepdim=True) > 0, remaining_BV, p_BV)


def _record(
    result: Generation,
    rows: list[int],
    live: list[bool],
    tokens_BT: Tensor,
    counts: list[int],
    logits_BTV: Tensor,
    max_new_tokens: int,
    stops: set[int],
) -> list[bool]:
    """Append the first `counts` tokens of each live row, up to a stop token or the limit. Returns which go on."""
    logp_BTV = torch.log_softmax(logits_BTV, dim=-1)
    logprobs = logp_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1).tolist()
    entropies = logp_BTV.exp().mul_(logp_BTV).sum(-1).neg_().tolist()
    goes_on = list(live)
    for i, (tokens, count) in enumerate(zip(tokens_BT.tolist(), counts, strict=True)):
        row = rows[i]
        for token, logprob, entropy in zip(tokens[:count], logprobs[i], entropies[i], strict=False):
            if not goes_on[i]:
                break
            result.tokens[row].append(token)
            result.logprobs[row].append(logprob)
            result.entropies[row] += entropy
            goes_on[i] = token not in stops and len(result.tokens[row]) < max_new_tokens
    return goes_on
