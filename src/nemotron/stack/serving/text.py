"""What a model writes, token by token, as text, reasoning, answer and tool calls, as far as each is certain.

The whole is what `kit.chat` makes of the whole: `parse_response` of the response, `parse_tool_calls` of its answer. A
piece is held back while what follows may still change what it is: half of a character, of a stop string or of a tag,
blanks that may turn out to be the last ones, a call until it is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nemotron.kit.chat import END_THINK, THINK, Opening, Tool, parse_tool_calls


def begun(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of the marks; the longest such end."""
    return max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])), default=0
    )


class TokenText:
    """Tokens as text, special ones included, up to a stop token or the first stop string, neither of which is shown.

    `stopped_by`: the string or the id of the token that ended it; None so far.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.stopped_by: str | int | None = None
        self._tokenizer, self._stop_token_ids, self._stops = tokenizer, frozenset(stop_token_ids), tuple(stops)
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._decoded = 0  # characters that the decoder has given
        self._held = ""

    def push(self, token: int) -> str:
        """What one more token makes certain."""
        if token in self._stop_token_ids:
            self.stopped_by = token
            return ""
        self._ids.append(token)
        piece = self._decoder.step(self._tokenizer, token) or ""
        self._decoded += len(piece)
        return self._show(piece)

    def end(self) -> str:
        """The rest, where no stop string ended it."""
        if isinstance(self.stopped_by, str):
            return ""
        # A character that was cut off in the middle, as the tokenizer shows one.
        shown = self._show(self._tokenizer.decode(self._ids, skip_special_tokens=False)[self._decoded :])
        rest, self._held = self._held, ""
        return shown if isinstance(self.stopped_by, str) else shown + rest

    def _show(self, piece: str) -> str:
        text = self._held + piece
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            self._held, self.stopped_by = "", found[1]
            return text[: found[0]]
        keep = len(text) - begun(text, self._stops)
        self._held = text[keep:]
        return text[:keep]


@dataclass
class Delta:
    """What is new in a response: characters of its reasoning and of its answer, and calls ({name, arguments})."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, later: Delta) -> Delta:
        return Delta(self.reasoning + later.reasoning, self.content + later.content, self.calls + later.calls)


class ResponseText:
    """The text of a response, split as it is written.

    Args:
        opening: how its prompt ends. Of a response that opens its own reasoning the tag has to come first: what stood
            before a lone `</think>` would else be known only at the end.
        tools: that may be called; None: calls stay in the answer.
    """

    def __init__(self, opening: Opening, tools: Sequence[Tool] | None) -> None:
        self._part, self._tools = opening, tools
        self._tag = ""  # that has begun
        self._reasoning, self._content = _Trimmed(), _Trimmed()
        # As `parse_tool_calls` does it: first the calls of Nemotron 3, then the lists of Nano v2 in what is left.
        self._takers = (
            _CallTaker("<tool_call>", "<function=", "</tool_call>", tools or ()),
            _CallTaker("<TOOLCALL>", "[", "</TOOLCALL>", tools or ()),
        )

    @property
    def reasons(self) -> bool:
        """Whether the next token still belongs to the reasoning."""
        return self._part == "reasoning"

    def push(self, text: str) -> Delta:
        """What `text`, which continues the response, makes certain."""
        text, self._tag = self._tag + text, ""
        if self._part == "unknown":
            begin = text.lstrip()
            if len(begin) < len(THINK) and THINK.startswith(begin):
                self._tag = text
                return Delta()
            opens = begin.startswith(THINK)
            self._part, text = ("reasoning", begin[len(THINK) :]) if opens else ("answer", text)
        if self._part == "answer":
            return self._answer(text)
        before, closed, after = text.partition(END_THINK)
        if closed:
            self._part = "answer"
            delta = self._answer(after)
            return Delta(self._reasoning.push(before), delta.content, delta.calls)
        keep = len(before) - begun(before, (END_THINK,))
        self._tag = before[keep:]
        return Delta(self._reasoning.push(before[:keep]))

    def end(self) -> Delta:
        """The rest."""
        if self._part == "reasoning":
            return Delta(self._reasoning.push(self._tag))
        delta = self._answer(self._tag)
        self._tag = ""
        if self._tools is not None:
            left = ""
            for taker in self._takers:
                text, calls = taker.push(left)
                left = text + taker.end()
                delta.calls += calls
            delta.content += self._content.push(left)
        return delta

    def _answer(self, text: str) -> Delta:
        found: list[dict[str, Any]] = []
        if self._tools is not None:
            for taker in self._takers:
                text, calls = taker.push(text)
                found += calls
        return Delta("", self._content.push(text), found)


class _Trimmed:
    """A text without the blanks around it."""

    def __init__(self) -> None:
        self._began, self._blanks = False, ""

    def push(self, text: str) -> str:
        text = self._blanks + text
        if not self._began:
            text = text.lstrip()
        shown = text.rstrip()
        self._began, self._blanks = self._began or bool(shown), text[len(shown) :]
        return shown


class _CallTaker:
    """A text without the calls in it that stand between two tags, and a line break behind each.

    first: what comes next in whatever may become a call; `parse_tool_calls` says whether it is one.
    """

    def __init__(self, opening: str, first: str, closing: str, tools: Sequence[Tool]) -> None:
        self._opening, self._first, self._closing, self._tools = opening, first, closing, tools
        self._text = ""  # not shown yet
        self._tried = 0  # characters of it up to which there is no call
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What of it is text for certain, and the calls that are closed."""
        self._text += text
        shown, calls = "", []
        while self._text:
            if self._after_call:
                self._text, self._after_call = self._text.removeprefix("\n"), False
                continue
            start = self._text.find(self._opening)
            if start != 0:  # text before a tag, or before what may be the beginning of one
                end = start if start > 0 else len(self._text) - begun(self._text, (self._opening,))
                shown += self._release(end)
                if start < 0:
                    break
                continue
            inside = len(self._opening)
            begin = self._text[inside:].lstrip()[: len(self._first)]
            following = self._text.find(self._opening, inside)
            closing = self._text.find(self._closing, max(inside, self._tried))
            if not self._first.startswith(begin):
                shown += self._release(inside)
            elif closing >= 0 and (following < 0 or closing < following):
                self._tried = closing + len(self._closing)
                left, called = parse_tool_calls(self._text[: self._tried], self._tools)
                if called and not left:
                    calls += called
                    self._release(self._tried)
                    self._after_call = True
            elif following >= 0:  # no call has another one in it
                shown += self._release(following)
            else:
                break
        return shown, calls

    def end(self) -> str:
        """The rest: a call that was not closed is text."""
        return self._release(len(self._text))

    def _release(self, end: int) -> str:
        released, self._text, self._tried = self._text[:end], self._text[end:], 0
        return released
