"""Sampling against full forward passes and against a model whose distribution is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import generate as generate_module
from nemotron.stack.models.decoding.generate import ReasoningBudget, generate, generate_tokens

PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [20, 21]]


@pytest.fixture
def model(make_model: Callable[..., NemotronH]) -> NemotronH:
    return make_model("MEM*E-", seed=5)


@pytest.fixture
def known(make_model: Callable[..., NemotronH]) -> NemotronH:
    """A model that draws token 0..4 with probabilities .4, .3, .2, .06, .04 whatever came before, and no other."""
    model = make_model("-")
    with torch.no_grad():
        model.backbone.embeddings.weight.fill_(1.0)
        model.blocks()[0].mixer.down_proj.weight.zero_()
        model.backbone.norm_f.weight.fill_(1.0)  # the hidden state is all ones
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04] + [1e-30] * 56).log()
    return model


def greedy_by_full_forwards(model: NemotronH, prompt: list[int], steps: int, stops: tuple[int, ...]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stops:
                break
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_of_full_forwards(model: NemotronH) -> None:
    out = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=())
    assert out.tokens == [greedy_by_full_forwards(model, prompt, 14, ()) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in out.tokens}) == len(PROMPTS)  # the prompt matters in these weights
    assert out.finished == [False] * 4


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_and_entropies_are_those_of_the_model_itself(model: NemotronH, temperature: float) -> None:
    """At temperature 1, whatever the tokens were drawn at."""
    out = generate(model, PROMPTS, 9, temperature, stop_token_ids=(11, 30), generator=torch.Generator().manual_seed(0))
    for prompt, tokens, logprobs, entropy in zip(PROMPTS, out.tokens, out.logprobs, out.entropies, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        logp = logits - logits.logsumexp(-1, keepdim=True)
        assert logprobs == pytest.approx([logp[t, token].item() for t, token in enumerate(tokens)], abs=1e-5)
        assert entropy == pytest.approx(-(logp.exp() * logp).sum(-1).mean().item(), abs=1e-5)


def test_rows_end_after_a_stop_token(model: NemotronH) -> None:
    free = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=())
    stops = (free.tokens[0][4], free.tokens[2][7])
    out = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=stops)
    for tokens, ended, finished in zip(free.tokens, out.tokens, out.finished, strict=True):
        first = next((i for i, token in enumerate(tokens) if token in stops), None)
        assert ended == (tokens if first is None else tokens[: first + 1])  # the stop token is part of the row
        assert finished == (first is not None)
    assert all(len(p) == len(t) for p, t in zip(out.logprobs, out.tokens, strict=True))
    assert sum(out.finished) >= 2 and len({len(tokens) for tokens in out.tokens}) > 1


def test_a_large_batch_is_compacted_to_a_multiple_of_sixteen(model: NemotronH, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    step = generate_module.step
    monkeypatch.setattr(generate_module, "step", lambda m, ids, cache: (sizes.append(len(ids)), step(m, ids, cache))[1])
    stops = tuple(range(0, 61, 9))
    prompts = [[i, 2 * i % 61] for i in range(1, 61)]
    out = generate(model, prompts, 30, temperature=0, stop_token_ids=stops)
    assert sizes[0] == 60 and sizes == sorted(sizes, reverse=True)
    assert 32 in sizes and all(size % 16 == 0 for size in sizes if 16 < size < 60)
    live = [sum(len(tokens) > step for tokens in out.tokens) for step in range(1, len(sizes) + 1)]
    assert all(size >= count for size, count in zip(sizes, live, strict=True))
    monkeypatch.setattr(generate_module, "COMPACT_AT", 2.0)
    whole = generate(model, prompts, 30, temperature=0, stop_token_ids=stops)
    assert out.tokens == whole.tokens and out.finished == whole.finished
    for one, other in zip(out.logprobs, whole.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_samples_of_a_prompt_stand_together_and_each_continues_it(model: NemotronH) -> None:
    greedy = generate(model, PROMPTS, 8, temperature=0, stop_token_ids=(), samples_per_prompt=3)
    single = generate(model, PROMPTS, 8, temperature=0, stop_token_ids=())
    assert greedy.tokens == [tokens for tokens in single.tokens for _ in range(3)]
    drawn = generate(
        model, PROMPTS, 8, stop_token_ids=(), samples_per_prompt=3, generator=torch.Generator().manual_seed(1)
    )
    assert len({tuple(tokens) for tokens in drawn.tokens}) == 12
    for row, tokens in enumerate(drawn.tokens):
        prompt = PROMPTS[row // 3]
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1], -1)
        expected = logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert drawn.logprobs[row] == pytest.approx(expected.tolist(), abs=1e-5)


def test_equal_prompts_are_read_once(model: NemotronH, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand, and with the same draws as samples of one prompt."""
    first, second = PROMPTS[:2]
    greedy = generate(model, PROMPTS, 8, temperature=0, stop_token_ids=()).tokens
    read: list[int] = []
    prefill = generate_module.prefill

    def recorded(model: NemotronH, input_ids_BL: torch.Tensor, *args: object) -> object:
        read.append(len(input_ids_BL))
        return prefill(model, input_ids_BL, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(generate_module, "prefill", recorded)
    mixed = generate(model, [second, first, second, first], 8, temperature=0, stop_token_ids=()).tokens
    assert mixed == [greedy[1], greedy[0], greedy[1], greedy[0]]
    twice = generate(model, [first, first], 8, stop_token_ids=(), generator=torch.Generator().manual_seed(1))
    samples = generate(
        model, [first], 8, stop_token_ids=(), generator=torch.Generator().manual_seed(1), samples_per_prompt=2
    )
    assert twice.tokens == samples.tokens and twice.logprobs == samples.logprobs
    assert read == [2, 1, 1]


def test_the_same_generator_state_gives_the_same_tokens(model: NemotronH) -> None:
    def draw(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, 10, generator=torch.Generator().manual_seed(seed)).tokens

    torch.manual_seed(0)
    first = draw(4)
    torch.manual_seed(1)  # the global generator plays no part
    assert draw(4) == first
    assert draw(5) != first


def frequencies(model: NemotronH, temperature: float, top_p: float) -> dict[int, float]:
    out = generate(model, [[3]], 2, temperature, top_p, (), torch.Generator().manual_seed(0), samples_per_prompt=4000)
    counts = Counter(token for tokens in out.tokens for token in tokens)
    return {token: count / 8000 for token, count in counts.items()}


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.1, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (0.97, 5), (1.0, 5)]
)
def test_top_p_keeps_the_smallest_nucleus(known: NemotronH, top_p: float, nucleus: int) -> None:
    """Cumulated: .4, .7, .9, .96, 1. Within the nucleus the proportions stay."""
    kept = [0.4, 0.3, 0.2, 0.06, 0.04][:nucleus]
    drawn = frequencies(known, 1.0, top_p)
    assert sorted(drawn) == list(range(nucleus))
    for token, p in enumerate(p / sum(kept) for p in kept):
        assert abs(drawn[token] - p) <= 4 * math.sqrt(p * (1 - p) / 8000)


@pytest.mark.parametrize("top_p", [1.0, 0.999999999])
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.29, 1), (0.31, 3), (1 - 3e-10, 3), (1 - 1e-10, 4)])
def test_a_token_is_drawn_where_the_distribution_function_passes_the_uniform_number(
    known: NemotronH, monkeypatch: pytest.MonkeyPatch, uniform: float, token: int, top_p: float
) -> None:
    """Probabilities 0, 0.3, 0, 0.7 and 2e-10: what is impossible is never drawn, what is nearly so is not lost."""
    with torch.no_grad():
        known.lm_head.weight.fill_(-1e4)
        known.lm_head.weight[[1, 3, 4], 0] = torch.tensor([0.3, 0.7, 2e-10]).log()
        known.lm_head.weight[:, 1:] = 0
    if top_p < 1:  # in the order of the probabilities, and without the least likely
        token = {0.0: 3, 0.29: 3, 0.31: 3}.get(uniform, 1)
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.full(shape, uniform, dtype=kwargs["dtype"]))
    assert generate(known, [[3]], 1, 1.0, top_p, ()).tokens == [[token]]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_a_power_of_the_probabilities(known: NemotronH, temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in (0.4, 0.3, 0.2, 0.06, 0.04)]
    drawn = frequencies(known, temperature, 1.0)
    for token, p in enumerate(power / sum(powers) for power in powers):
        assert abs(drawn[token] - p) <= 4 * math.sqrt(p * (1 - p) / 8000)


def test_a_poll_that_raises_stops_generation_and_restores_training_mode(model: NemotronH) -> None:
    polls = iter([None, None])  # the third call raises StopIteration
    model.train()
    with pytest.raises(StopIteration):
        generate(model, PROMPTS, 50, stop_token_ids=(), poll=lambda: next(polls))
    assert model.training and all(moe.gate.training and moe.gate.expert_load.sum() == 0 for moe in model.moe_blocks())


def test_nothing_to_do(model: NemotronH) -> None:
    assert generate(model, [], 5).tokens == []
    assert generate(model, PROMPTS, 0).tokens == [[], [], [], []]


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ([[1], []], {}, "prompt"),
        ([[1]], {"temperature": -0.1}, "-0.1"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"top_p": 1.5}, "1.5"),
    ],
)
def test_bad_settings_are_refused(
    model: NemotronH, prompts: list[list[int]], settings: dict[str, float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        generate(model, prompts, 4, **settings)


def test_a_budget_puts_its_tokens_where_reasoning_has_not_ended_and_the_model_goes_on_from_them(
    model: NemotronH,
) -> None:
    free = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=())
    # A token that the first row draws among its first four, and ends its reasoning with, and no other row.
    firsts = [set(tokens[:4]) for tokens in free.tokens]
    end = next(token for token in firsts[0] if not any(token in others for others in firsts[1:]))
    budget = ReasoningBudget(4, (end,), (30, end, 31))
    held = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=(), budget=budget)
    assert held.tokens[0] == free.tokens[0] and held.logprobs[0] == pytest.approx(free.logprobs[0], abs=1e-5)
    for prompt, tokens, before in zip(PROMPTS[1:], held.tokens[1:], free.tokens[1:], strict=True):
        assert tokens[:7] == [*before[:4], 30, end, 31]
        assert tokens[7:] == greedy_by_full_forwards(model, prompt + tokens[:7], 7, ())
    for stops in ((), (free.tokens[1][1],)):  # where a row has finished, those behind it move up
        out = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=stops, budget=budget)
        for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
            assert tokens == list(generate_tokens(model, prompt, 14, 0, stops, torch.Generator(), budget))


def test_reasoning_may_end_with_several_tokens(model: NemotronH) -> None:
    free = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=())
    # Three in a row of the first completion end its reasoning; each alone, or in another order, ends none.
    others = {tuple(tokens[i : i + 3]) for tokens in free.tokens[1:] for i in range(4)}
    tag = next(tag for i in range(4) if (tag := tuple(free.tokens[0][i : i + 3])) not in others)
    for tag_ids, is_held in ((tag, False), (tag[::-1], True), ((tag[0], 31, tag[2]), True)):
        budget = ReasoningBudget(6, tag_ids, (30, *tag_ids))
        held = generate(model, PROMPTS, 14, temperature=0, stop_token_ids=(), budget=budget)
        for row, (tokens, before) in enumerate(zip(held.tokens, free.tokens, strict=True)):
            assert (tokens == before) is (row == 0 and not is_held)
            if row or is_held:
                assert tokens[:10] == [*before[:6], 30, *tag_ids]
        assert held.tokens[0] == [*generate_tokens(model, PROMPTS[0], 14, 0, (), torch.Generator(), budget)]


@pytest.mark.parametrize("drawn", [[1, 1, 2], [1, 2, 3], [5, 1, 2]])
def test_the_end_is_found_behind_what_began_like_it(drawn: list[int]) -> None:
    budget, progress = ReasoningBudget(9, (1, 2), (7, 1, 2)), torch.zeros(1, dtype=torch.int64)
    for index, token in enumerate(drawn):
        budget.hold(index, torch.tensor([token]), progress)
    assert int(progress) == 2


def test_a_budget_larger_than_the_reasoning_changes_nothing(known: NemotronH) -> None:
    """Nor does one that only other rows reach: each draws what it would have drawn."""

    def sample(budget: ReasoningBudget | None) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        return generate(known, [[5]] * 300, 12, stop_token_ids=(), generator=generator, budget=budget).tokens

    free, held = sample(None), sample(ReasoningBudget(6, (2,), (3, 2)))
    ended = [2 in tokens[:6] for tokens in free]
    assert 30 < sum(ended) < 290
    for before, after, has_ended in zip(free, held, ended, strict=True):
        assert after == (before if has_ended else [*before[:6], 3, 2, *before[8:]])
    assert sample(ReasoningBudget(12, (2,), (3, 2))) == free
