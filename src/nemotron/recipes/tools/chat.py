"""Talk to a trained model: python chat.py --model DIR [--prompt TEXT] [--no-thinking] [--complete]

DIR holds config.json and model.safetensors, and tokenizer.json unless --tokenizer names its folder. The chat template
is the one in the model's record (--recorded-template), the tokenizer's own, or that of the family that made the model
(--producer, as in nano3/sft). Without --prompt, questions come from the terminal, or one question from stdin.
`nemotron nano3 chat` finds all of this and starts this script. The model runs on the GPU if there is one. This is a
tool and no step of a recipe: it reads no config and publishes nothing, so it takes plain options and carries no runspec
block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which Ctrl-C is to end in one line, too
    from nemo_runspec.errors import end_on_signals

    end_on_signals()

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, run_main
from nemotron.kit.chat import IM_END, generation_prompt, parse_response, render
from nemotron.kit.chat_template import TEMPLATES
from nemotron.kit.commands import command_hint
from nemotron.recipes.tools.template import chat_template_of
from nemotron.stack.evaluation import GenerateFn, load_tokenizer, model_generate_fn
from nemotron.stack.models import NemotronH

HELP = "/think on|off  reasoning    /reset  forget the conversation    /quit"
END_OF_TEXT = "</s>"


@dataclass(frozen=True)
class Speaker:
    """A model that continues text, and talks under a chat template (a family's name or a path).

    `temperature` 0 is greedy; at others `seed` decides which tokens are drawn.
    """

    generate: GenerateFn
    template: str
    temperature: float = 0.0
    seed: int = 0

    def complete(self, text: str) -> str:
        """The continuation of `text`, without the token that ended it; other special tokens are kept."""
        (completion,) = self.generate([text], temperature=self.temperature, seed=self.seed)
        return completion.text.removesuffix(IM_END).removesuffix(END_OF_TEXT)

    def answer(self, messages: list[dict[str, str]], thinking: bool) -> dict[str, str]:
        """The assistant's next message: content, and reasoning_content when it reasoned."""
        prompt = render(messages, enable_thinking=thinking, add_generation_prompt=True, template=self.template)
        # `<think>` stands in the prompt, and is yet a part of the response.
        opened = generation_prompt(self.template, thinking).partition("\n")[2]
        reasoning, content = parse_response(opened + self.complete(prompt))
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message


def load_model(folder: Path, tokenizer: Tokenizer) -> NemotronH:
    """The model in `folder`: in bf16 on the GPU if there is one, else in fp32.

    Raises:
        UserError: see `NemotronH.from_pretrained`; the tokenizer has tokens that the model does not know.
    """
    gpu = torch.cuda.is_available()
    model = NemotronH.from_pretrained(folder, torch.bfloat16 if gpu else torch.float32, "cuda" if gpu else "cpu")
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model only {model.config.vocab_size}",
            "give the tokenizer that the model was trained with",
        )
    return model


def show(message: dict[str, str]) -> None:
    """Print an answer; the reasoning goes to stderr, dimmed on a terminal, so that stdout is the answer alone."""
    if reasoning := message.get("reasoning_content"):
        dim, reset = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}{reasoning}{reset}", file=sys.stderr, flush=True)
    if not message["content"]:
        print("(no answer within --max-new-tokens)", file=sys.stderr)
    print(message["content"], flush=True)


def converse(speaker: Speaker, thinking: bool, plain: bool = False) -> None:
    """Questions and answers until end of input or /quit; earlier turns stay in the prompt.

    With `plain` each line is continued as text instead, for a base model.
    """
    print(HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt) as end:
            print(file=sys.stderr)  # what the shell or the error says next begins a line
            if isinstance(end, EOFError):
                return
            raise
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
        elif line in ("/think on", "/think off"):
            thinking = line.endswith("on")
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line and plain:
            print(line + speaker.complete(line), flush=True)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append(speaker.answer(messages, thinking))
            show(messages[-1])


def main() -> None:
    """Parse the command line, load the model, answer."""
    parser = argparse.ArgumentParser(description="Talk to a trained model.")
    parser.add_argument("--model", type=Path, required=True, help="directory with the model and its tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json (default: that of the model)")
    parser.add_argument("--template", help="chat template, by name or path (default: the model's own)")
    parser.add_argument("--recorded-template", help="the chat template in the model's record")
    parser.add_argument("--producer", help="the recipe that made the model, as in nano3/sft")
    parser.add_argument("--prompt", help="one question instead of a conversation")
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning")
    parser.add_argument("--complete", action="store_true", help="continue plain text, without the chat template")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer, reasoning included")
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args()
    if args.temperature < 0 or args.max_new_tokens < 1:
        parser.error("--temperature must be at least 0, --max-new-tokens at least 1")

    if not (args.model / "config.json").is_file():
        raise UserError(f"no config.json in {args.model}", "give the payload directory of a model artifact")
    folder = args.tokenizer or args.model
    tokenizer = load_tokenizer(folder)
    template = args.template or chat_template_of(folder, args.recorded_template, args.producer)
    if template is None and not args.complete:
        hint = f"--template takes one by name ({', '.join(TEMPLATES)}) or path; --complete continues plain text"
        raise UserError(f"no chat template in {folder}, and none is known of the model", hint)
    model = load_model(args.model, tokenizer)
    generate = model_generate_fn(model, tokenizer, max_new_tokens=args.max_new_tokens)
    speaker = Speaker(generate, template or "", args.temperature, args.seed)

    if args.prompt is None and sys.stdin.isatty():
        converse(speaker, not args.no_thinking, args.complete)
        return
    text = args.prompt if args.prompt is not None else sys.stdin.read().strip()
    if not text:
        raise UserError("no question: stdin is empty", "give one as an argument or on stdin")
    if args.complete:
        print(text + speaker.complete(text))
    else:
        show(speaker.answer([{"role": "user", "content": text}], not args.no_thinking))


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
