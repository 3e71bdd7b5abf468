"""Talk to a trained model: python chat.py --model DIR [--prompt TEXT] [--no-thinking] [--complete]

DIR holds config.json and model.safetensors, and tokenizer.json unless --tokenizer names its folder. Without --prompt,
questions come from the terminal, or one question from stdin. `nemotron nano3 chat` finds both and starts this script.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, run_main
from nemotron.kit.chat import parse_response, render
from nemotron.stack.models import NemotronH
from nemotron.stack.models.generate import generate

HELP = "/think on|off  reasoning    /reset  forget the conversation    /quit"


@dataclass
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy."""

    temperature: float
    max_new_tokens: int
    generator: torch.Generator


def complete(model: NemotronH, tokenizer: Tokenizer, text: str, sampling: Sampling) -> str:
    """The model's continuation of `text`, up to `<|im_end|>`, end of text or `max_new_tokens`; special tokens kept."""
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    stops = tuple(i for i in (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("</s>")) if i is not None)
    out = generate(
        model,
        [prompt],
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        stop_token_ids=stops,
        generator=sampling.generator,
    )
    tokens = [t for t in out.tokens[0] if t not in stops]
    return tokenizer.decode(tokens, skip_special_tokens=False)


def answer(
    model: NemotronH, tokenizer: Tokenizer, messages: list[dict[str, str]], thinking: bool, sampling: Sampling
) -> dict[str, str]:
    """The assistant's next message: content, and reasoning_content when it reasoned."""
    prompt = render(messages, enable_thinking=thinking, add_generation_prompt=True)
    opened = "<think>\n" if thinking else "<think></think>"  # the prompt ends with it, so it is part of the response
    reasoning, content = parse_response(opened + complete(model, tokenizer, prompt, sampling))
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def show(message: dict[str, str]) -> None:
    """Print an answer; the reasoning goes to stderr, dimmed on a terminal, so that stdout is the answer alone."""
    if reasoning := message.get("reasoning_content"):
        dim, reset = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}{reasoning}{reset}", file=sys.stderr, flush=True)
    if not message["content"]:
        print("(no answer within --max-new-tokens)", file=sys.stderr)
    print(message["content"], flush=True)


def converse(model: NemotronH, tokenizer: Tokenizer, thinking: bool, sampling: Sampling, plain: bool = False) -> None:
    """Questions and answers until end of input or /quit; earlier turns stay in the prompt.

    With `plain` each line is continued as text instead, for a base model.
    """
    print(HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
        elif line in ("/think on", "/think off"):
            thinking = line.endswith("on")
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line and plain:
            print(line + complete(model, tokenizer, line, sampling), flush=True)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append(answer(model, tokenizer, messages, thinking, sampling))
            show(messages[-1])


def main() -> None:
    """Parse the command line, load the model, answer."""
    parser = argparse.ArgumentParser(description="Talk to a trained model.")
    parser.add_argument("--model", type=Path, required=True, help="directory with the model and its tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json (default: that of the model)")
    parser.add_argument("--prompt", help="one question instead of a conversation")
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning")
    parser.add_argument("--complete", action="store_true", help="continue plain text, without the chat template")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    for folder, name in ((args.model, "config.json"), (args.tokenizer or args.model, "tokenizer.json")):
        if not (folder / name).is_file():
            raise UserError(f"no {name} in {folder}", "give the payload directory of a model artifact")
    model = NemotronH.from_pretrained(args.model).eval()
    tokenizer = Tokenizer.from_file(str((args.tokenizer or args.model) / "tokenizer.json"))
    sampling = Sampling(args.temperature, args.max_new_tokens, torch.Generator().manual_seed(args.seed))

    if args.prompt is None and sys.stdin.isatty():
        converse(model, tokenizer, not args.no_thinking, sampling, args.complete)
        return
    text = args.prompt if args.prompt is not None else sys.stdin.read().strip()
    if not text:
        raise UserError("no question: stdin is empty", "give one as an argument or on stdin")
    if args.complete:
        print(text + complete(model, tokenizer, text, sampling))
    else:
        show(answer(model, tokenizer, [{"role": "user", "content": text}], not args.no_thinking, sampling))


if __name__ == "__main__":
    sys.exit(run_main(main))
