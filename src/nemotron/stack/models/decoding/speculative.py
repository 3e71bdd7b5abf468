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

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.decoding.generate import COMPACT_AT, Generation, pad_left
from nemotron.stack.models.decoding.multi_token import CachedStack
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.mtp import MTP, shift_left
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


@torch.no_grad()
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
    mtp, total, k = model.mtp, len(prompts), num_draft_tokens
    result = Generation([[] for _ in range(total)], [[] for _ in range(total)], [False] * total, [0.0] * total)
    acceptance = Acceptance(0, [0] * k)
    device = model.lm_head.weight.device
    input_ids_BL, is_token_BL = pad_left(prompts, device)
    if not prompts or max_new_tokens <= 0:
        return result, acceptance
    stops, embedding = set(stop_token_ids), model.backbone.embeddings

    was_training = model.training
    model.eval()
    try:
        # ---- read the prompts: the trunk, its first token, then the drafter, one token behind
        capacity = input_ids_BL.shape[1] + max_new_tokens + k  # a row that wants one more token still verifies k drafts
        trunk = CachedStack(model.blocks(), model.config, is_token_BL, capacity)
        hidden_BLD = model.backbone.norm_f(trunk.read(embedding(input_ids_BL)))
        logits_BTV = model.lm_head(hidden_BLD[:, -1:])
        newest_B = _draw(logits_BTV[:, 0], temperature, generator)
        rows = list(range(total))  # which prompt each live row belongs to
        ones_B = torch.ones_like(newest_B)
        live = _record(result, rows, [True] * total, newest_B.unsqueeze(1), ones_B, logits_BTV, max_new_tokens, stops)

        drafter = CachedStack(mtp.blocks(), _block_config(model.config), is_token_BL, capacity)
        next_ids_BL = shift_left(input_ids_BL, 1, is_token_BL.long(), fill=0)
        next_ids_BL[:, -1] = newest_B
        drafter_BD = mtp.finish(drafter.read(mtp.merge(embedding(next_ids_BL), hidden_BLD)))[:, -1]

        while any(live):
            poll()
            if live.count(False) >= COMPACT_AT * len(live):  # until then finished rows are decoded and not recorded
                keep = [i for i, alive in enumerate(live) if alive]
                index = torch.tensor(keep, device=device)
                rows, live = [rows[i] for i in keep], [True] * len(keep)
                newest_B, drafter_BD = newest_B[index], drafter_BD[index]
                trunk.keep_rows(index)
                drafter.keep_rows(index)

            drafts_Bk, draft_logits_BkV = _draft(model, mtp, drafter, drafter_BD, k, temperature, generator)

            read_BT = torch.cat([newest_B.unsqueeze(1), drafts_Bk], dim=1)
            hidden_BTD = model.backbone.norm_f(trunk.extend(embedding(read_BT)))
            logits_BTV = model.lm_head(hidden_BTD)
            kept_B, newest_B = _verify(drafts_Bk, draft_logits_BkV, logits_BTV, temperature, generator)

            # ---- settle: the kept drafts, then the trunk's own token; whatever follows is ignored
            for kept, alive in zip(kept_B.tolist(), live, strict=True):
                if alive:
                    acceptance.rounds += 1
                    for depth in range(kept):
                        acceptance.accepted[depth] += 1
            tokens_BT = torch.cat([drafts_Bk, newest_B.unsqueeze(1)], dim=1)
            tokens_BT.scatter_(1, kept_B.unsqueeze(1), newest_B.unsqueeze(1))
            live = _record(result, rows, live, tokens_BT, kept_B + 1, logits_BTV, max_new_tokens, stops)
            count_B = (kept_B + 1) * torch.tensor(live, device=device)  # rows at their end stay where they are
            trunk.accept(count_B)
            # The drafter reads the settled tokens again, now with the trunk's hidden states instead of its own.
            out_BTD = mtp.finish(drafter.extend(mtp.merge(embedding(tokens_BT), hidden_BTD)))
            drafter.accept(count_B)
            drafter_BD = out_BTD[torch.arange(len(rows), device=device), kept_B]
    finally:
        model.train(was_training)
    for row, tokens in enumerate(result.tokens):
        result.finished[row] = bool(tokens) and tokens[-1] in stops
        result.entropies[row] /= max(len(tokens), 1)
    return result, acceptance


def _draft(
    model: NemotronH,
    mtp: MTP,
    drafter: CachedStack,
    hidden_BD: Tensor,
    num_drafts: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Drafts [B, k] and the logits they come from [B, k, V], given the drafter's output for the newest token."""
    ahead = drafter.fork()
    drafts: list[Tensor] = []
    logits: list[Tensor] = []
    for depth in range(num_drafts):
        if depth > 0:
            merged_B1D = mtp.merge(model.backbone.embeddings(drafts[-1]).unsqueeze(1), hidden_BD.unsqueeze(1))
            hidden_BD = mtp.finish(ahead.extend(merged_B1D)).squeeze(1)
            ahead.accept(torch.ones_like(drafts[-1]))
        logits.append(model.lm_head(hidden_BD))
        drafts.append(_draw(logits[-1], temperature, generator))
    return torch.stack(drafts, dim=1), torch.stack(logits, dim=1)


def _draw(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token a row: the likeliest, or one drawn at a temperature."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    return torch.multinomial(_probabilities(logits_BV, temperature), 1, generator=generator).squeeze(-1)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(at_least_fp32(logits) / temperature, dim=-1)


def _verify(
    drafts_Bk: Tensor,
    draft_logits_BkV: Tensor,
    logits_BTV: Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are kept, [B], and the token that follows them, [B]. T = k + 1.

    Greedy: the drafts up to the first that is not the trunk's choice, then that choice. Otherwise draft x, drawn with
    probability q(x), is kept with probability min(1, p(x) / q(x)); at the first that is not, the token is drawn from
    max(p - q, 0) normalised, and behind k kept ones from p (Leviathan et al., algorithm 1). What is kept or drawn is
    then distributed as p, whatever q is.
    """
    num_rows, num_drafts = drafts_Bk.shape
    row_B = torch.arange(num_rows, device=drafts_Bk.device)
    if temperature == 0:
        choice_BT = logits_BTV.argmax(-1)
        kept_B = (drafts_Bk == choice_BT[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        return kept_B, choice_BT[row_B, kept_B]
    p_BTV, q_BkV = _probabilities(logits_BTV, temperature), _probabilities(draft_logits_BkV, temperature)
    p_Bk, q_Bk = (t[:, :num_drafts].gather(-1, drafts_Bk.unsqueeze(-1)).squeeze(-1) for t in (p_BTV, q_BkV))
    uniform_Bk = torch.rand(p_Bk.shape, generator=generator, dtype=p_Bk.dtype, device=p_Bk.device)
    kept_B = (uniform_Bk * q_Bk < p_Bk).long().cumprod(dim=1).sum(dim=1)
    # q = 0 behind the last draft: what remains there is p itself.
    remaining_BTV = (p_BTV - F.pad(q_BkV, (0, 0, 0, 1))).clamp(min=0)
    remaining_BV = remaining_BTV[row_B, kept_B]
    # Nothing remains where p = q up to rounding; such a draft is all but never refused.
    remaining_BV = torch.where(remaining_BV.sum(-1, keepdim=True) > 0, remaining_BV, p_BTV[row_B, kept_B])
    return kept_B, torch.multinomial(remaining_BV, 1, generator=generator).squeeze(-1)


def _record(
    result: Generation,
    rows: list[int],
    live: list[bool],
    tokens_BT: Tensor,
    count_B: Tensor,
    logits_BTV: Tensor,
    max_new_tokens: int,
    stops: set[int],
) -> list[bool]:
    """Append the first `count` tokens of each live row, up to a stop token or the limit. Returns which go on."""
    logp_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    logprobs = logp_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1).tolist()
    entropies = (-(logp_BTV.exp() * logp_BTV).sum(-1)).tolist()
    goes_on = list(live)
    for i, (tokens, count) in enumerate(zip(tokens_BT.tolist(), count_B.tolist(), strict=True)):
        row = rows[i]
        for token, logprob, entropy in zip(tokens[:count], logprobs[i], entropies[i], strict=False):
            if not goes_on[i]:
                break
            result.tokens[row].append(token)
            result.logprobs[row].append(logprob)
            result.entropies[row] += entropy
            goes_on[i] = token not in stops and len(result.tokens[row]) < max_new_tokens
    return goes_on


def _block_config(config: NemotronHConfig) -> NemotronHConfig:
    """A config whose pattern is that of the multi-token prediction block: what its cache is shaped by."""
    return replace(config, hybrid_override_pattern=config.mtp_hybrid_override_pattern)
