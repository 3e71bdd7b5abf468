"""RULER's tasks (`ruler`) asked of a model: recall by length and task, beside chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.jsonl import read_own_jsonl
from nemotron.stack.environments import answer_of
from nemotron.stack.evaluation.intervals import mean_interval
from nemotron.stack.evaluation.model import load_tokenizer, model_generate_fn
from nemotron.stack.evaluation.retrieval import single_token_words
from nemotron.stack.evaluation.ruler import Material, Passage, Sample, make_samples
from nemotron.stack.models import NemotronH

if TYPE_CHECKING:
    from nemotron.kit.schemas.evaluation import RulerConfig

MASK_ENTRIES = 2**25  # prompts of unequal length are masked: batch x length^2 entries of some 4 bytes
SENTENCES = 5_000  # of held-out text that stand between facts; then they come again


def score_ruler(
    model: NemotronH,
    tokenizer_dir: Path,
    documents: Sequence[NDArray[np.integer[Any]]],
    settings: RulerConfig,
    *,
    template: str | None,
    thinking: bool,
) -> dict[str, dict[str, dict[str, Any]]]:
    """By length and task: `recall` of the strings asked for with its 95 % interval, over samples, beside `chance`.

    `tokens`: of a prompt, mean. `documents`: ids of held-out text. `template`, `thinking`: as `evaluate_tasks`; without
    a template the prompt goes on with the beginning of an answer.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    passages = read_passages(settings.passages) if settings.passages else []
    material = Material(
        [token[1:] for token, _ in single_token_words(tokenizer)], sentences_of(tokenizer, documents), passages
    )

    def prompt_of(sample: Sample) -> str:
        if template is None:
            return f"{sample.prompt}\n{sample.prefix}"
        return chat.answer_prompt([{"role": "user", "content": sample.prompt}], thinking=thinking, template=template)

    def tokens_of(sample: Sample) -> int:
        return len(tokenizer.encode(prompt_of(sample), add_special_tokens=False))

    scores: dict[str, dict[str, dict[str, Any]]] = {}
    for length, task in product(settings.lengths, settings.tasks):

        def fits(sample: Sample, room: int = length - settings.max_new_tokens) -> bool:
            return tokens_of(sample) <= room

        try:
            samples = make_samples(task, material, settings.per_task, settings.seed, fits)
        except UserError as error:
            raise error.at(f"ruler.lengths, {length}") from None
        generate = model_generate_fn(
            model,
            tokenizer_dir,
            template,
            max_new_tokens=settings.max_new_tokens,
            batch_size=max(1, min(32, MASK_ENTRIES // length**2)),
        )
        prompts = [prompt_of(sample) for sample in samples]
        texts = [completion.text for completion in generate(prompts, temperature=0.0, seed=settings.seed)]
        answers = texts
        if template is not None:
            answers = [
                answer_of(text, chat.opens_reasoning(prompt)) for prompt, text in zip(prompts, texts, strict=True)
            ]
        recall = mean_interval([np.array([s.recall(answer) for s, answer in zip(samples, answers, strict=True)])])
        scores.setdefault(str(length), {})[task] = {
            "recall": recall.estimate,
            "recall_95": [recall.low, recall.high],
            "chance": float(np.mean([sample.chance for sample in samples])),
            "tokens": float(np.mean([tokens_of(sample) for sample in samples])),
        }
    return scores


def sentences_of(tokenizer: Tokenizer, documents: Sequence[NDArray[np.integer[Any]]]) -> list[str]:
    """The first sentences of documents, and lines of what has none."""
    texts = (tokenizer.decode(document.tolist()) for document in documents)
    parts = (part.strip() for text in texts for part in re.split(r"(?<=[.!?])\s+|\n+", text))
    return list(islice((part for part in parts if part), SENTENCES))


def read_passages(path: Path) -> list[Passage]:
    """The records of a JSONL file: `passage`, `question`, and `answer`, a text that stands in the passage, or a list.

    UserError: `read_own_jsonl`; one lacks a field, or an answer does not stand in its passage.
    """
    passages = []
    for where, record in read_own_jsonl(path):
        try:
            answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
            passage = Passage(str(record["passage"]), str(record["question"]), tuple(map(str, answers)))
        except KeyError as error:
            raise UserError(f"{where}: passage, question and answer expected: {error}") from None
        if not all(each and each in passage.text for each in passage.answers or [""]):
            raise UserError(f"{where}: the answer {record['answer']!r} does not stand in the passage")
        passages.append(passage)
    return passages
