"""Talk to a trained model, for `nemotron FAMILY chat`, which finds it and starts this script.

Without a prompt, questions come from the terminal, or one question from stdin. The model runs on the GPU if there is
one. This is a tool and no step of a recipe: it reads no config and publishes nothing, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit.chat import END_THINK, THINK, answer_prompt, opens_reasoning, parse_response
from nemotron.kit.chat_template import load_template
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import load_tokenizer, model_stream_fn, reasoning_budget
from nemotron.stack.models import NemotronH
from nemotron.stack.quantization.export import load_model as read_model

HELP = "/think on|off|TOKENS  reasoning    /reset  forget the conversation    /quit    Ctrl-C  end an answer"


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY chat`, and what the command knows of the model.

    `model` is the folder of its config and weights, `tokenizer` that of its tokenizer. `template`: its chat template,
    by name or path; None: it continues plain text. `max_reasoning`: tokens of reasoning, at most; 0: none.
    """

    model: str
    tokenizer: str
    template: str | None
    prompt: str | None
    max_reasoning: int | None
    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Speaker:
    """A model that continues text, and talks under a chat template (a family's name or a path).

    `stream` yields the continuation of a prompt piece by piece, without the token that ended it, with so many tokens of
    reasoning at most. `patient`: Ctrl-C ends an answer, and not the conversation. `check_budget` raises UserError for
    a number of tokens of reasoning that it cannot be held to.
    """

    stream: Callable[[str, int | None], Iterator[str]]
    template: str
    patient: bool = False
    check_budget: Callable[[int], object] = lambda max_reasoning: None

    def answer(self, messages: list[dict[str, str]], max_reasoning: int | None) -> dict[str, str]:
        """The assistant's next message, shown while it is written: content, and reasoning_content when it reasoned.

        `max_reasoning`: tokens of reasoning, at most; 0: none; None: any number.
        Ctrl-C ends it where the speaker is `patient`: what was written by then is the message.
        """
        prompt = answer_prompt(messages, thinking=max_reasoning != 0, template=self.template)
        # What opens reasoning or leaves it out stands in the prompt, and is yet a part of the response. Under Nano 2 it
        # is a matter of words in the messages.
        text = {True: f"{THINK}\n", False: THINK + END_THINK, None: ""}[opens_reasoning(prompt)]
        shown, ending = Shown(), "no answer within --max-new-tokens"
        try:
            for piece in self.stream(prompt, max_reasoning or None):
                text += piece
                shown.update(text)
        except KeyboardInterrupt:
            if not self.patient:
                raise
            ending = "stopped"
        shown.end(text, ending)
        reasoning, content = parse_response(text)
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message

    def complete(self, text: str) -> None:
        """Print `text` and its continuation while it is written, special tokens included; Ctrl-C as in `answer`."""
        print(text, end="", flush=True)
        try:
            for piece in self.stream(text, None):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not self.patient:
                raise
        print(flush=True)


class Shown:
    """An answer on the terminal, as far as it is written: reasoning on stderr, dimmed there, the content on stdout."""

    def __init__(self) -> None:
        self._reasoning = self._content = 0  # characters shown
        self._dim, self._reset = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")

    def update(self, text: str) -> None:
        """Show what is new in the response `text`, but what may be the beginning of a tag, and blanks at its end."""
        if THINK.startswith(text.lstrip()):
            return
        cut = next((n for n in range(len(END_THINK) - 1, 0, -1) if text.endswith(END_THINK[:n])), 0)
        self._show(text[: len(text) - cut])

    def end(self, text: str, ending: str) -> None:
        """Show the rest, and end the line; where there is no content, `ending` says why."""
        self._show(text)
        if not self._content:
            before = "\n" if self._reasoning else ""
            print(f"{before}({ending})", file=sys.stderr, flush=True)
        print(flush=True)

    def _show(self, text: str) -> None:
        reasoning, content = parse_response(text)
        if new := (reasoning or "")[self._reasoning :]:
            print(f"{self._dim}{new}{self._reset}", end="", file=sys.stderr, flush=True)
            self._reasoning += len(new)
        if new := content[self._content :]:
            if self._reasoning and not self._content:
                print(file=sys.stderr, flush=True)
            print(new, end="", flush=True)
            self._content += len(new)


def load_model(folder: Path, tokenizer: Tokenizer) -> NemotronH:
    """The model in `folder`: in bf16 on the GPU if there is one, else in fp32.

    Raises:
        UserError: see `quantization.export.load_model`; the tokenizer has tokens that the model does not know.
    """
    gpu = torch.cuda.is_available()
    model = read_model(folder, torch.bfloat16 if gpu else torch.float32, "cuda" if gpu else "cpu")
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model only {model.config.vocab_size}",
            "give the tokenizer that the model was trained with",
        )
    return model


def check_text(text: str) -> str:
    """`text`, unless it came from bytes that are not UTF-8, which Python keeps as lone surrogates: UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = f"byte 0x{ord(text[error.start]) & 0xFF:02x} after {error.start} characters"
        raise UserError(f"the question is not UTF-8: {byte}", "convert it first: iconv -f latin1 -t utf-8") from None
    return text


def converse(speaker: Speaker, max_reasoning: int | None, plain: bool = False) -> None:
    """Questions and answers until end of input or /quit; earlier turns stay in the prompt.

    With `plain` each line is continued as text instead, for a base model.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines and remembers them once it is loaded
    print(HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = check_text(input("> ").strip())
        except UserError as error:
            print(error.message, file=sys.stderr)
            continue
        except (EOFError, KeyboardInterrupt) as end:
            print(file=sys.stderr)  # what the shell or the error says next begins a line
            if isinstance(end, EOFError):
                return
            raise
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
        elif how := re.fullmatch(r"/think (on|off|[0-9]+)", line):
            wanted = {"on": None, "off": 0}[how[1]] if how[1].isalpha() else int(how[1])
            try:
                if wanted and not plain:
                    speaker.check_budget(wanted)
                elif wanted == 0 and not plain:
                    load_template(speaker.template).check_switch("enable_thinking")
                max_reasoning = wanted
            except UserError as error:
                print(error.message, file=sys.stderr)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line and plain:
            speaker.complete(line)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, speaker.answer(asked, max_reasoning)]
            except UserError as error:  # the template refuses the question
                print(error.message, file=sys.stderr)


def main(options: Options) -> None:
    """Load the model, answer."""
    folder, template = Path(options.tokenizer), options.template
    tokenizer = load_tokenizer(folder)
    check_budget = partial(reasoning_budget, folder, template or "", max_new_tokens=options.max_new_tokens)
    if options.max_reasoning and template is not None:
        check_budget(options.max_reasoning)
    model = load_model(Path(options.model), tokenizer)
    stream = model_stream_fn(
        model, folder, template, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
        seed=options.seed,
    )  # fmt: skip
    interactive = options.prompt is None and sys.stdin.isatty()
    speaker = Speaker(stream, template or "", patient=interactive, check_budget=check_budget)

    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are not UTF-8 get as far as `check_text`
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if interactive:
        converse(speaker, options.max_reasoning, plain=template is None)
        return
    text = check_text(options.prompt if options.prompt is not None else sys.stdin.read().strip())
    if not text:
        raise UserError("no question: stdin is empty", "give one as an argument or on stdin")
    if template is None:
        speaker.complete(text)
    else:
        speaker.answer([{"role": "user", "content": text}], options.max_reasoning)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
