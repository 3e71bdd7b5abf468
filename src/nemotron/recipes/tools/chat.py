"""Talk to a trained model, for `nemotron FAMILY chat`, which finds it and starts this script.

The chat template is the one in the model's record, the tokenizer's own, or that of the family that made the model.
Without a prompt, questions come from the terminal, or one question from stdin. The model runs on the GPU if there is
one. This is a tool and no step of a recipe: it reads no config and publishes nothing, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which Ctrl-C is to end in one line, too
    from nemo_runspec.errors import end_on_signals

    end_on_signals()

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit.chat import generation_prompt, parse_response, render
from nemotron.kit.chat_templates import TEMPLATES
from nemotron.recipes.tools.options import run_tool
from nemotron.recipes.tools.template import chat_template_of
from nemotron.stack.evaluation.model import load_tokenizer, model_generate_fn
from nemotron.stack.evaluation.scoring import GenerateFn
from nemotron.stack.models import NemotronH

HELP = "/think on|off  reasoning    /reset  forget the conversation    /quit"


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY chat`, and what the command knows of the model.

    `model` is the folder of its config and weights, `tokenizer` that of its tokenizer where it is another one.
    `recorded_template` and `producer` (as in `nano3/sft`) are those of its record. `complete` continues plain text,
    without the chat template.
    """

    model: str
    tokenizer: str | None
    recorded_template: str | None
    producer: str | None
    template: str | None
    prompt: str | None
    thinking: bool
    complete: bool
    temperature: float
    max_new_tokens: int
    seed: int


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
        return completion.text

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


def main(options: Options) -> None:
    """Load the model, answer."""
    if not (Path(options.model) / "config.json").is_file():
        raise UserError(f"no config.json in {options.model}", "give the payload directory of a model artifact")
    folder = Path(options.tokenizer or options.model)
    tokenizer = load_tokenizer(folder)
    template = None
    if not options.complete:
        template = options.template or chat_template_of(folder, options.recorded_template, options.producer)
        if template is None:
            hint = f"--template takes one by name ({', '.join(TEMPLATES)}) or path"
            raise UserError(f"no chat template in {folder}, and none is known of the model", hint)
    model = load_model(Path(options.model), tokenizer)
    generate = model_generate_fn(model, folder, template, max_new_tokens=options.max_new_tokens)
    speaker = Speaker(generate, template or "", options.temperature, options.seed)

    if options.prompt is None and sys.stdin.isatty():
        converse(speaker, options.thinking, options.complete)
        return
    text = options.prompt if options.prompt is not None else sys.stdin.read().strip()
    if not text:
        raise UserError("no question: stdin is empty", "give one as an argument or on stdin")
    if options.complete:
        print(text + speaker.complete(text))
    else:
        show(speaker.answer([{"role": "user", "content": text}], options.thinking))


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
