"""Requests and responses of the OpenAI API, with what vLLM adds to it, as far as they are served.

Names are those of OpenAI's reference and of vLLM's `entrypoints/openai/*/protocol.py`. A key that is not known here is
refused, and so is one that would change the answer and is not served; at the value that changes nothing it is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_LOGPROBS = 20


class Request(BaseModel):
    """What every request may say."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None


StopString = Annotated[str, Field(min_length=1, max_length=256)]


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop or []


class StreamOptions(BaseModel):
    """`include_usage`: the last chunk counts tokens. OpenAI's obfuscation of streams is not needed and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Request):
    """How a completion is drawn, the same for chat and text."""

    n: int | None = Field(1, ge=1, le=128)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=16)] = []
    stop_token_ids: list[int] | None = None
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
    top_k: int | None = Field(-1, ge=-1, le=0)
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

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class JsonSchema(BaseModel):
    """A schema by its name. `strict` or not, it is kept."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
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


class Function(BaseModel):
    """A function that a model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _are_objects(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        properties = (parameters or {}).get("properties") or {}
        if not isinstance(properties, dict) or not all(isinstance(about, dict) for about in properties.values()):
            raise ValueError("properties: an object of objects expected")
        lists = {"required": (parameters or {}).get("required")}
        lists |= {f"properties.{name}.enum": about.get("enum") for name, about in properties.items()}
        for name, values in lists.items():
            if values is not None and not isinstance(values, list):
                raise ValueError(f"{name}: a list expected")
        return parameters

    def declared(self) -> dict[str, Any]:
        """As chat templates show it."""
        return self.model_dump(exclude_unset=True, exclude={"strict"})


class Tool(BaseModel):
    """A tool; there are only functions."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """The choice of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class ToolCall(BaseModel):
    """A call that a model made earlier; its arguments are JSON, or an object."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: dict[str, Any]

    def as_called(self) -> dict[str, Any]:
        """The call as chat templates show it. ValueError: its arguments are no JSON object."""
        arguments = self.function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
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
    tool_calls: list[ToolCall] | None = None

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


class NvExt(BaseModel):
    """Where the clients of NIM put the budget of reasoning."""

    model_config = ConfigDict(extra="forbid")
    max_thinking_tokens: int | None = Field(None, ge=0)


class Conversation(Request):
    """What becomes the prompt of a chat."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
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

    @model_validator(mode="after")
    def _tools_are_declared(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool {self.tool_choice.function.name!r} in tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, and there are no tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

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
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    response_format: ResponseFormat | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _some_text(self) -> CompletionRequest:
        if not self.prompt or any(not prompt for prompt in self.prompts()):
            raise ValueError("prompt: empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        if self.echo and self.stream:
            raise ValueError("echo: not with stream: true")
        return self

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

    tokens: list[int]


def only_if_given() -> Any:
    """A field of a response that is left out where it is None: OpenAI's own are null then, vLLM's additions are not."""
    return Field(default=None, exclude_if=lambda value: value is None)


class TokenLogprob(BaseModel):
    """A token and its log-probability; `bytes` is null where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob):
    """The token that was drawn, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of an answer, reasoning and the token that ended it included."""

    content: list[TokenLogprobs]


class CompletionLogprobs(BaseModel):
    """The same for a completion; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(BaseModel):
    """`arguments`: JSON of an object."""

    name: str
    arguments: str


class Call(BaseModel):
    """A tool call of an answer, whole; `index` in streams."""

    index: int | None = only_if_given()
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """A message of the assistant. The reasoning goes by both names that clients know."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = only_if_given()


class AnswerDelta(BaseModel):
    """What is new in it."""

    role: Literal["assistant"] | None = only_if_given()
    content: str | None = only_if_given()
    reasoning_content: str | None = only_if_given()
    reasoning: str | None = only_if_given()
    tool_calls: list[Call] | None = only_if_given()


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = only_if_given()


class ChatChoice(_Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    """A piece of one answer."""

    delta: AnswerDelta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(_Choice):
    """A completion, or in a stream a piece of it. `prompt_token_ids`: of its prompt, in a stream with the first one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = only_if_given()


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class _Response(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = only_if_given()


class ChatResponse(_Response):
    """What POST /v1/chat/completions answers; in a stream, a chunk."""

    choices: Sequence[ChatChoice | ChatChunkChoice]
    prompt_token_ids: list[int] | None = only_if_given()


class CompletionResponse(_Response):
    """What POST /v1/completions answers, also in a stream."""

    choices: Sequence[CompletionChoice]
