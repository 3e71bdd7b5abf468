"""The engine gives every request what it would get alone, whatever joins, leaves or fails beside it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.generate import ReasoningBudget, generate
from nemotron.stack.models.decoding.speculative import Trunk
from nemotron.stack.serving import engine as engine_module
from nemotron.stack.serving.engine import (
    Answer,
    Engine,
    EngineStopped,
    FinishReason,
    Limits,
    PromptTooLong,
    QueueFull,
    Sampling,
    Token,
    UnknownStopToken,
)

GREEDY = Sampling(12, (11,), temperature=0)
DRAFTS = pytest.mark.parametrize("num_drafts", [0, 2])


@pytest.fixture(scope="module")
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("M*E-", 1, num_nextn_predict_layers=1).double().eval()


@pytest.fixture
def make_engine(model: NemotronH) -> Iterator[Callable[..., Engine]]:
    """`make_engine(start=True, **limits)`; whatever a test leaves open is cancelled."""
    engines: list[Engine] = []

    def make(start: bool = True, **limits: Any) -> Engine:
        engines.append(Engine(model, Limits(**({"max_length": 400, "max_rows": 6} | limits))))
        if start:
            engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop(0)


def prompts_of(seed: int, count: int, longest: int = 30) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(61) for _ in range(source.randint(1, longest))] for _ in range(count)]


def tokens_of(answer: Answer) -> list[Token]:
    return [token for tokens in answer for token in tokens]


def ids_of(answer: Answer) -> list[int]:
    return [token.id for token in tokens_of(answer)]


def logp_of(model: NemotronH, tokens: Sequence[int]) -> torch.Tensor:
    """Of every next token, by a full forward pass: [L, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0], -1)


# ------------------------------------------------------------------------------------------------------ the same tokens


@DRAFTS
@pytest.mark.parametrize("read_tokens", [1024, 16])
def test_greedy_answers_are_those_of_generate(
    model: NemotronH,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
    read_tokens: int,
) -> None:
    """21 requests for 6 rows; some prompts begin like others, some are asked twice, some are read in chunks."""
    monkeypatch.setattr(engine_module, "READ_TOKENS", read_tokens)
    monkeypatch.setattr(engine_module, "BRANCH_TOKENS", 4)
    prompts = prompts_of(0, 14)
    prompts += [prompts[0] + prompts[1] + [i] for i in range(5)] + prompts[:2]
    expected = generate(model, prompts, 12, temperature=0, stop_token_ids=(11, 3))
    assert len(set(map(len, expected.tokens))) > 1  # some end early
    engine = make_engine(num_drafts=num_drafts)
    for turn in range(2):
        answers = [engine.submit(prompt, Sampling(12, (11, 3), temperature=0)) for prompt in prompts]
        for answer, prompt, ids, logprobs, finished in zip(
            answers, prompts, expected.tokens, expected.logprobs, expected.finished, strict=True
        ):
            tokens = tokens_of(answer)
            assert [token.id for token in tokens] == ids
            assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=1e-10)
            assert answer.finish_reason == ("stop" if finished else "length")
            assert answer.prompt_tokens == len(prompt)
            if turn:
                assert answer.cached_tokens == len(prompt) - 1
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.rows) == (0, 0, 0)
    assert stats.generated_tokens == 2 * sum(map(len, expected.tokens))
    assert stats.finished == {"stop": 2 * sum(expected.finished), "length": 2 * (21 - sum(expected.finished))}
    assert stats.prompt_tokens == 2 * sum(map(len, prompts)) > stats.cached_prompt_tokens > stats.prompt_tokens / 2
    assert stats.steps < stats.generated_tokens / 3
    assert (stats.drafts_proposed > 0) == (num_drafts > 0) == (stats.drafts_accepted > 0)


@DRAFTS
def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    model: NemotronH, make_engine: Callable[..., Engine], num_drafts: int
) -> None:
    settings: list[dict[str, Any]] = [{"temperature": t, "top_p": p} for t in (0.0, 0.7, 1.3) for p in (0.6, 1.0)]
    prompts = prompts_of(1, 12)

    def sampling(index: int, seed: int) -> Sampling:
        return Sampling(10, (11,), seed=seed, **settings[index % len(settings)])

    engine = make_engine(num_drafts=num_drafts, prompt_cache_bytes=0)
    crowd = [engine.submit(prompt, sampling(i, 100 + i)) for i, prompt in enumerate(prompts)]
    together = [ids_of(answer) for answer in crowd]
    alone = [ids_of(engine.submit(prompt, sampling(i, 100 + i))) for i, prompt in enumerate(prompts)]
    assert together == alone
    others = [ids_of(engine.submit(prompt, sampling(i, 200 + i))) for i, prompt in enumerate(prompts)]
    differ = [one != other for one, other in zip(alone, others, strict=True)]
    greedy = [sampling(i, 0).temperature == 0 for i in range(len(prompts))]
    assert differ == [not is_greedy for is_greedy in greedy]


@DRAFTS
def test_log_probabilities_are_those_of_the_model_itself(
    model: NemotronH, make_engine: Callable[..., Engine], num_drafts: int
) -> None:
    """Of what was chosen, of the likeliest beside it, and of the prompt, read in chunks or not."""
    engine = make_engine(num_drafts=num_drafts)
    prompts = prompts_of(2, 5)
    answers = [
        engine.submit(prompt, Sampling(8, (), 0.8, 0.9, seed=i, num_logprobs=i, prompt_logprobs=i != 2))
        for prompt in prompts
        for i in (0, 2, 4)
    ]
    for index, answer in enumerate(answers):
        prompt, num_top = prompts[index // 3], (0, 2, 4)[index % 3]
        tokens = tokens_of(answer)
        logp = logp_of(model, prompt + [token.id for token in tokens])
        of_prompt = answer.prompt_logprobs
        assert (of_prompt is None) == (num_top == 2)
        assert of_prompt is None or (answer.cached_tokens == 0 and [t.id for t in of_prompt] == prompt[1:])
        for position, token in enumerate(
            [*(of_prompt or []), *tokens], start=0 if of_prompt is not None else len(prompt) - 1
        ):
            assert token.logprob == pytest.approx(logp[position, token.id].item(), abs=1e-10)
            likeliest = logp[position].topk(num_top)
            assert [id_ for id_, _ in token.top] == likeliest.indices.tolist()
            assert [p for _, p in token.top] == pytest.approx(likeliest.values.tolist(), abs=1e-10)


@DRAFTS
def test_a_budget_is_held_row_by_row(model: NemotronH, make_engine: Callable[..., Engine], num_drafts: int) -> None:
    prompts = prompts_of(3, 8)
    free = generate(model, prompts, 14, temperature=0, stop_token_ids=())
    end = free.tokens[0][2]  # the first row ends its reasoning by itself
    budgets = [ReasoningBudget(limit, (end,), (30, end, 31)) for limit in (0, 4, 9)]
    engine = make_engine(num_drafts=num_drafts)
    wanted = [(prompt, budget) for budget in budgets for prompt in prompts]
    answers = [engine.submit(p, Sampling(14, (), temperature=0, budget=budget)) for p, budget in wanted]
    held = [ids_of(answer) for answer in answers]
    expected = [generate(model, prompts, 14, 0, stop_token_ids=(), budget=budget).tokens for budget in budgets]
    assert held == [ids for rows in expected for ids in rows]
    assert free.tokens[0] in held and sum(ids in free.tokens for ids in held) < len(held)


# ---------------------------------------------------------------------------------------------------- the prompt cache


@DRAFTS
def test_a_conversation_and_questions_under_one_system_prompt_are_read_once(
    model: NemotronH, make_engine: Callable[..., Engine], num_drafts: int
) -> None:
    engine = make_engine(num_drafts=num_drafts)
    prompt: list[int] = prompts_of(4, 1)[0] + [7, 8, 9]
    known = 0
    for question in ([5, 6], [1, 2, 3], [4]):
        prompt = prompt + question
        answer = engine.submit(prompt, GREEDY)
        ids = ids_of(answer)
        assert answer.cached_tokens == known
        assert ids == generate(model, [prompt], 12, temperature=0, stop_token_ids=(11,)).tokens[0]
        prompt = prompt + ids
        known = len(prompt) - 1  # all of the answer but its last token, which nobody has read

    system = [60 - token for token in range(60)]
    cached = []
    for question in ([1, 2], [3, 4, 5], [6], [7, 7, 7, 7]):
        answer = engine.submit(system + question, GREEDY)
        assert ids_of(answer) == generate(model, [system + question], 12, temperature=0, stop_token_ids=(11,)).tokens[0]
        cached.append(answer.cached_tokens)
    # The second shows where they part; from there on only questions are read, and one token before them.
    assert cached == [0, 0, 59, 59]


def test_equal_prompts_that_come_at_once_are_read_once(model: NemotronH, make_engine: Callable[..., Engine]) -> None:
    engine, prompt = make_engine(start=False), [token % 60 for token in range(70)]
    answers = [engine.submit(prompt, GREEDY) for _ in range(4)]
    engine.start()
    expected = generate(model, [prompt], 12, temperature=0, stop_token_ids=(11,)).tokens[0]
    assert [ids_of(answer) for answer in answers] == [expected] * 4
    assert [answer.cached_tokens for answer in answers] == [0, 69, 69, 69]


def test_what_is_kept_stays_within_its_bytes(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(prompt_cache_bytes=40_000)
    answers = [engine.submit(prompt, GREEDY) for prompt in prompts_of(5, 30)]
    assert all(ids_of(answer) for answer in answers)
    assert 0 < engine.stats.prompt_cache_bytes <= 40_000
    engine = make_engine(prompt_cache_bytes=0)
    for _ in range(2):
        answer = engine.submit([1, 2, 3], GREEDY)
        assert ids_of(answer) and answer.cached_tokens == 0
    assert engine.stats.prompt_cache_bytes == 0


# ------------------------------------------------------------------------------------------------------------- fairness


def test_a_long_prompt_holds_up_neither_rows_that_decode_nor_a_short_prompt_behind_it(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of 8 tokens, 300 take 38; meanwhile there is a step a pass, and the short one waits for one of them."""
    monkeypatch.setattr(engine_module, "READ_TOKENS", 8)
    engine = make_engine(start=False)
    first = engine.submit([1, 2], Sampling(30, (), temperature=0))
    long, short = engine.submit([5] * 300, GREEDY), engine.submit([3, 4, 5], GREEDY)
    order: list[str] = []

    def listen(name: str, answer: Answer) -> None:
        order.extend(name for _ in answer)

    readers = [
        threading.Thread(target=listen, args=pair) for pair in (("first", first), ("long", long), ("short", short))
    ]
    for reader in readers:
        reader.start()
    engine.start()
    for reader in readers:
        reader.join()
    assert max(i for i, name in enumerate(order) if name != "long") < order.index("long")


# --------------------------------------------------------------------------------------------------- cancelled, stopped


def assert_nothing_is_left(engine: Engine) -> None:
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.rows) == (0, 0, 0)
    assert not engine._reading and not engine._decoding and engine._batch.slots == [None]
    for stack in engine._batch._stacks:
        assert stack.lengths == [0] and stack.capacity == 64


@pytest.mark.parametrize("num_drafts", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_two_hundred_random_cancellations_leave_nothing(
    model: NemotronH, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Some wait, some are being read, some decode, some have ended, some twice; those that nobody cancels are right."""
    source, threads = random.Random(0), threading.active_count()
    engine = make_engine(start=False, num_drafts=num_drafts, max_waiting=400, max_length=10**6)
    prompts = prompts_of(6, 210, 12)
    expected = generate(model, prompts[200:], 12, temperature=0, stop_token_ids=(11,)).tokens
    answers = [
        engine.submit(prompt, Sampling(source.choice((2, 10**5)), (), temperature=0)) for prompt in prompts[:200]
    ]
    answers += [engine.submit(prompt, GREEDY) for prompt in prompts[200:]]
    order = source.sample(range(200), 200)
    seen: set[str] = set()

    def cancel_some() -> None:
        for index in order[: source.randint(0, 6)]:
            order.remove(index)
            answer = answers[index]
            states = {"reading": engine._reading, "decoding": engine._decoding.values(), "waiting": engine._waiting}
            seen.update(name for name, requests in states.items() if answer in [r.answer for r in requests])
            seen.update(["over"] if answer.finish_reason is not None else [])
            for _ in range(source.randint(1, 2)):
                answer.cancel()

    for name in ("step", "read"):
        function = getattr(engine_module.Batch, name)

        def hooked(*args: Any, function: Callable[..., Any] = function) -> Any:
            cancel_some()
            return function(*args)

        monkeypatch.setattr(engine_module.Batch, name, hooked)
    cancel_some()
    engine.start()
    for answer in answers[:200]:
        list(answer)
    assert [ids_of(answer) for answer in answers[200:]] == expected
    assert [len(answer.error or "") for answer in answers] == [0] * 210
    assert seen == {"reading", "decoding", "waiting", "over"} and not order
    engine.stop(10)
    assert_nothing_is_left(engine)
    assert threading.active_count() == threads
    finished = engine.stats.finished
    assert sum(finished.values()) == 210 and finished["cancelled"] > 100


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_a_cancelled_answer_ends_where_it_is(make_engine: Callable[..., Engine], reason: FinishReason) -> None:
    engine = make_engine(max_length=10**6)
    answer = engine.submit([1, 2, 3], Sampling(10**5, (), temperature=0))  # too long to end by itself
    got = 0
    for tokens in answer:
        got += len(tokens)
        if got >= 3:
            answer.cancel(reason)
            answer.cancel()  # the first counts
    assert answer.finish_reason == reason and 3 <= got < 10**5 and engine.stats.finished == {reason: 1}


def test_a_stopping_engine_lets_requests_go_on_for_so_long_and_no_longer(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_rows=2)
    answers = [engine.submit(prompt, GREEDY) for prompt in prompts_of(7, 5)]
    engine.stop(60)
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
    with pytest.raises(EngineStopped):
        engine.submit([1], GREEDY)
    engine = make_engine(max_rows=2, max_length=10**6)
    endless = [engine.submit(prompt, Sampling(10**5, (), temperature=0)) for prompt in prompts_of(8, 5)]
    engine.stop(0)
    assert {answer.finish_reason for answer in endless} == {"cancelled"}
    assert_nothing_is_left(engine)
    never_started = make_engine(start=False)
    waiting = never_started.submit([1], GREEDY)
    never_started.stop(0)
    assert waiting.finish_reason == "cancelled" and list(waiting) == []


@DRAFTS
def test_an_error_in_a_step_ends_those_at_work_and_the_next_ones_are_right(
    model: NemotronH, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """It comes when the trunk has read the tokens and nothing is settled; the states are not even numbers any more."""
    engine = make_engine(start=False, max_rows=3, num_drafts=num_drafts)
    extend, calls = Trunk.extend, iter(range(1000))

    def fails_once(trunk: Trunk, ids: torch.Tensor) -> Any:
        out = extend(trunk, ids)
        if next(calls) == 2:
            for stack in engine._batch._stacks:
                for state in stack.pending_states:
                    state.ssm.fill_(torch.nan)
                    state.conv.fill_(torch.nan)
                for layer in stack.cache.layers:
                    if isinstance(layer, AttentionCache):
                        layer.k.fill_(torch.nan)
                        layer.v.fill_(torch.nan)
            raise torch.OutOfMemoryError("no memory for 5 GiB")
        return out

    monkeypatch.setattr(Trunk, "extend", fails_once)
    prompts = prompts_of(9, 7)
    answers = [engine.submit(prompt, Sampling(9, (), temperature=0)) for prompt in prompts]
    expected = generate(model, prompts, 9, temperature=0, stop_token_ids=()).tokens
    engine.start()
    for index, answer in enumerate(answers):
        ids = ids_of(answer)
        if index < 3:
            assert ids == expected[index][: len(ids)] and answer.finish_reason == "error"
            assert answer.error == "OutOfMemoryError: no memory for 5 GiB"
        else:
            assert ids == expected[index] and answer.finish_reason == "length" and answer.error is None
    assert engine.stats.finished == {"error": 3, "length": 4}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_tells_those_who_wait(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(start=False)
    answers = [engine.submit(prompt, GREEDY) for prompt in prompts_of(3, 2)]

    def breaks(*_: object) -> None:
        raise SystemExit  # as an error in what mends an error

    monkeypatch.setattr(Engine, "_begin", breaks)
    engine.start()
    for answer in answers:
        assert ids_of(answer) == [] and (answer.finish_reason, answer.error) == ("error", "the engine has ended")
    with pytest.raises(EngineStopped):
        engine.submit([1], GREEDY)


# --------------------------------------------------------------------------------------------------------- what is sent


def test_requests_that_cannot_be_served_are_refused(model: NemotronH, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(start=False, max_length=20, max_rows=2, max_waiting=1)
    with pytest.raises(PromptTooLong, match="9 tokens of prompt and 12 new ones exceed 20"):
        engine.submit([1] * 9, GREEDY)
    for prompt, named in (([], "at least one"), ([5, 61], "61"), ([-1], "-1")):
        with pytest.raises(ValueError, match=named):
            engine.submit(prompt, GREEDY)
    with pytest.raises(UnknownStopToken, match="stop token 61"):
        engine.submit([1], Sampling(1, (11, 61)))
    for _ in range(3):
        engine.submit([1] * 8, GREEDY)
    assert engine.stats.waiting == 3
    with pytest.raises(QueueFull, match="1 requests wait"):
        engine.submit([1], GREEDY)
    for settings in (
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"top_p": 0.0},
        {"num_logprobs": 21},
        {"max_new_tokens": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Sampling(**({"max_new_tokens": 1, "stop_token_ids": ()} | settings))
    plain = NemotronH(model.config.__class__(**(model.config.to_dict() | {"num_nextn_predict_layers": 0})))
    with pytest.raises(ValueError, match="multi-token prediction"):
        Engine(plain, Limits(max_length=10, num_drafts=1))


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_a_prompt_may_fill_the_length_where_nothing_is_to_follow(
    make_engine: Callable[..., Engine], num_drafts: int
) -> None:
    engine = make_engine(max_length=20, num_drafts=num_drafts)
    answer = engine.submit([1] * 20, Sampling(0, (), prompt_logprobs=True))
    assert len(ids_of(answer)) == 1 and answer.finish_reason == "length"
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 19


def test_answers_are_taken_by_a_loop(model: NemotronH, make_engine: Callable[..., Engine]) -> None:
    engine, prompts = make_engine(max_length=10**6), prompts_of(10, 9)
    expected = generate(model, prompts, 12, temperature=0, stop_token_ids=(11,)).tokens

    async def take(prompt: list[int]) -> list[int]:
        return [token.id async for tokens in engine.submit(prompt, GREEDY) for token in tokens]

    async def leave(prompt: list[int]) -> Answer:
        answer = engine.submit(prompt, Sampling(10**5, (), temperature=0))  # too long to end by itself
        taking = asyncio.ensure_future(anext(aiter(answer)))
        await taking
        stream = aiter(answer)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return answer

    async def all_of_them() -> None:
        taken = await asyncio.gather(*map(take, prompts))
        assert taken == expected
        answer = await leave(prompts[0])
        assert answer.is_cancelled

    asyncio.run(all_of_them())
    engine.stop(10)
    assert_nothing_is_left(engine)
    assert engine.stats.finished["cancelled"] == 1
