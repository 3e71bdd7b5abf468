"""Log-likelihoods and answers as lm-eval gets them, against the model asked token by token and our own evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.chat import render
from nemotron.kit.found_model import FoundModel
from nemotron.stack.evaluation.language_model import model_bits_per_byte, token_byte_lengths
from nemotron.stack.evaluation.lm_eval_model import NemotronLM
from nemotron.stack.models import NemotronH

PAIRS = [
    ("def f(x):", " return x"),
    ("", "What is 12+7?"),
    ("What is 12+7? ", "19"),  # the blank belongs to what is scored
    ("a", " return x What is 12+7?"),
    ("What is 12+7? def f(x): return x", "\n"),
]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]) -> NemotronLM:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(["What is 12+7? def f(x): return x"], 300)
    save_tokenizer(tokenizer, folder, model_max_length=64, template="nano3")
    model = small_model("MEM*", vocab_size=tokenizer.get_vocab_size())
    return NemotronLM(model, folder, "nano3", max_length=64, max_gen_toks=8, batch_size=3)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]  # type: ignore[arg-type]


def step_by_step(lm: NemotronLM, before: list[int], ids: list[int]) -> tuple[float, bool]:
    """Each token from those before it alone."""
    total, greedy = 0.0, True
    for i, token in enumerate(ids):
        with torch.inference_mode():
            logits = lm.model(torch.tensor([[*before, *ids[:i]]])).logits[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
    return total, greedy


def test_loglikelihoods_are_those_of_the_tokens_one_by_one(lm: NemotronLM) -> None:
    given = lm.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    for (context, continuation), (loglikelihood, is_greedy) in zip(PAIRS, given, strict=True):
        whole, before = lm.tok_encode(context + continuation), lm.tok_encode(context.rstrip()) or [lm.prefix_token_id]
        expected = step_by_step(lm, before, whole[len(before) if context else 0 :])
        assert loglikelihood == pytest.approx(expected[0], abs=1e-5) and is_greedy == expected[1]


def test_what_greedy_decoding_writes_is_greedy(lm: NemotronLM) -> None:
    context, ids = lm.tok_encode("What is 12+7?"), list[int]()
    for _ in range(5):
        with torch.inference_mode():
            ids.append(int(lm.model(torch.tensor([[*context, *ids]])).logits[0, -1].argmax()))
    ((_, greedy), (_, other)) = lm._loglikelihood_tokens([(None, context, ids), (None, context, [*ids[:-1], 0])])
    assert greedy and not other


def test_a_context_that_is_too_long_loses_its_beginning(lm: NemotronLM) -> None:
    ids = [i % 50 for i in range(100)]
    (cut,), (short,) = (lm._loglikelihood_tokens([(None, context, [7, 8])]) for context in (ids, ids[-63:]))
    assert cut == short


def test_rolling_is_our_bits_per_byte(lm: NemotronLM) -> None:
    text = "What is 12+7? def f(x): return x " * 40
    ids = lm.tok_encode(text)[: 2 * lm.max_length]  # whole windows: else lm-eval lets the last one begin earlier
    text = lm._tokenizer.decode(ids, skip_special_tokens=False)
    assert lm.tok_encode(text) == ids
    (loglikelihood,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    stream, lengths = np.array([lm.prefix_token_id, *ids]), token_byte_lengths(lm._tokenizer)
    bits = model_bits_per_byte(lm.model, stream, lengths, seq_len=lm.max_length)
    assert -loglikelihood / np.log(2) / len(text.encode()) == pytest.approx(bits, rel=1e-6)


def test_answers_come_without_reasoning_and_end_where_the_task_says(
    lm: NemotronLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemotron.stack.evaluation import lm_eval_model
    from nemotron.stack.evaluation.scoring import Completion

    said = {"chat": "one\n\ntwo</think>\nfirst\n\nsecond", "open": "never closed"}

    def generate_fn(*_: Any, max_new_tokens: int, **__: Any) -> Callable[..., list[Completion]]:
        def generate(prompts: list[str], *, temperature: float, seed: int) -> list[Completion]:
            keys = ["open" if "never" in prompt else "chat" for prompt in prompts]
            return [Completion(said[key], max_new_tokens, 0.0, True) for key in keys]

        return generate

    monkeypatch.setattr(lm_eval_model, "model_generate_fn", generate_fn)
    prompts = [lm.apply_chat_template([{"role": "user", "content": text}]) for text in ("say", "never")]
    kinds = [{"until": ["\n\n"]}, {"until": [], "do_sample": False, "max_gen_toks": 3}]
    requests = asked("generate_until", *((prompt, kind) for kind in kinds for prompt in prompts))
    assert lm.generate_until(requests) == ["first", "", "first\n\nsecond", ""]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_that_opens_no_reasoning_has_answers(
    lm: NemotronLM, plain_chat: str, monkeypatch: pytest.MonkeyPatch, thinking: bool
) -> None:
    from nemotron.stack.evaluation import lm_eval_model
    from nemotron.stack.evaluation.scoring import Completion

    def generate_fn(*_: Any, **__: Any) -> Callable[..., list[Completion]]:
        return lambda prompts, **_: [Completion("first", 1, 0.0, True) for _ in prompts]

    monkeypatch.setattr(lm_eval_model, "model_generate_fn", generate_fn)
    plain = NemotronLM(lm.model, lm.folder, plain_chat, thinking=thinking)
    question = {"role": "user", "content": "12+7?"}
    prompt = plain.apply_chat_template([question])
    assert plain.generate_until(asked("generate_until", (prompt, {"until": []}))) == ["first"]
    begun = plain.apply_chat_template(
        [question, {"role": "assistant", "content": "It is"}], add_generation_prompt=False
    )
    assert begun == f"{prompt}It is"


def test_prompts_are_those_of_our_template(lm: NemotronLM) -> None:
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+7?"}]
    expected = render(history, add_generation_prompt=True, template="nano3")
    assert lm.apply_chat_template(history) == expected and expected.endswith("<think>\n")
    begun = lm.apply_chat_template([*history, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    assert begun == render(history, enable_thinking=False, add_generation_prompt=True, template="nano3") + "It is"


@pytest.mark.parametrize(
    ("gpu", "device", "place"),
    [
        (True, None, "cuda"),
        (True, "cuda:1", "cuda:1"),
        (True, "cpu", "cpu"),
        (False, None, "cpu"),
        (False, "cuda", "cpu"),
    ],
)
def test_a_model_is_in_fp32_on_the_gpu_if_there_is_one(
    lm: NemotronLM, monkeypatch: pytest.MonkeyPatch, gpu: bool, device: str | None, place: str
) -> None:
    from nemotron.recipes.tools import lm_eval_run

    def load_model(folder: Path, dtype: str, device: str) -> NemotronH:
        loaded.append((dtype, device))
        return lm.model

    loaded: list[tuple[str, str]] = []
    found = FoundModel(lm.folder, lm.folder, "tiny", "nano3", is_base=False, reasons=True)
    monkeypatch.setattr(lm_eval_run, "find_model", lambda word: found)
    monkeypatch.setattr(lm_eval_run, "load_model", load_model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    lm_eval_run.NamedModel("tiny", device=device)
    lm_eval_run.NamedModel("tiny", device=device, dtype="bfloat16")
    assert loaded == [("float32", place), ("bfloat16", place)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "--batch_size 0: a number of rows expected"),
        ({"max_length": "abc"}, "--model_args max_length=abc: a number of tokens expected"),
        ({"max_gen_toks": 0}, "--model_args max_gen_toks=0: a number of tokens expected"),
        ({"thinking": "no"}, "--model_args thinking=no: True or False expected"),
    ],
)
def test_values_that_are_no_numbers_or_switches_are_refused(given: dict[str, Any], message: str) -> None:
    from nemotron.recipes.tools import lm_eval_run

    with pytest.raises(UserError, match=message):
        lm_eval_run.NamedModel("nowhere", **given)


@pytest.mark.parametrize("number", [0, -3])
def test_no_tasks_are_refused(number: int) -> None:
    from nemotron.recipes.tools.lm_eval_tasks import generated

    with pytest.raises(UserError, match=f"--metadata num_tasks={number}: at least 1 expected"):
        generated.held_out("math", num_tasks=number)


def test_what_the_decoder_does_not_have_is_refused(lm: NemotronLM) -> None:
    with pytest.raises(UserError, match=r"top_p=0\.9"):
        lm.generate_until(asked("generate_until", ("a", {"do_sample": True, "temperature": 1.0, "top_p": 0.9})))
    base = NemotronLM(lm.model, lm.folder, None)
    with pytest.raises(UserError, match="no chat template"):
        base.apply_chat_template([{"role": "user", "content": "?"}])
