"""A chat template: Jinja source that turns messages into text, and says which of the text the model writes itself.

The families' templates are `chat_templates/NAME.jinja`; any other is taken by path. They are rendered as inference
engines render them: sandboxed, with the filter `tojson` and the functions of Hugging Face transformers. What stands
between `{% generation %}` and `{% endgeneration %}` is what the model writes (transformers reads the same marks for its
assistant mask), and all that training and decoding need besides the text follows from it: loss mask, stop string, how
earlier turns look. Of a template without marks, as most tokenizers have, it is what follows the prompt for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_runspec.errors import UserError
from nemo_runspec.user_files import expanded
from nemotron.kit.chat_templates import CHOICES, FOLDER, TEMPLATES, is_path, unknown

Segment = tuple[str, bool]
"""Text, and whether the model has to write it itself."""

# What opens and ends turns in the templates of public models; `<think>` and `<tools>` are not such.
_TURN_TOKEN = re.compile(r"<\|[^|<>\s]+\|>|<SPECIAL_\d+>|<(?:start|end)_of_turn>")
_INCLUDE = re.compile(r'{%- include "(\w+\.jinja)" -%}')
_PROBE = "probe"
_TURN_NUMBER = re.compile("\ue000([0-9]+)\ue001")  # code points for private use, which no text should have


class ChatTemplate:
    """A compiled template. `name`: as it was asked for; `source`: its Jinja text; `tokens`: what it is rendered with
    beside the conversation (`bos_token`, … of the tokenizer that it belongs to).

    UserError for source that is no Jinja template.
    """

    def __init__(self, name: str, source: str, tokens: Mapping[str, str]) -> None:
        self.name, self.source, self.tokens = name, source, dict(tokens)
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._variables = meta.find_undeclared_variables(parsed)
            self._has_marks = parsed.find(nodes.ExtensionAttribute) is not None
            self._template = environment.from_string(source)
            self._globals: dict[str, Any] = {**self._template.globals, **tokens}
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template {name}, line {error.lineno}: {error.message}") from None

    def segments(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[Segment]:
        """The conversation in order, neighbours of one kind in one segment. UserError where the template refuses it."""
        segments = self._as_marked(messages, **variables)
        if self._has_marks or variables.get("add_generation_prompt"):
            return segments
        return self._by_prompts("".join(text for text, _ in segments), messages, **variables)

    def _by_prompts(self, whole: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[Segment]:
        """`segments` of a template without marks: trained is what follows the prompt for an answer, to the end of turn.

        An answer that looks otherwise in the whole conversation (its reasoning was dropped) is context only; so is one
        that does not begin as its prompt does.
        """
        segments: list[Segment] = []
        done = 0  # characters of `whole` that are in segments
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            upto, begin = "", None
            with suppress(UserError):  # a template may refuse a conversation that ends here
                upto, before = self._text(messages[: i + 1], variables), self._text(messages[:i], variables)
                # Whether the prompt opens reasoning is a switch, and the same switch may hide that of earlier turns.
                prompts = (
                    before + self._opening(messages[:i], variables | {"enable_thinking": thinking})
                    for thinking in dict.fromkeys((variables.get("enable_thinking", True), False, True))
                )
                begin = next((len(prompt) for prompt in prompts if upto.startswith(prompt)), None)
            if begin is None:
                continue
            end = begin + len(upto[begin:].rstrip())
            if self.stop is not None:
                end = upto.rfind(self.stop) + len(self.stop)
            if begin < end and done <= begin and whole.startswith(upto[:end]):
                segments += [(whole[done:begin], False), (whole[begin:end], True)]
                done = end
        return [segment for segment in [*segments, (whole[done:], False)] if segment[0]]

    def _opening(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """What a prompt for an answer adds to the conversation."""
        prompt = self._text(messages, {**variables, "add_generation_prompt": True})
        return prompt.removeprefix(self._text(messages, variables))

    def _text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return "".join(text for text, _ in self._as_marked(messages, **variables))

    def _as_marked(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[Segment]:
        """`segments` by the marks alone."""
        segments: list[Segment] = []
        parts: list[str] = []
        trained = False
        try:
            # As the method `generate` does it, but for what it sets up anew each time.
            context = Context(self._template.environment, self._globals | variables | {"messages": messages}, None, {})
            for part in self._template.root_render_func(context):
                if part is _BEGIN or part is _END:
                    text = "".join(parts)
                    if text:
                        segments.append((text, trained))
                    parts, trained = [], part is _BEGIN
                else:
                    parts.append(part)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,  # it divides by zero
            RecursionError,  # it calls itself
        ) as error:
            raise UserError(f"chat template {self.name}: {error}") from error
        text = "".join(parts)
        return [*segments, (text, trained)] if text else segments

    def segments_without(
        self, untrained: Collection[int], messages: Sequence[Mapping[str, Any]], **variables: Any
    ) -> list[Segment]:
        """As `segments`, with the turns of these indices as context only.

        Which message a trained segment shows is seen by rendering once more, each assistant turn marked by its number.
        UserError: the template trains several turns as one.
        """
        segments = self.segments(messages, **variables)
        marked = [
            {**message, "content": f"\ue000{i}\ue001{message.get('content') or ''}"}
            if message["role"] == "assistant"
            else message
            for i, message in enumerate(messages)
        ]
        shown = [_TURN_NUMBER.findall(text) for text, trained in self.segments(marked, **variables) if trained]
        if any(len(set(numbers)) != 1 for numbers in shown) or len(shown) != sum(trained for _, trained in segments):
            raise UserError(
                f"chat template {self.name} does not mark each answer on its own, so that none can be left out",
                "put {% generation %} and {% endgeneration %} around the text of one message",
            )
        turns = iter(shown)
        segments = [(text, trained and int(next(turns)[0]) not in untrained) for text, trained in segments]
        return [
            ("".join(text for text, _ in neighbours), trained)
            for trained, neighbours in groupby(segments, key=itemgetter(1))
        ]

    def has_switch(self, switch: str) -> bool:
        """Whether the template reads the variable `switch`."""
        return switch in self._variables

    def check_switch(self, switch: str) -> None:
        """UserError if the template does not read the variable `switch`."""
        if not self.has_switch(switch):
            raise UserError(f"chat template {self.name} has no switch {switch}")

    def check_mask(self) -> None:
        """Refuse a template under which a model would learn something else than to answer.

        UserError: in a conversation the answer is not trained, or what others say is; nothing that is trained ends the
        answer; or what opens the assistant's turn is in the conversation, but not in the prompt for an answer.
        """
        system, user, answer, tool = (
            {"role": role, "content": f"{_PROBE} of the {role}"} for role in ("system", "user", "assistant", "tool")
        )
        turns = [user, answer, user, answer]
        conversations = [self.segments(turns)]
        for messages in ([system, *turns], [user, answer, tool, answer]):
            with suppress(UserError):  # not every template takes these roles
                conversations.append(self.segments(messages))
        for segments in conversations:
            trained = [text for text, is_trained in segments if is_trained]
            if not any(answer["content"] in text for text in trained):
                raise self._shows_no_answer()
            for other in (system, user, tool):
                if any(other["content"] in text for text in trained):
                    raise UserError(
                        f"chat template {self.name} also trains what the {other['role']} says",
                        "put {% generation %} and {% endgeneration %} around what the assistant says alone",
                    )
            if not trained[-1].rpartition(answer["content"])[2].strip():
                raise UserError(
                    f"chat template {self.name}: nothing that is trained ends an answer, and a model would never stop",
                    "print the end-of-turn token behind the answer, before {% endgeneration %} where there is one",
                )
        question, whole = self._text(turns[:-1], {}), self._text(turns, {})
        header = whole.removeprefix(question).partition(answer["content"])[0]
        if whole.startswith(question) and header.strip() and not self._opening(turns[:-1], {}).strip():
            raise UserError(
                f"chat template {self.name} opens an answer by {header.strip()!r}, but no prompt for an answer does",
                "print it under {% if add_generation_prompt %}, too",
            )

    @cached_property
    def turn_tokens(self) -> tuple[str, ...]:
        """What opens and ends a turn, sorted: in the source, and in a conversation, as a source may compose it."""
        talk = [{"role": role, "content": _PROBE} for role in ("system", "user", "assistant")]
        text = self.source
        for messages in (talk, talk[1:]):  # some templates refuse a system turn
            with suppress(UserError):
                text += self._text(messages, {"add_generation_prompt": True})
        return tuple(sorted(set(_TURN_TOKEN.findall(text))))

    @cached_property
    def stop(self) -> str | None:
        """The token with which the model ends its turn: what it writes after its answer.

        Of a template without generation marks, the first turn token after the answer; None where there is none.
        """
        segments = self._as_marked(_probe(1))
        marked = [text for text, is_trained in segments if is_trained]
        after = "".join(marked or [text for text, _ in segments]).rpartition(_PROBE)[2]
        if marked:
            return after.strip() or None
        token = _TURN_TOKEN.search(after)
        return token[0] if token else None

    @cached_property
    def keeps_turns(self) -> bool:
        """Whether an earlier answer looks as it was written."""
        return len(self._trained(2)) == 2

    @cached_property
    def keeps_reasoning(self) -> bool:
        """Whether an earlier answer with reasoning looks as it was written."""
        return len(self._trained(2, reasoning_content="because")) == 2

    def _trained(self, turns: int, **fields: str) -> list[str]:
        """What is trained of a conversation of `turns` answers, `fields` in the first of them. UserError: nothing."""
        trained = [text for text, is_trained in self.segments(_probe(turns, **fields)) if is_trained]
        if not trained:
            raise self._shows_no_answer()
        return trained

    def _shows_no_answer(self) -> UserError:
        return UserError(
            f"chat template {self.name} does not show what the model writes",
            "put {% generation %} and {% endgeneration %} around the answer, its end-of-turn token included",
        )


def _probe(turns: int, **fields: str) -> list[dict[str, str]]:
    """A conversation of `turns` answers, `fields` in the first of them."""
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}
    return [user, {**answer, **fields}] + [user, answer] * (turns - 1)


@lru_cache(maxsize=8)
def load_template(template: str) -> ChatTemplate:
    """The template of a family by its name, a file of Jinja source, or that of a tokenizer's folder, by path.

    What has a slash or a dot is a path. UserError: unknown name, missing or unreadable file, a folder without template.
    """
    if is_path(template):
        return _read(template)
    if template not in TEMPLATES:
        raise UserError(unknown(template), f"templates: {CHOICES}")
    source = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    # The source travels with tokenizers as one text, so the parts are put into it here.
    source = _INCLUDE.sub(lambda part: (FOLDER / part[1]).read_text(encoding="utf-8"), source)
    return ChatTemplate(template, source.rstrip("\n"), {})


def keep_template(template: str, folder: Path) -> str | Path:
    """What a record says of a template: a family's name, or for a path the copy of it that this makes below `folder`.

    The user's file may change, and is not there on another machine. The copy is a folder as a tokenizer's is.
    """
    if template in TEMPLATES:
        return template
    chosen, copy = load_template(template), folder / "chat_template"
    copy.mkdir(exist_ok=True)  # of a run that was killed just after
    (copy / "chat_template.jinja").write_text(chosen.source, encoding="utf-8")
    (copy / "tokenizer_config.json").write_text(json.dumps(chosen.tokens), encoding="utf-8")
    return copy


def has_template(folder: Path) -> bool:
    """Whether a tokenizer's folder holds a chat template."""
    settings = _settings(folder / "tokenizer_config.json")
    return (folder / "chat_template.jinja").is_file() or settings.get("chat_template") is not None


def stop_tokens(folder: Path, template: str | None) -> tuple[str, ...]:
    """The tokens that end a response of a model whose tokenizer is in `folder`: the end of a turn and of a document.

    The end of a turn is that of `template`, for None (plain text) that of the folder's own template, if it can be used.
    The end of a document is what the tokenizer names as its `eos_token`, or `</s>`, which Nemotron models have.
    """
    end_of_turn = None
    if template is not None:
        end_of_turn = load_template(template).stop
    elif has_template(folder):
        with suppress(UserError):
            end_of_turn = load_template(str(folder.absolute())).stop
    files = (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    end_of_document = special_token(files, "eos_token") or "</s>"
    return tuple(dict.fromkeys(token for token in (end_of_turn, end_of_document) if token))


def special_token(files: Iterable[Path], name: str) -> str | None:
    """What the settings of a tokenizer, `files`, name as its `eos_token`, `bos_token`, …; None where none does."""
    return next((text for file in files if (text := token_text(_settings(file).get(name)))), None)


def _settings(path: Path) -> dict[str, Any]:
    """A JSON file of a tokenizer; empty where there is none. UserError: it cannot be read, or is no object."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a JSON object ({error})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: not a JSON object")
    return settings


def token_text(token: Any) -> str | None:
    """A special token of `tokenizer_config.json`, written as text or as `{"content": text, …}`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read(location: str) -> ChatTemplate:
    path = expanded(location)
    try:
        if not path.is_dir():
            return ChatTemplate(location, path.read_text(encoding="utf-8"), {})
        config, file = _settings(path / "tokenizer_config.json"), path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"chat template {location} cannot be read: {reason}") from error
    if not isinstance(source, str):
        raise UserError(f"chat template {location}: the tokenizer there has none, or several")
    tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(location, source, {name: token for name, token in tokens.items() if token is not None})


class _Mark(str):
    """A border of what the model writes, in the stream of rendered texts: no text, and known by its identity alone."""

    def __str__(self) -> str:
        return self  # Jinja passes all that it renders through str()


_BEGIN, _END = _Mark(), _Mark()


class _GenerationMarks(Extension):
    """The block `{% generation %}`: what is in it, between `_BEGIN` and `_END`."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it so
    begin, end = _BEGIN, _END

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's statements between the marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([self.attr(name, lineno=line)], lineno=line) for name in ("begin", "end"))
        return [begin, *body, end]


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, which asks once whether an attribute of a type is safe: it is a third of the time otherwise."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, "jinja2.ext.loopcontrols"])
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's answer, which depends on the type of the object and on the name alone."""
        key = type(obj), attr
        if key not in self._safe:
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """As transformers sets one up, by its documentation of chat templates."""
    return _Sandbox()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Characters as they are, without the HTML escapes of Jinja's own; keys in their order, as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
