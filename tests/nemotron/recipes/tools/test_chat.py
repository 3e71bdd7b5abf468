"""The chat script: what the model is given, what is shown of what it says, and whole runs with a real little model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forked import OF_MODELS, run_forked
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from nemotron.recipes.tools import chat
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import model_generate_fn, model_stream_fn, reasoning_budget
from nemotron.stack.models import NemotronH


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["hello"], MIN_VOCAB_SIZE)


class Replies:
    """Stands in for a model: each call answers with the next of `replies`, `prompts` collects what it was given.

    An answer comes in pieces of three characters, which cut tags in two; at a `^` Ctrl-C is pressed.
    """

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.prompts: list[str] = []
        self.budgets: list[int | None] = []

    def __call__(self, prompt: str, max_reasoning: int | None) -> Iterator[str]:
        self.prompts.append(prompt)
        self.budgets.append(max_reasoning)
        reply = self.replies.pop(0)
        for start in range(0, len(reply), 3):
            piece, interrupt, _ = reply[start : start + 3].partition("^")
            yield piece
            if interrupt:
                raise KeyboardInterrupt


def speaker(model: Replies, template: str = "nano3", patient: bool = False) -> chat.Speaker:
    return chat.Speaker(model, template, patient)


def test_an_answer_is_shown_while_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[str, str]] = []

    def pieces(prompt: str, max_reasoning: int | None) -> Iterator[str]:
        for piece in ("1 + ", "1\n</th", "ink>\n", "it ", "is", " 2\n"):
            yield piece
            shown.append(tuple(capsys.readouterr()))

    message = chat.Speaker(pieces, "nano3").answer([{"role": "user", "content": "1 + 1?"}], max_reasoning=None)
    assert message == {"role": "assistant", "content": "it is 2", "reasoning_content": "1 + 1"}
    # No part of a tag is shown, and a blank only once something follows it.
    assert shown == [("", "1 +"), ("", " 1"), ("", ""), ("it", "\n"), (" is", ""), (" 2", "")]
    assert tuple(capsys.readouterr()) == ("\n", "")


@pytest.mark.parametrize(
    ("question", "max_reasoning", "reply", "message"),
    [
        ("1? /no_think", None, "1382", {"content": "1382"}),
        ("1? /think", 0, "so\n</think>\n1382", {"content": "1382", "reasoning_content": "so"}),
    ],
)
def test_under_nano2_a_word_of_the_question_turns_reasoning_on_and_off(
    question: str, max_reasoning: int | None, reply: str, message: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = speaker(Replies(reply), "nano2").answer([{"role": "user", "content": question}], max_reasoning)
    assert answer == {"role": "assistant", **message}
    assert capsys.readouterr().out == "1382\n"


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1?\n2 + 2?\n/quit\n"))
    model = Replies("x\n</think>\n2 and so^", "</think>\n4")
    chat.converse(speaker(model, patient=True), max_reasoning=None)
    assert "2 and so" in capsys.readouterr().out
    assert "2 and so<|im_end|>\n<|im_start|>user\n2 + 2?" in model.prompts[1]
    with pytest.raises(KeyboardInterrupt):  # a single question: the command ends with 130
        speaker(Replies("xxx^")).answer([{"role": "user", "content": "1 + 1?"}], max_reasoning=None)


def test_reasoning_and_answer_are_told_apart() -> None:
    model = Replies("1 + 1\n</think>\n2")
    message = speaker(model).answer([{"role": "user", "content": "1 + 1?"}], max_reasoning=None)
    assert message == {"role": "assistant", "content": "2", "reasoning_content": "1 + 1"}
    opened = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert model.prompts == [opened]


def test_without_thinking_the_tags_stand_empty_in_the_prompt() -> None:
    model = Replies("2")
    message = speaker(model).answer([{"role": "user", "content": "1 + 1?"}], max_reasoning=0)
    assert message == {"role": "assistant", "content": "2"}
    assert model.prompts[0].endswith("<|im_start|>assistant\n<think></think>")


def test_the_budget_of_reasoning_changes_between_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "1?", "/think 12", "2?", "/think off", "3?", "/think on", "4?", "/think 0", "5?", "/think -1", "6?"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    model = Replies(*["</think>x"] * 6)
    chat.converse(speaker(model), max_reasoning=7)
    assert model.budgets == [7, 12, None, None, None, None]
    assert [prompt.endswith("<think>\n") for prompt in model.prompts] == [True, True, False, True, False, False]


def test_a_budget_that_leaves_no_answer_is_refused_between_questions(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []

    def model_stream(*words: Any, **options: Any) -> Callable[[str, int | None], Iterator[str]]:
        def stream(prompt: str, max_reasoning: int | None) -> Iterator[str]:
            asked.append(max_reasoning)
            yield "</think>x"

        return stream

    monkeypatch.setattr(chat, "model_stream_fn", model_stream)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/think 300\n1?\n/think 9\n2?\n/quit\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    options = as_options(model_dir, template="nano3", max_reasoning=7)
    chat.main(chat.Options(**options))
    assert asked == [7, 9] and "a reasoning budget of 300 leaves no answer in 256" in capsys.readouterr().err
    with pytest.raises(UserError, match="a reasoning budget of 254 leaves no answer"):
        chat.main(chat.Options(**{**options, "max_reasoning": 254}))


def test_under_a_template_without_the_switch_a_model_trained_without_reasoning_is_asked_as_it_is(
    plain_chat: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1?\n/think on\n/think off\n2?"))
    model = Replies("one", "two")
    chat.converse(speaker(model, plain_chat), max_reasoning=0)
    assert [prompt.count("<|im_start|>") for prompt in model.prompts] == [2, 4]
    assert "has no switch enable_thinking" in capsys.readouterr().err


def test_a_question_that_the_template_refuses_does_not_end_the_conversation(
    plain_chat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "polite.jinja"
    refuses = "{% if 'damn' in messages[-1].content %}{{ raise_exception('be polite') }}{% endif %}"
    file.write_text(refuses + Path(plain_chat).read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("1?\ndamn\n2?"))
    model = Replies("one", "two")
    chat.converse(speaker(model, str(file)), max_reasoning=None)
    assert "be polite" in capsys.readouterr().err and "damn" not in model.prompts[1]


def test_an_answer_cut_off_while_reasoning_is_no_answer() -> None:
    message = speaker(Replies("1 + ")).answer([{"role": "user", "content": "1 + 1?"}], max_reasoning=None)
    assert message == {"role": "assistant", "content": "", "reasoning_content": "1 +"}


def test_a_conversation_keeps_its_turns_without_their_reasoning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1?\n\n/help\n2 + 2?\n/quit\nnever read\n"))
    model = Replies("1 + 1\n</think>\n2", "</think>\n4")
    chat.converse(speaker(model), max_reasoning=None)
    captured = capsys.readouterr()
    assert captured.out.replace("> ", "").split() == ["2", "4"]
    assert "1 + 1\n" in captured.err
    assert len(model.prompts) == 2
    assert "1 + 1?<|im_end|>" in model.prompts[1] and "2<|im_end|>\n<|im_start|>user\n2 + 2?" in model.prompts[1]
    assert "1 + 1\n</think>" not in model.prompts[1]


def test_ctrl_c_at_the_prompt_leaves_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        chat.converse(speaker(Replies()), max_reasoning=None)
    assert capsys.readouterr().err == f"{chat.HELP}\n\n"


@pytest.fixture(scope="module")
def model_dir(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]
) -> Path:
    """A random model that fits the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    small_model("M*E", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def as_options(model: Path, **chosen: Any) -> dict[str, Any]:
    """What `nemotron nano3 chat` hands over, with its own defaults."""
    place = {"model": str(model), "tokenizer": str(model), "template": "nano3"}
    numbers = {"temperature": 0.0, "max_new_tokens": 256, "seed": 0}
    return {**place, "prompt": None, **numbers, "max_reasoning": None, **chosen}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_pieces_are_the_text_that_evaluation_would_read(model_dir: Path, temperature: float) -> None:
    tokenizer = chat.load_tokenizer(model_dir)
    model = chat.load_model(model_dir, tokenizer)
    texts = []
    for seed in range(4):
        whole = model_generate_fn(model, model_dir, "nano3", max_new_tokens=40)
        (completion,) = whole(["hello"], temperature=temperature, seed=seed)
        stream = model_stream_fn(model, model_dir, "nano3", max_new_tokens=40, temperature=temperature, seed=seed)
        text = "".join(stream("hello", None))
        assert text.replace("\ufffd", "") == completion.text.replace("\ufffd", "")
        texts.append(text)
        held = model_generate_fn(
            model, model_dir, "nano3", max_new_tokens=40, budget=reasoning_budget(model_dir, "nano3", 5, 40)
        )
        (completion,) = held(["hello"], temperature=temperature, seed=seed)
        held_text = "".join(stream("hello", 5))
        assert temperature > 0 or "\n</think>\n" in held_text
        assert held_text.replace("\ufffd", "") == completion.text.replace("\ufffd", "")
    assert max(map(len, texts)) > 20


def run(options: dict[str, Any], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_forked(OF_MODELS, [chat.__file__, json.dumps(options)], Path.cwd(), os.environ, stdin)


@pytest.mark.slow
def test_the_script_answers_one_question_the_same_way_twice(model_dir: Path) -> None:
    options = as_options(model_dir, max_new_tokens=12, max_reasoning=0, temperature=1, seed=3)
    first, second = run({**options, "prompt": "hello"}), run(options, stdin="hello\n")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_a_template_of_the_users_is_the_one_it_is_talked_to_under(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    model = Replies("yes")
    speaker(model, str(tmp_path)).answer([{"role": "user", "content": "hello"}], max_reasoning=None)
    assert model.prompts == ["[hello]"]


def test_the_script_continues_plain_text(model_dir: Path) -> None:
    done = run(as_options(model_dir, max_new_tokens=4, template=None, prompt="def f("))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"prompt": "caf\udce9", "template": "nano3"}, "not UTF-8: byte 0xe9 after 3 characters"),
        ({"tokenizer": "{empty}"}, "no tokenizer.json in"),
        ({"template": "nano3"}, "no question: stdin is empty"),
        ({"tempre": 1}, "with exactly these keys: model, tokenizer, "),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    chosen: dict[str, Any],
    message: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = json.dumps({**as_options(model_dir), **chosen}).replace("{empty}", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["chat.py", options])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run_tool(chat.main, chat.Options) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and len(said.splitlines()) <= 2


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bigger = Tokenizer.from_str(tokenizer.to_str())
    bigger.add_tokens(["one more"])
    size = tokenizer.get_vocab_size()
    with pytest.raises(UserError, match=f"has {size + 1} tokens, the model only {size}"):
        chat.load_model(model_dir, bigger)
