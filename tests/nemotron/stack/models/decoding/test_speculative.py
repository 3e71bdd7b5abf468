"""Speculative decoding gives what plain decoding gives, and drafts what the formula says, whatever is accepted."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding import speculative
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.generate import generate, generate_tokens
from nemotron.stack.models.decoding.multi_token import CachedStack
from nemotron.stack.models.decoding.speculative import Drafter, generate_speculative
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.training.losses import mtp_loss, next_token_loss

WITH_MTP: dict[str, Any] = {"num_nextn_predict_layers": 1, "dtype": torch.float64}
PATTERNS = ["M", "*", "E", "-", "MEM*EME", "M-M*-"]  # without attention, without mamba, with both


def prompts_of(seed: int, count: int = 5, vocab: int = 61) -> list[list[int]]:
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=source).tolist()
    return [torch.randint(vocab, (length,), generator=source).tolist() for length in lengths]


# ------------------------------------------------------------------------------------------------- same as plain greedy


@pytest.mark.parametrize(
    ("pattern", "mtp_pattern"), [*((pattern, "*E") for pattern in PATTERNS), ("MEM*EME", "M-"), ("MEM*EME", "-")]
)
def test_greedy_tokens_equal_plain_decoding(
    make_model: Callable[..., NemotronH], pattern: str, mtp_pattern: str
) -> None:
    for seed, vocab, stops in ((0, 61, ()), (1, 6, (1,)), (2, 3, ())):  # few tokens: drafts are often right by chance
        model = make_model(pattern, seed, vocab_size=vocab, mtp_hybrid_override_pattern=mtp_pattern, **WITH_MTP)
        prompts = prompts_of(seed, vocab=vocab)
        expected = generate(model, prompts, 10, temperature=0, stop_token_ids=stops)
        for k in (1, 3, 5):
            out, acceptance = generate_speculative(model, prompts, 10, k, stop_token_ids=stops)
            assert out.tokens == expected.tokens, (seed, stops, k)
            assert out.finished == expected.finished
            assert len(acceptance.accepted) == k and 1 <= acceptance.length <= k + 1


def oracle(model: NemotronH, prompts: list[list[int]], new: int, right: float, seed: int) -> Callable[..., Any]:
    """In the place of `Drafter.draft`: each draft is the plain greedy token with probability `right`, else another."""
    source = torch.Generator().manual_seed(seed)
    known = [prompt + tokens for prompt, tokens in zip(
        prompts, generate(model, prompts, new + 6, temperature=0, stop_token_ids=()).tokens, strict=True
    )]  # fmt: skip

    width = max(map(len, prompts))
    row_of = {width - len(prompt): row for row, prompt in enumerate(prompts)}  # rows differ in their padding

    def draft(drafter: Drafter, *_: Any) -> tuple[Tensor, list[Tensor]]:
        out, k = [], drafter.num_drafts
        padding = (width - drafter.stack.prompt_mask_BL.sum(1)).tolist()
        for slots, padded in zip(drafter.stack.lengths, padding, strict=True):
            newest = slots - padded  # the drafter has read as many tokens, each with the one after it
            tokens = known[row_of[padded]][newest + 1 : newest + 1 + k]
            right_k = (torch.rand(k, generator=source) < right).tolist()
            out.append([token if ok else (token + 1) % 61 for token, ok in zip(tokens, right_k, strict=True)])
        return torch.tensor(out), []

    return draft


@pytest.mark.parametrize("pattern", ["M", "*", "MEM*EME-"])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_any_mix_of_right_and_wrong_drafts_gives_the_same_tokens(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, pattern: str, right: float
) -> None:
    """Every number of accepted drafts, side by side and one after another, with rows that end in between."""
    model = make_model(pattern, 1, **WITH_MTP)
    prompts = [list(range(3, 4 + n)) for n in range(9)]  # unequal lengths: rows are told apart by them
    for k, stops in itertools.product((1, 4), ((), tuple(range(0, 61, 6)))):
        expected = generate(model, prompts, 17, temperature=0, stop_token_ids=stops)
        monkeypatch.setattr(Drafter, "draft", oracle(model, prompts, 17, right, seed=k))
        out, acceptance = generate_speculative(model, prompts, 17, k, stop_token_ids=stops)
        assert out.tokens == expected.tokens and out.finished == expected.finished
        for one, other in zip(out.logprobs, expected.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
        assert out.entropies == pytest.approx(expected.entropies, abs=1e-6)
        if not stops and right in (0.0, 1.0):
            assert acceptance.rates == [right] * k and acceptance.length == 1 + right * k
            assert acceptance.rounds == 9 * -(-16 // (1 + int(right) * k))  # the first token needs no round
        if stops:
            assert len({len(tokens) for tokens in out.tokens}) > 3


# ----------------------------------------------------------------------------------------------------------- the drafts


@torch.no_grad()
def slow_drafts(model: NemotronH, tokens: list[int], k: int) -> list[int]:
    """Drafts after `tokens`, the whole sequence read anew for each: no cache, no padding, no batch."""
    mtp, embedding = model.mtp, model.backbone.embeddings
    assert mtp is not None
    trunk_hidden, _ = model.hidden_states(torch.tensor([tokens[:-1]]), None)  # the newest token has no hidden state yet
    hidden, next_ids, drafts = trunk_hidden, tokens[1:], list[int]()
    for _ in range(k):
        x = mtp.merge(embedding(torch.tensor([next_ids])), hidden)
        for block in mtp.blocks():
            x, _ = block(x)
        out = mtp.finish(x)[:, -1:]
        drafts.append(int(model.lm_head(out).argmax()))
        hidden, next_ids = torch.cat([hidden, out], dim=1), next_ids + drafts[-1:]
    return drafts


@pytest.mark.parametrize(("pattern", "mtp_pattern"), [("M", "*E"), ("*", "M-"), ("MEM*E-", "*E"), ("MEM*E-", "M-")])
def test_drafts_equal_those_of_the_whole_sequence(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, pattern: str, mtp_pattern: str
) -> None:
    """Output equality says nothing about the drafter's cache: a wrong one only drafts worse."""
    model = make_model(pattern, 4, vocab_size=5, mtp_hybrid_override_pattern=mtp_pattern, **WITH_MTP)
    prompts, k, new = prompts_of(4, vocab=5), 4, 14
    rounds: list[tuple[list[list[int]], list[int]]] = []
    verify = speculative._verify

    def recording(drafts: Tensor, *arguments: Any) -> tuple[list[int], Tensor]:
        kept, tokens = verify(drafts, *arguments)
        rounds.append((drafts.tolist(), kept))
        return kept, tokens

    monkeypatch.setattr(speculative, "_verify", recording)
    monkeypatch.setattr(speculative, "COMPACT_AT", 2.0)  # rows stay where they are
    out, acceptance = generate_speculative(model, prompts, new, k, stop_token_ids=())
    settled = [1] * len(prompts)
    for drafts, kept in rounds:
        for row, prompt in enumerate(prompts):
            if settled[row] < new:
                assert drafts[row] == slow_drafts(model, prompt + out.tokens[row][: settled[row]], k)
                settled[row] += kept[row] + 1
    assert acceptance.length > 1.1


def test_acceptance_counts_rounds_and_kept_drafts(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("M", **WITH_MTP)
    kept_by_round = iter([[3, 0], [1, 2], [0, 3]])  # 1 + 4 + 2 + 1 = 8 and 1 + 1 + 3 + 4 = 9 tokens

    def scripted(drafts: Tensor, *_: Any) -> tuple[list[int], Tensor]:
        return next(kept_by_round), torch.full((2, 4), 7)

    monkeypatch.setattr(speculative, "_verify", scripted)
    monkeypatch.setattr(speculative, "COMPACT_AT", 2.0)
    out, acceptance = generate_speculative(model, [[1], [2]], 8, 3, stop_token_ids=())
    assert [len(tokens) for tokens in out.tokens] == [8, 8]
    assert acceptance.rounds == 6 and acceptance.accepted == [4, 3, 2]
    assert acceptance.length == 1 + 9 / 6 and acceptance.rates == [4 / 6, 3 / 6, 2 / 6]


# ----------------------------------------------------------------------------------------------- reading several tokens


@pytest.mark.parametrize(
    "dimensions",
    [{}, {"conv_kernel": 1}, {"conv_kernel": 6}, {"n_groups": 1}, {"n_groups": 4}, {"moe_latent_size": 7}],
    ids=str,
)
@pytest.mark.parametrize("reads", [[5], [1, 3, 1]], ids=str)
def test_accepted_tokens_leave_the_states_of_single_steps(
    make_model: Callable[..., NemotronH], dimensions: dict[str, Any], reads: list[int]
) -> None:
    """Outputs of 5 tokens read at once, or in parts, then states after 0 .. 5 of them, against single steps."""
    model = make_model("ME*M-", 5, **(WITH_MTP | dimensions))
    source = torch.Generator().manual_seed(6)
    ids, more = torch.randint(61, (6, 4), generator=source), torch.randint(61, (6, 5), generator=source)
    is_token = torch.ones(6, 4, dtype=torch.bool)
    is_token[1, :3] = False
    embedding = model.backbone.embeddings
    with torch.no_grad():
        stack = CachedStack(model.blocks(), model.config, is_token, 10, 5)
        stack.read(embedding(ids))
        parts = [stack.extend(embedding(part)) for part in more.split(reads, dim=1)]
        out = model.lm_head(model.backbone.norm_f(torch.cat(parts, dim=1)))
        stack.accept(range(6))
        assert stack.lengths == [4, 5, 6, 7, 8, 9]

        logits, cache = prefill(model, ids, is_token, 10)
        for count in range(6):
            singles = [state for state in cache.layers if isinstance(state, MambaCache)]
            for states, single in zip(stack.pending_states, singles, strict=True):
                for position, conv in enumerate(single.conv):
                    torch.testing.assert_close(states.conv[count, position], conv[count], atol=1e-12, rtol=1e-12)
                torch.testing.assert_close(states.ssm[0, count], single.ssm[count], atol=1e-12, rtol=1e-12)
            if count < 5:
                logits = step(model, more[:, count], cache)
                torch.testing.assert_close(out[:, count], logits, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dt_bias", [-20.0, 20.0])
def test_extreme_step_sizes_stay_finite_and_right(make_model: Callable[..., NemotronH], dt_bias: float) -> None:
    model = make_model("M", **WITH_MTP)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, dt_bias)
    prompts = prompts_of(1)
    out, _ = generate_speculative(model, prompts, 10, 4, stop_token_ids=())
    assert out.tokens == generate(model, prompts, 10, temperature=0, stop_token_ids=()).tokens


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(("temperature", "k"), [(1.0, 2), (0.6, 3)])
def test_sampled_tokens_are_distributed_as_the_model_says(
    make_model: Callable[..., NemotronH], temperature: float, k: int
) -> None:
    """Chi-square of all 4^3 continuations against the products of the model's own probabilities."""
    model = make_model("M*E", 3, vocab_size=4, **WITH_MTP)
    prompt, samples = [2, 0, 1], 6000
    paths = list(itertools.product(range(4), repeat=3))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(path) for path in paths])).logits[:, 2:5]
    p_path = torch.softmax(logits / temperature, -1).gather(-1, torch.tensor(paths)[:, :, None]).prod(1)[:, 0]
    assert p_path.sum().item() == pytest.approx(1)

    out, acceptance = generate_speculative(
        model, [prompt] * samples, 3, k, temperature, stop_token_ids=(), generator=torch.Generator().manual_seed(0)
    )
    assert 0.2 < acceptance.rates[0] < 0.95  # both branches of the rule are taken
    counts = torch.zeros(len(paths), dtype=torch.float64)
    for tokens in out.tokens:
        counts[paths.index(tuple(tokens))] += 1
    common = p_path * samples >= 5  # the usual condition of the test; the rest is one cell
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([p_path[common], p_path[~common].sum()[None]]) * samples
    chi2 = ((observed - expected).square() / expected.clamp(min=1e-9)).sum().item()
    freedom = int(common.sum())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5, (chi2, freedom)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_several_rounds_at_temperature_1_are_distributed_as_plain_sampling(
    make_model: Callable[..., NemotronH], seed: int
) -> None:
    """Chi-square of all 3^6 continuations, 20,000 samples; a round settles at most 4 tokens of the 6, most fewer.

    The same of as many that `generate` draws checks the test, and so does a twentieth of wrong last tokens in those.
    """
    model = make_model("M*E", 3 + seed, vocab_size=3, **WITH_MTP)
    prompt, samples, length = [2, 0, 1], 20_000, 6
    paths = list(itertools.product(range(3), repeat=length))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(path) for path in paths])).logits[:, 2 : 2 + length]
    p_path = torch.softmax(logits, -1).gather(-1, torch.tensor(paths)[:, :, None]).prod(1)[:, 0]

    def p_value(tokens: list[list[int]]) -> float:
        places = torch.tensor(tokens) @ 3 ** torch.arange(length - 1, -1, -1)
        counts = torch.bincount(places, minlength=len(paths)).double()
        common = p_path * samples >= 5  # the usual condition of the test; the rest is one cell
        observed = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([p_path[common], p_path[~common].sum()[None]]) * samples
        chi2, freedom = ((observed - expected).square() / expected.clamp(min=1e-9)).sum(), common.sum()
        return torch.special.gammaincc(freedom / 2, chi2 / 2).item()

    source = torch.Generator().manual_seed(seed)
    out, acceptance = generate_speculative(model, [prompt] * samples, length, 3, 1.0, (), source)
    assert 0.1 < acceptance.rates[2] < acceptance.rates[0] < 0.95  # every branch of the rule is taken
    assert p_value(out.tokens) > 1e-3
    plain = generate(model, [prompt] * samples, length, stop_token_ids=(), generator=source)
    assert p_value(plain.tokens) > 1e-3
    assert p_value([[*tokens[:-1], (tokens[-1] + (i % 20 == 0)) % 3] for i, tokens in enumerate(plain.tokens)]) < 1e-6


def test_the_same_generator_state_gives_the_same_tokens(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M*E", **WITH_MTP)

    def draw(seed: int) -> list[list[int]]:
        source = torch.Generator().manual_seed(seed)
        return generate_speculative(model, prompts_of(0), 10, 3, 1.0, (), source)[0].tokens

    torch.manual_seed(0)
    first = draw(4)
    torch.manual_seed(1)
    assert draw(4) == first and draw(5) != first


def counting(rows: int, length: int, source: torch.Generator) -> Tensor:
    """Rows that count in steps of 1 to 5, modulo 29: every token follows from the two before it."""
    start, step = torch.randint(29, (rows, 1), generator=source), torch.randint(1, 6, (rows, 1), generator=source)
    return (start + step * torch.arange(length)) % 29


@pytest.mark.slow
def test_training_makes_the_drafts_right() -> None:
    """k = 2: close to 3 tokens a round with the loss of multi-token prediction, close to 1 without."""
    lengths = {}
    for depths in (0, 2):
        torch.manual_seed(0)
        source = torch.Generator().manual_seed(0)
        model = NemotronH(NemotronHConfig(
            hybrid_override_pattern="M*-", vocab_size=29, hidden_size=48, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, mamba_num_heads=4, mamba_head_dim=12, ssm_state_size=8, n_groups=1, intermediate_size=96,
            n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
            num_nextn_predict_layers=1, initializer_range=0.1,
        )).train()  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for _ in range(150):
            ids = counting(16, 21, source)
            out = model(ids[:, :-1], mtp_depths=depths)
            loss = next_token_loss(out.logits, ids[:, 1:])
            if depths:
                loss = loss + 0.3 * mtp_loss(out.mtp_logits, ids[:, 1:]) + 1e-4 * out.load_balancing_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_expert_bias()
        prompts = counting(40, 6, source).tolist()
        text, acceptance = generate_speculative(model.eval(), prompts, 24, 2, stop_token_ids=())
        plain = generate(model, prompts, 24, temperature=0, stop_token_ids=())
        assert text.tokens == plain.tokens
        lengths[depths] = acceptance.length
    assert lengths[2] > 2.2 and lengths[0] < 1.3, lengths


# ---------------------------------------------------------------------------------------------------------------- edges


def test_a_poll_that_raises_stops_generation_and_restores_training_mode(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("ME", **WITH_MTP).train()
    polls = iter([None, None])  # the third call raises StopIteration
    with pytest.raises(StopIteration):
        generate_speculative(model, prompts_of(2), 50, 2, stop_token_ids=(), poll=lambda: next(polls))
    assert model.training and all(moe.gate.expert_load.sum() == 0 for moe in model.moe_blocks())


def test_under_bf16_autocast_the_first_tokens_are_close_to_fp32(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M*-M", num_nextn_predict_layers=1)  # without a trunk router, whose choices bf16 would tip
    prompts = prompts_of(2)
    exact = generate(model, prompts, 6, temperature=0, stop_token_ids=())
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = generate_speculative(model, prompts, 6, 3, stop_token_ids=())
    compared = 0
    for tokens, logprobs, want, wanted in zip(out.tokens, out.logprobs, exact.tokens, exact.logprobs, strict=True):
        for i in range(6):
            if tokens[: i + 1] == want[: i + 1]:  # after a near tie that was tipped, texts part
                assert logprobs[i] == pytest.approx(wanted[i], abs=0.3)
                compared += 1
    assert compared >= 15


def test_nothing_to_do(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("M", **WITH_MTP)
    assert generate_speculative(model, [], 5)[0].tokens == []
    out, acceptance = generate_speculative(model, [[1], [2]], 0)
    assert out.tokens == [[], []] and acceptance.length == 1 and acceptance.rates == [0, 0]
    assert [len(tokens) for tokens in generate_speculative(model, [[1], [2]], 1)[0].tokens] == [1, 1]


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ([[1], []], {}, "prompt"),
        ([[1]], {"temperature": -0.1}, "-0.1"),
        ([[1]], {"num_draft_tokens": 0}, "num_draft_tokens"),
    ],
)
def test_bad_settings_are_refused(
    make_model: Callable[..., NemotronH], prompts: list[list[int]], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        generate_speculative(make_model("M", **WITH_MTP), prompts, 4, **settings)


def test_a_model_without_the_block_is_refused(make_model: Callable[..., NemotronH]) -> None:
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        generate_speculative(make_model("M"), [[1]], 4)


def test_no_memory_outlives_a_generation(make_model: Callable[..., NemotronH]) -> None:
    """What decodes holds the cache, and the cache what decodes: only the garbage collector, which does not see a GPU's
    memory, would take both."""
    model, calls = make_model("M*E-", **WITH_MTP), 0

    def poll() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # a step was decoded by then
            raise InterruptedError

    gc.collect()
    gc.disable()
    try:
        generate(model, [[1, 2, 3]], 4, stop_token_ids=())
        generate_speculative(model, [[1, 2, 3]], 4, 2, stop_token_ids=())
        list(generate_tokens(model, [1, 2, 3], 4, 0, (), torch.Generator()))
        with pytest.raises(InterruptedError):
            generate(model, [[1, 2, 3]], 4, stop_token_ids=(), poll=poll)
        left = [type(each).__name__ for each in gc.get_objects() if type(each) in (Cache, CachedStack)]
    finally:
        gc.enable()
    assert left == []
