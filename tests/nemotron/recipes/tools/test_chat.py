"""The chat script: what the model is given, what is shown of what it says, and whole runs with a real little model."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nemotron.recipes.tools import chat
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.generate import Generation

SPECIALS = {0: "<pad>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>", 12: "<think>", 13: "</think>"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte is a token of its own; ids below 16 are special, as in the recipes."""
    specials = [SPECIALS.get(i, f"<SPECIAL_{i}>") for i in range(16)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*specials, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


@pytest.fixture
def said(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces sampling: each call answers with the next of `replies`; the list collects the prompts."""
    prompts: list[str] = []

    def fake(model: Any, given: list[list[int]], **settings: Any) -> Generation:
        prompts.append(tokenizer.decode(given[0], skip_special_tokens=False))
        tokens = tokenizer.encode(REPLIES[len(prompts) - 1], add_special_tokens=False).ids
        return Generation([tokens], [[0.0] * len(tokens)], [True], [0.0])

    monkeypatch.setattr(chat, "generate", fake)
    return prompts


REPLIES = ["1 + 1\n</think>\n2<|im_end|>", "</think>\n4<|im_end|>"]
SAMPLING = chat.Sampling(0.0, 8, torch.Generator())


def test_reasoning_and_answer_are_told_apart(said: list[str], tokenizer: Tokenizer) -> None:
    message = chat.answer(None, tokenizer, [{"role": "user", "content": "1 + 1?"}], True, SAMPLING)  # type: ignore[arg-type]
    assert message == {"role": "assistant", "content": "2", "reasoning_content": "1 + 1"}
    assert said == ["<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"]


def test_without_thinking_the_tags_stand_empty_in_the_prompt(
    said: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "REPLIES", ["2<|im_end|>"])
    message = chat.answer(None, tokenizer, [{"role": "user", "content": "1 + 1?"}], False, SAMPLING)  # type: ignore[arg-type]
    assert message == {"role": "assistant", "content": "2"}
    assert said[0].endswith("<|im_start|>assistant\n<think></think>")


def test_a_conversation_keeps_its_turns_without_their_reasoning(
    said: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1?\n\n/help\n2 + 2?\n/quit\nnever read\n"))
    chat.converse(None, tokenizer, True, SAMPLING)  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert captured.out.replace("> ", "").split() == ["2", "4"]
    assert "1 + 1\n" in captured.err
    assert len(said) == 2
    assert "1 + 1?<|im_end|>" in said[1] and "2<|im_end|>\n<|im_start|>user\n2 + 2?" in said[1]
    assert "1 + 1\n</think>" not in said[1]


@pytest.fixture(scope="module")
def model_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that fits the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = NemotronHConfig(
        hybrid_override_pattern="M*E",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        ssm_state_size=8,
        mamba_num_heads=2,
        mamba_head_dim=16,
        n_groups=1,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )
    NemotronH(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, chat.__file__, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_answers_one_question_the_same_way_twice(model_dir: Path) -> None:
    arguments = (f"--model={model_dir}", "--max-new-tokens=12", "--no-thinking", "--temperature=1", "--seed=3")
    first, second = run(*arguments, "--prompt=hello"), run(*arguments, stdin="hello\n")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_the_script_continues_plain_text(model_dir: Path) -> None:
    done = run(f"--model={model_dir}", "--max-new-tokens=4", "--complete", "--prompt=def f(")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--prompt=x"], "no config.json in"), (["--model={model}"], "no question: stdin is empty")],
)
def test_what_is_missing_is_said_in_a_line(arguments: list[str], message: str, model_dir: Path, tmp_path: Path) -> None:
    words = [word.format(model=model_dir) for word in arguments]
    done = run(*words) if any("--model" in word for word in words) else run(f"--model={tmp_path}", *words)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
