"""Requests of the OpenAI API, with what vLLM adds to them, as far as they are served.

Names are those of OpenAI's reference and of vLLM's `entrypoints/openai/*/protocol.py`. A key that is not known here is
refused, and so is one that would change the answer and is not served; at the value that changes nothing it is accepted.
Long lists end at their first wrong item (`fail_fast`): to describe millions of them takes minutes, on the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from nemo_runspec.errors import did_you_mean

MAX_LOGPROBS = 20
# Checked on the event loop, for 0.1 s at most, while nobody else is answered.
MAX_MESSAGES, MAX_TOOLS = 10_000, 1_000
NOT_IN_NAMES = r"[<>\n]|^$"  # of functions and of their parameters: `parse_tool_calls` would read no call
LONGEST_VALUE = 60  # characters of a value that a refusal shows


class Strict(BaseModel):
    """What may have no other key."""

    model_config = ConfigDict(extra="forbid")


class Request(Strict):
    """What every request may say."""

    model: str | None = None


StopString = Annotated[str, Field(min_length=1, max_length=256)]


def shown(value: Any) -> str:
    """A value as JSON, for a refusal: cut where it is long."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece
        if len(text) > LONGEST_VALUE:  # of 16 MiB the rest takes a second
            return f"{text[: LONGEST_VALUE - 1]}…"
    return text


def _as_list(stop: Any) -> Any:
    if stop is not None and not isinstance(stop, str | list):
        raise ValueError(f"{shown(stop)} is not served; text or a list of texts is expected")
    return [stop] if isinstance(stop, str) else stop or []


class StreamOptions(Strict):
    """`include_usage`: the last chunk counts tokens. OpenAI's obfuscation of streams is not needed and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] | None = None


class Generation(Request):
    """How a completion is drawn, the same for chat and text."""

    n: int | None = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=16)] = []
    stop_token_ids: list[int] | None = Field(None, fail_fast=True)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    add_special_tokens: bool | None = None

    # Accepted at the value that changes nothing.
    frequency_penalty: float | None = Field(0, ge=0, le=0)
    presence_penalty: float | None = Field(0, ge=0, le=0)
    repetition_penalty: float | None = Field(1, ge=1, le=1)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    top_k: Annotated[int | None, BeforeValidator(lambda number: 0 if number == -1 else number)] = Field(0, ge=0, le=0)
    min_p: float | None = Field(0, ge=0, le=0)
    min_tokens: int | None = Field(0, ge=0, le=0)
    ignore_eos: Literal[False] | None = None
    skip_special_tokens: Literal[False] | None = None
    spaces_between_special_tokens: bool | None = None

    # Said by clients for the accounts of a hosted service.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stream_options")
    @classmethod
    def _is_streamed(cls, options: StreamOptions | None, before: ValidationInfo) -> StreamOptions | None:
        if options is not None and not before.data.get("stream"):
            raise ValueError("needs stream: true")
        return options

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class JsonSchema(Strict):
    """A schema by its name. `strict` or not, it is kept."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer has to be: any text, a JSON object, or what a schema says."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given where type is json_schema, and only there")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that an answer has to fit; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


class Function(Strict):
    """A function that a model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _can_be_written(cls, name: str) -> str:
        if re.search(NOT_IN_NAMES, name):
            raise ValueError(f"{shown(name)} is no name that a call can have; one without <, > and line breaks is")
        return name

    @field_validator("parameters")
    @classmethod
    def _are_objects(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        properties = (parameters or {}).get("properties") or {}
        if not isinstance(properties, dict) or not all(isinstance(about, dict) for about in properties.values()):
            raise ValueError("properties: an object of objects expected")
        for name in properties:
            cls._can_be_written(name)
        lists = {"required": (parameters or {}).get("required")}
        lists |= {f"properties.{name}.enum": about.get("enum") for name, about in properties.items()}
        for name, values in lists.items():
            if values is not None and not isinstance(values, list):
                raise ValueError(f"{name}: a list expected")
        return parameters

    def declared(self) -> dict[str, Any]:
        """As chat templates show it."""
        return self.model_dump(exclude_unset=True, exclude={"strict"})


class Tool(Strict):
    """A tool; there are only functions."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The choice of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class ToolCall(BaseModel):
    """A call that a model made earlier; its arguments are JSON, or an object."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: dict[str, Any]

    def as_called(self) -> dict[str, Any]:
        """The call as chat templates show it. ValueError: its arguments are no JSON."""
        arguments = self.function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except RecursionError:
                raise ValueError("they are nested too deeply") from None
        return {"name": self.function.get("name"), "arguments": arguments}


def _as_text(content: Any) -> Any:
    """A content that is a list of parts, as one text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part of type {kind!r}; there is only text")
    return "".join(part["text"] for part in content)


class ChatMessage(BaseModel):
    """A message of a conversation. What else clients send back of a message (its refusal, its name) is not shown."""

    role: str
    content: Annotated[str | None, BeforeValidator(_as_text)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)

    def as_message(self) -> dict[str, Any]:
        """As `kit.chat` takes it. ValueError: arguments of a call are no JSON object."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.role == "assistant":
            if reasoning := self.reasoning_content or self.reasoning:
                message["reasoning_content"] = reasoning
            if self.tool_calls:
                message["tool_calls"] = [call.as_called() for call in self.tool_calls]
            elif self.content is None:
                message["content"] = ""
        return message


class NvExt(Strict):
    """Where the clients of NIM put the budget of reasoning."""

    max_thinking_tokens: int | None = Field(None, ge=0)


class Conversation(Request):
    """What becomes the prompt of a chat."""

    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @field_validator("messages")
    @classmethod
    def _calls_are_objects(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        for i, message in enumerate(messages):
            try:
                message.as_message()
            except ValueError as failure:
                raise ValueError(f"{i}: arguments of a tool call are no JSON: {failure}") from None
        return messages


class ChatRequest(Conversation, Generation):
    """POST /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    max_thinking_tokens: int | None = Field(None, ge=0)
    thinking_token_budget: int | None = Field(None, ge=-1)
    nvext: NvExt | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _is_served(cls, choice: Any) -> Any:
        if not isinstance(choice, str | dict | None):
            named = '{"type": "function", "function": {"name": …}}'
            raise ValueError(f"{shown(choice)} is not served; none, auto, required or {named} is expected")
        return choice

    @field_validator("tool_choice")
    @classmethod
    def _tools_are_declared(cls, choice: str | NamedTool | None, before: ValidationInfo) -> str | NamedTool | None:
        names = [tool.function.name for tool in before.data.get("tools") or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            hint = did_you_mean(choice.function.name, names)
            raise ValueError(f"no tool {choice.function.name!r} in tools" + (f"; {hint}" if hint else ""))
        if choice == "required" and not names:
            raise ValueError("required, and there are no tools")
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _logprobs_are_wanted(cls, number: int | None, before: ValidationInfo) -> int | None:
        if number and not before.data.get("logprobs"):
            raise ValueError(f"{number} needs logprobs: true")
        return number

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of reasoning, at most, by whichever name a client gave it; None: any number."""
        of_nim = self.nvext.max_thinking_tokens if self.nvext else None
        for budget in (self.max_thinking_tokens, self.thinking_token_budget, of_nim):
            if budget is not None and budget >= 0:
                return budget
        return None

    @property
    def declared_tools(self) -> list[dict[str, Any]] | None:
        """The functions that the model is told of; None where it may not call any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.function.declared() for tool in self.tools]

    @property
    def required_tools(self) -> list[dict[str, Any]] | None:
        """Those of which it has to call one; None where it need not."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.declared_tools or () if tool["name"] == name]
        return self.declared_tools if self.tool_choice == "required" else None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_served(cls, prompt: Any) -> Any:
        """Said here, since pydantic says what is wrong in each form of a union, and no form is meant the most."""

        def all_are(kind: type, values: Any) -> bool:
            return isinstance(values, list) and all(type(each) is kind for each in values)

        if not (
            isinstance(prompt, str)
            or all_are(str, prompt)
            or all_are(int, prompt)
            or (all_are(list, prompt) and all(all_are(int, each) for each in prompt))
        ):
            raise ValueError("text, a list of texts, a list of token ids, or a list of such lists is expected")
        return prompt

    @field_validator("prompt")
    @classmethod
    def _some_text(cls, prompt: Any) -> Any:
        if not prompt or any(not each for each in prompt if not isinstance(each, int)):
            raise ValueError("is empty")
        return prompt

    @field_validator("echo")
    @classmethod
    def _is_whole(cls, echo: bool | None, before: ValidationInfo) -> bool | None:
        if echo and before.data.get("stream"):
            raise ValueError("true is not served with stream: true")
        return echo

    @field_validator("max_tokens")
    @classmethod
    def _something_is_asked(cls, number: int | None, before: ValidationInfo) -> int | None:
        if number == 0 and not before.data.get("echo"):
            raise ValueError("0 needs echo: true")
        return number

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts one by one, each as text or as tokens."""
        prompt: Any = self.prompt
        several: Sequence[str | list[int]] = (
            [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        )
        return several


class TokenizeText(Request):
    """POST /tokenize of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(Conversation):
    """POST /tokenize of a conversation."""

    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(Request):
    """POST /detokenize."""

    tokens: list[int] = Field(fail_fast=True)
