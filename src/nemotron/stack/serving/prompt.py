"""From a request to what the engine is given: the prompt's tokens, how its answer is drawn, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.chat import END_THINK, Opening, check_messages, opening_of
from nemotron.kit.chat_template import ChatTemplate, load_template
from nemotron.stack.models.decoding.generate import ReasoningBudget
from nemotron.stack.serving.grammar import Grammar
from nemotron.stack.serving.held import calls_in_a_list, calls_in_xml, json_answer
from nemotron.stack.serving.refusals import ApiError
from nemotron.stack.serving.requests import ChatRequest, CompletionRequest, Conversation, Generation, NamedTool
from nemotron.stack.serving.sampling import LEAST_TEMPERATURE, Sampling

# What the server itself says to a template.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
# A level of OpenAI's `reasoning_effort` -> the switch of a template that asks for it; those above it ask for nothing.
_EFFORTS = {"minimal": "low_effort", "low": "low_effort", "medium": "medium_effort"}
_FULL_EFFORTS = ("high", "xhigh", "max")


@dataclass(frozen=True)
class ServedModel:
    """A model as clients know it.

    folder: of the tokenizer. template: its chat template, by name or path; None: it completes text alone. thinking:
    whether it reasons where a request does not say. reasoning: the tokens that end its reasoning, as a budget of none;
    None: its template opens no reasoning. created: when it was made, in Unix seconds. temperature, top_p: where a
    request does not say.
    """

    name: str
    folder: Path
    tokenizer: Tokenizer
    template: str | None
    thinking: bool
    stop_token_ids: tuple[int, ...]
    reasoning: ReasoningBudget | None
    max_length: int
    created: int
    temperature: float = 1.0
    top_p: float = 1.0

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, and so at most those of one of a prompt."""
        return max(map(len, self.tokenizer.get_vocab()))


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, what its answers begin with, and how each of them is drawn."""

    tokens: list[int]
    opening: Opening
    samplings: list[Sampling]


def render_chat(model: ServedModel, body: Conversation, *, add_generation_prompt: bool = True, **defaults: Any) -> str:
    """The text of a conversation. ApiError: the template refuses it or does not have what it asks for."""
    if model.template is None:
        raise ApiError(400, f"{model.name} completes text: it has no chat template; ask /v1/completions")
    template = load_template(model.template)
    switches = {"enable_thinking": model.thinking} | defaults | _switches(model, template, body)
    tools = [tool.function.declared() for tool in body.tools or ()]
    if isinstance(body, ChatRequest):
        tools = body.declared_tools or []
    if tools and not template.has_switch("tools"):
        raise ApiError(400, f"the chat template of {model.name} shows no tools", param="tools")
    messages = [message.as_message() for message in body.messages]
    try:
        check_messages(messages)
        segments = template.segments(
            messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **switches
        )
    except UserError as error:
        message = "; ".join(line for line in (error.message, error.hint) if line)
        # A template's own name may be its path here.
        message = message.replace(f"chat template {template.name}", f"the chat template of {model.name}")
        raise ApiError(400, message, param="messages") from None
    except RecursionError:
        raise ApiError(400, "a value is nested too deeply", param="messages") from None
    text = "".join(text for text, _ in segments)
    if body.reasoning_effort == "none":
        _check_answers(model, text, "reasoning_effort")
    return text


def _check_answers(model: ServedModel, text: str, param: str) -> None:
    """ApiError where a prompt opens reasoning, though `param` asks for none."""
    if opening_of(text) == "reasoning":
        message = f"no reasoning is asked for, and the chat template of {model.name} opens it all the same"
        raise ApiError(400, message, param=param)


def _switches(model: ServedModel, template: ChatTemplate, body: Conversation) -> dict[str, Any]:
    switches = dict(body.chat_template_kwargs or {})
    for name, value in switches.items():
        harmless = name == "enable_thinking" and value is True  # a template without the switch has nothing to turn off
        if name in _OWN_VARIABLES or not (template.has_switch(name) or harmless):
            message = f"the chat template of {model.name} has no switch {name!r}"
            raise ApiError(400, message, param="chat_template_kwargs")
        if isinstance(value, str) and value.lower() in ("true", "false"):  # Jinja takes any text for true
            message = f"{name}: {value!r} is text; {value.lower()} without quotes is expected"
            raise ApiError(400, message, param="chat_template_kwargs")
    effort = body.reasoning_effort
    if effort == "none":
        if switches.get("enable_thinking"):
            message = "no reasoning, and enable_thinking, contradict each other"
            raise ApiError(400, message, param="reasoning_effort")
        return {"enable_thinking": False} | switches
    if effort is None or effort in _FULL_EFFORTS:
        return switches
    levels = ["none", *(level for level, switch in _EFFORTS.items() if template.has_switch(switch)), *_FULL_EFFORTS]
    if effort not in levels:
        hint = did_you_mean(effort, levels) if effort not in _EFFORTS else f"choose from: {', '.join(levels)}"
        message = f"the chat template of {model.name} has no reasoning effort {effort!r}; {hint}"
        raise ApiError(400, message, param="reasoning_effort")
    return {_EFFORTS[effort]: True} | switches


def encode(model: ServedModel, text: str, add_special_tokens: bool = False) -> list[int]:
    """The tokens of a text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the text has a lone surrogate, which no UTF-8 can say") from None
    if len(text) > model.max_length * model.longest_token:  # not worth the seconds of tokenising it
        message = f"this model takes {model.max_length} tokens, and {len(text)} characters are more"
        raise ApiError(400, message, code="context_length_exceeded")
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def chat_prompt(model: ServedModel, body: ChatRequest) -> Prompt:
    """The prompt of a chat request."""
    budget = body.thinking_budget
    if budget == 0 and (body.chat_template_kwargs or {}).get("enable_thinking"):
        raise ApiError(
            400, "no tokens of reasoning, and enable_thinking, contradict each other", param="max_thinking_tokens"
        )
    text = render_chat(model, body, **({"enable_thinking": False} if budget == 0 else {}))
    if budget == 0:
        _check_answers(model, text, "max_thinking_tokens")
    tokens, opening = encode(model, text, bool(body.add_special_tokens)), opening_of(text)
    wanted = body.max_completion_tokens or body.max_tokens
    of_answer = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    limit = _room(model, tokens, wanted, "messages", of_answer)
    return Prompt(tokens, opening, _samplings(model, body, limit, opening, _budget(model, budget, limit)))


def completion_prompts(model: ServedModel, body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request."""
    prompts = []
    special = body.add_special_tokens is not False  # as vLLM does it; tokenizers of the recipes add none
    for text in body.prompts():
        tokens = encode(model, text, special) if isinstance(text, str) else text
        wanted = 16 if body.max_tokens is None else body.max_tokens
        limit = _room(model, tokens, wanted, "prompt", "max_tokens")
        prompts.append(Prompt(tokens, "answer", _samplings(model, body, limit, "answer", None)))
    return prompts


def _room(model: ServedModel, tokens: Sequence[int], wanted: int | None, of_prompt: str, of_answer: str) -> int:
    """Tokens that an answer may have.

    ApiError: prompt and answer are longer than the model takes; it names the field of the one that is to be shorter.
    """
    room, least = model.max_length - len(tokens), 1 if wanted is None else wanted
    if least > room:
        message = (
            f"this model takes {model.max_length} tokens, and {len(tokens)} of the prompt with {least} of the answer "
            f"are {len(tokens) + least}"
        )
        raise ApiError(400, message, param=of_answer if room > 0 else of_prompt, code="context_length_exceeded")
    return room if wanted is None else wanted


def greedy_below(temperature: float) -> float:
    """0 where logits divided by the temperature would be no numbers any more."""
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _budget(model: ServedModel, budget: int | None, limit: int) -> ReasoningBudget | None:
    if not budget:
        return None
    if model.reasoning is None:
        message = f"the chat template of {model.name} opens no reasoning, which a budget could end"
        raise ApiError(400, message, param="max_thinking_tokens")
    if budget + len(model.reasoning.end_ids) >= limit:
        message = (
            f"a reasoning budget of {budget} leaves no answer in {limit} new tokens, of which the end of the reasoning "
            f"takes {len(model.reasoning.end_ids)}"
        )
        raise ApiError(400, message, param="max_thinking_tokens")
    return replace(model.reasoning, max_tokens=budget)


def _samplings(
    model: ServedModel,
    body: Generation,
    limit: int,
    opening: Opening,
    budget: ReasoningBudget | None,
) -> list[Sampling]:
    """One for each of the `n` answers, whose seeds count up."""
    grammar = _grammar(model, body, opening)
    num_logprobs, of_prompt = 0, False
    if isinstance(body, ChatRequest):
        num_logprobs = body.top_logprobs or 0
    elif isinstance(body, CompletionRequest) and body.logprobs is not None:
        num_logprobs, of_prompt = body.logprobs, bool(body.echo)
    reasons = opening == "reasoning"
    sampling = Sampling(
        limit,
        tuple(dict.fromkeys((*model.stop_token_ids, *(body.stop_token_ids or ())))),
        temperature=greedy_below(model.temperature if body.temperature is None else body.temperature),
        top_p=model.top_p if body.top_p is None else body.top_p,
        num_logprobs=num_logprobs,
        budget=budget if reasons else None,
        grammar=grammar,
        grammar_after=model.reasoning.tag_ids if grammar and reasons and model.reasoning else (),
        prompt_logprobs=of_prompt,
    )
    seeds = [None if body.seed is None else body.seed + i for i in range(body.n or 1)]
    return [replace(sampling, seed=seed) for seed in seeds]


def _grammar(model: ServedModel, body: Generation, opening: Opening) -> Grammar | None:
    required = body.required_tools if isinstance(body, ChatRequest) else None
    wanted = body.response_format if isinstance(body, ChatRequest | CompletionRequest) else None
    schema = wanted.schema_of_answer() if wanted else None
    if required is not None and schema is not None:
        raise ApiError(400, "a call and a response_format contradict each other", param="response_format")
    lead = ""
    if opening == "reasoning" and model.reasoning:
        lead = model.tokenizer.decode(model.reasoning.end_ids, skip_special_tokens=False).partition(END_THINK)[2]
    if schema is not None:
        lark, param = json_answer(schema, lead), "response_format"
    elif required is not None and isinstance(body, ChatRequest):
        is_one = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        in_lists = "<TOOLCALL>" in load_template(model.template or "").source
        lark, param = (calls_in_a_list if in_lists else calls_in_xml)(required, lead, is_one), "tools"
    else:
        return None
    if opening == "reasoning" and model.reasoning is None:  # the answer would be taken for reasoning
        message = f"the chat template of {model.name} opens reasoning and does not show what ends it before an answer"
        raise ApiError(400, message, param=param)
    try:
        return Grammar(lark, model.folder / "tokenizer.json")
    except ValueError as failure:
        raise ApiError(400, f"{param}: {failure}", param=param) from None
