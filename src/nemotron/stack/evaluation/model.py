"""Evaluate a model: read its tokenizer, generate, verify."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.chat_template import load_template, stop_tokens
from nemotron.kit.metrics import Progress, StatusLine
from nemotron.kit.tokenizer import read_tokenizer
from nemotron.stack.environments import (
    Episode,
    Task,
    answer_of,
    best_constant_answer,
    generate_tasks,
    load_environments,
    own,
    runs_programs,
)
from nemotron.stack.evaluation.scoring import Completion, Evaluation, GenerateFn, evaluate_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import ReasoningBudget, generate_tokens
from nemotron.stack.models.decoding.turns import Retold, generate_turns
from nemotron.stack.rl.dialogue import Dialogue, episode_verdicts

if TYPE_CHECKING:
    from nemotron.kit.schemas.evaluation import EvaluationConfig, ResponsesConfig


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer in a model's folder (`tokenizer.json`); UserError if there is none that can be read."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"no tokenizer.json in {model_dir}")
    return read_tokenizer(path.read_bytes(), str(path))


def stop_token_ids(tokenizer_dir: Path, template: str | None) -> list[int]:
    """Ids of the tokens that end a response (`kit.chat_template.stop_tokens`), as far as the tokenizer has them.

    UserError if what ends a turn of `template` is not one token.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    if template is not None and (end := load_template(template).stop) and tokenizer.token_to_id(end) is None:
        raise UserError(
            f"the tokenizer in {tokenizer_dir} has no token {end}, which ends a turn of chat template {template}",
            "take the chat template that the model was trained with",
        )
    ids = [tokenizer.token_to_id(token) for token in stop_tokens(tokenizer_dir, template)]
    return [index for index in ids if index is not None]


def reasoning_budget(tokenizer_dir: Path, template: str, max_tokens: int, max_new_tokens: int) -> ReasoningBudget:
    """Reasoning of `max_tokens` at most, which ends as `template` ends it where it is trained: `end_of_reasoning`.

    So do the clients of the published models, which write `</think>` after the last token that they let the model have,
    and let it go on with the answer; the one of Nano 3 puts a full stop before it, which no trace of SFT has that was
    cut.

    UserError: `max_new_tokens` has no room for what ends the reasoning and an answer; the template's prompts open no
    reasoning.
    """
    end = chat.end_of_reasoning(template)
    encoding = load_tokenizer(tokenizer_dir).encode(end, add_special_tokens=False)
    start = end.index(chat.END_THINK)
    stop = start + len(chat.END_THINK)
    tag_ids = [i for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True) if a < stop and b > start]
    end_ids = encoding.ids
    if max_tokens + len(end_ids) >= max_new_tokens:
        raise UserError(
            f"a reasoning budget of {max_tokens} leaves no answer in {max_new_tokens} new tokens, "
            f"of which the end of the reasoning takes {len(end_ids)}",
            "take a smaller budget, or more new tokens",
        )
    return ReasoningBudget(max_tokens, tuple(tag_ids), tuple(end_ids))


def model_generate_fn(
    model: NemotronH,
    tokenizer_dir: Path,
    template: str | None,
    *,
    max_new_tokens: int = 64,
    max_turns: int = 8,
    batch_size: int = 256,
    poll: Callable[[], None] = lambda: None,
    show_progress: bool = False,
    label: str = "",
    budget: ReasoningBudget | None = None,
) -> GenerateFn:
    """A `GenerateFn` of a model: tokenises prompts, decodes in batches of about equal length.

    The token that ended a completion is not in its text; other special tokens are.

    Args:
        template: the chat template of the prompts, whose end of turn ends a completion; None: plain text.
        max_new_tokens: a response that is longer is cut, and counts as not finished.
        max_turns: responses of an episode; one that would have more is not finished either.
        batch_size: completions decoded at once.
        poll: called at every decoding step; raises to stop (a signal arrived).
        show_progress: a line on stderr with responses, tokens/s and the time left, after `label`.
        budget: of the reasoning of each response, for prompts that open it.
    """
    tokenizer, stops = load_tokenizer(tokenizer_dir), stop_token_ids(tokenizer_dir, template)

    def generate_fn(
        prompts: Sequence[str],
        *,
        temperature: float,
        seed: int,
        samples: int = 1,
        begin: Callable[[int], Episode | None] | None = None,
    ) -> list[Completion]:
        def open_dialogue(row: int) -> Dialogue | None:
            if begin is None or template is None:
                return None
            thinking = prompts[row].endswith(chat.generation_prompt(template))
            return Dialogue(begin(row), tokenizer, template, thinking)

        def called_in(text: str, prompt: str) -> tuple[str, ...]:
            if template is None:
                return ()
            answer = answer_of(text, chat.opens_reasoning(prompt))
            return tuple(call["name"] for call in chat.parse_tool_calls(answer, ())[1])

        encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
        # Prompts of like length together: less padding to prefill.
        order = sorted(range(len(encoded)), key=lambda row: (len(encoded[row]), row))
        per_batch = max(1, batch_size // samples)
        device = model.lm_head.weight.device
        completions: list[list[Completion]] = [[] for _ in encoded]
        what, stream = "greedy" if temperature == 0 else "sampled", sys.stderr if show_progress else io.StringIO()
        progress = Progress(len(encoded) * samples, label=f"{label} {what}".strip(), stream=stream)
        for start in range(0, len(order), per_batch):
            rows = order[start : start + per_batch]
            generator = torch.Generator(device=device).manual_seed(_sampling_seed(seed, start))
            dialogues = [open_dialogue(row) for row in rows for _ in range(samples)]

            def reply(
                position: int, ids: list[int], dialogues: list[Dialogue | None] = dialogues
            ) -> list[int] | Retold | None:
                dialogue = dialogues[position]
                return None if dialogue is None else dialogue.reply(ids)

            def reads_on(position: int, dialogues: list[Dialogue | None] = dialogues) -> bool:
                dialogue = dialogues[position]
                return dialogue is not None and dialogue.reads_on

            out = generate_turns(
                model,
                [encoded[row] for row in rows],
                reply,
                max_new_tokens,
                max_turns=max_turns,
                temperature=temperature,
                stop_token_ids=stops,
                generator=generator,
                samples_per_prompt=samples,
                poll=poll,
                budget=budget,
                # A message may have turned reasoning off, as `/no_think` does under Nano 2's template.
                opens_answer=[chat.opens_reasoning(prompts[row]) is False for row in rows],
                reads_on=reads_on,
            )
            texts = tokenizer.decode_batch([c.tokens[:-1] if c.finished else c.tokens for c in out], False)
            ended = zip(texts, out, dialogues, episode_verdicts(dialogues), strict=True)
            for position, (text, conversation, dialogue, verdict) in enumerate(ended):
                row = rows[position // samples]
                completion = Completion(
                    text, len(conversation.logprobs), conversation.entropy, conversation.finished,
                    verdict=verdict,
                    called=tuple(dialogue.called) if dialogue else called_in(text, prompts[row]),
                )  # fmt: skip
                completions[row].append(completion)
            progress.update(
                (start + len(rows)) * samples, tokens=sum(len(conversation.logprobs) for conversation in out)
            )
        progress.close()
        return [completion for several in completions for completion in several]

    return generate_fn


def model_stream_fn(
    model: NemotronH,
    tokenizer_dir: Path,
    template: str | None,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Callable[[str, int | None], Iterator[str]]:
    """The continuation of one prompt piece by piece as it is decoded; together the text of `model_generate_fn`.

    The second argument is the most tokens of reasoning where the prompt opens it; None: any number.
    """
    tokenizer, stops = load_tokenizer(tokenizer_dir), stop_token_ids(tokenizer_dir, template)

    def stream_fn(prompt: str, max_reasoning: int | None) -> Iterator[str]:
        budget = (
            None
            if max_reasoning is None or template is None or chat.opens_reasoning(prompt) is False
            else reasoning_budget(tokenizer_dir, template, max_reasoning, max_new_tokens)
        )
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        generator = torch.Generator(device=model.lm_head.weight.device).manual_seed(_sampling_seed(seed, 0))
        decoder = DecodeStream(skip_special_tokens=False)
        for token in generate_tokens(model, ids, max_new_tokens, temperature, stops, generator, budget):
            if token not in stops and (piece := decoder.step(tokenizer, token)) is not None:
                yield piece

    return stream_fn


def _sampling_seed(seed: int, start: int) -> int:
    """That of the batch whose first prompt is number `start`."""
    return zlib.crc32(f"{seed}/{start}".encode())


def evaluate_model(
    model: NemotronH,
    tokenizer_dir: Path,
    tasks: Sequence[Task],
    settings: ResponsesConfig,
    *,
    template: str | None,
    thinking: bool = True,
    max_reasoning: int | None = None,
    with_greedy: bool = True,
    poll: Callable[[], None] = lambda: None,
    show_progress: bool = False,
    label: str = "",
) -> Evaluation:
    """pass@1 of a model in memory, greedy and sampled at temperature 1.

    `template`, `thinking` and `with_greedy` as `evaluate_tasks`.

    `max_reasoning`: the most tokens of reasoning in a response (`reasoning_budget`), where it reasons; 0 is reasoning
    off, None any number.
    The same arguments give the same evaluation, so two models that are given the same tasks can be compared in pairs.
    """
    thinking = thinking and max_reasoning != 0
    budget = None
    if thinking and max_reasoning is not None and template is not None:
        budget = reasoning_budget(tokenizer_dir, template, max_reasoning, settings.max_new_tokens)
    generate_fn = model_generate_fn(
        model, tokenizer_dir, template, max_new_tokens=settings.max_new_tokens, max_turns=settings.max_turns,
        batch_size=settings.batch_size, poll=poll, show_progress=show_progress, label=label, budget=budget,
    )  # fmt: skip
    return evaluate_tasks(
        generate_fn,
        tasks,
        template=template,
        thinking=thinking,
        samples=settings.samples,
        seed=settings.seed,
        max_error_rate=settings.max_error_rate,
        sandbox=settings.sandbox,
        with_greedy=with_greedy,
        poll=poll,
    )


def held_out_tasks(per_family: int, settings: ResponsesConfig) -> list[Task]:
    """`per_family` tasks of each of `settings.families` that no training data holds, and of each own environment."""
    generated = [
        task
        for family in settings.families
        for task in generate_tasks(family, "eval", per_family, settings.seed, settings.difficulty.get(family))
    ]
    environments = load_environments(settings.environments) if per_family else {}
    yours = (own.held_out_tasks(name, environment, per_family) for name, environment in environments.items())
    return [*generated, *chain.from_iterable(yours)]


def score_tasks(
    model: NemotronH,
    tokenizer_dir: Path,
    settings: EvaluationConfig,
    *,
    template: str | None,
    thinking: bool = True,
    poll: Callable[[], None] = lambda: None,
    label: str = "",
) -> dict[str, Any]:
    """What a training script publishes of its model: pass@1 on held-out tasks, beside the best constant answer.

    The metrics `tasks`, `best_constant` by family, some `generations` to read, and the tier of the `sandbox` where
    programs were run; none with `tasks_per_family` 0. `label` stands before each line on stderr.
    """
    tasks = held_out_tasks(settings.tasks_per_family, settings)
    if not tasks:
        return {}
    evaluation = evaluate_model(
        model, tokenizer_dir, tasks, settings, template=template, thinking=thinking, poll=poll, show_progress=True,
        label=label,
    )  # fmt: skip
    constants = {
        family: best_constant_answer([task for task in tasks if task.family == family], settings.sandbox).score
        for family in evaluation.families
    }
    for family, constant in constants.items():
        line = f"{family}: pass@1 {evaluation.greedy(family).estimate:.3f} greedy"
        if settings.samples > 1:
            line += f", pass@{settings.samples} {evaluation.pass_at(settings.samples, [family]).estimate:.3f}"
        line += f", best constant answer {constant:.3f}"
        StatusLine(sys.stderr).note(f"{label} {line}".strip())
    return {
        "tasks": evaluation.metrics(),
        "best_constant": constants,
        "generations": evaluation.generations(per_family=2),
        "sandbox": settings.sandbox if runs_programs(settings.families) else None,
    }
