"""Evaluate a model: read its tokenizer, generate, verify."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.stack.environments import Task
from nemotron.stack.evaluation.scoring import Completion, Evaluation, GenerateFn, PromptFormat, evaluate_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate

_STOP_TOKENS = ("<|im_end|>", "</s>")


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer in a model's folder (`tokenizer.json`); UserError if there is none that can be read."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"no tokenizer.json in {model_dir}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as failure:  # the tokenizers library raises bare Exception
        raise UserError(f"{path} is not a tokenizer: {failure}") from None


def model_generate_fn(
    model: NemotronH,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int = 64,
    batch_size: int = 256,
    poll: Callable[[], None] = lambda: None,
) -> GenerateFn:
    """A `GenerateFn` of a model: tokenises prompts, decodes in batches of about equal length, keeps special tokens.

    Args:
        max_new_tokens: a completion that is longer is cut, and counts as not finished.
        batch_size: completions decoded at once.
        poll: called at every decoding step; raises to stop (a signal arrived).
    """
    stops = tuple(index for token in _STOP_TOKENS if (index := tokenizer.token_to_id(token)) is not None)

    def generate_fn(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
        # Prompts of like length together: less padding to prefill.
        order = sorted(range(len(encoded)), key=lambda row: (len(encoded[row]), row))
        per_batch = max(1, batch_size // samples)
        device = model.lm_head.weight.device
        completions: list[list[Completion]] = [[] for _ in encoded]
        for start in range(0, len(order), per_batch):
            rows = order[start : start + per_batch]
            generator = torch.Generator(device=device)
            generator.manual_seed(zlib.crc32(f"{seed}/{start}".encode()))
            out = generate(
                model,
                [encoded[row] for row in rows],
                max_new_tokens,
                temperature=temperature,
                stop_token_ids=stops,
                generator=generator,
                samples_per_prompt=samples,
                poll=poll,
            )
            texts = tokenizer.decode_batch(out.tokens, skip_special_tokens=False)
            for position, text in enumerate(texts):
                done = Completion(text, len(out.tokens[position]), out.entropies[position], out.finished[position])
                completions[rows[position // samples]].append(done)
        return [completion for several in completions for completion in several]

    return generate_fn


def evaluate_model(
    model: NemotronH,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    *,
    samples: int = 4,
    prompt_format: PromptFormat = "chat",
    max_new_tokens: int = 64,
    batch_size: int = 256,
    seed: int = 0,
    poll: Callable[[], None] = lambda: None,
) -> Evaluation:
    """pass@1 of a model in memory, greedy and sampled at temperature 1; arguments as in `evaluate_tasks`.

    The same arguments give the same evaluation, so two models that are given the same tasks can be compared in pairs.
    """
    generate_fn = model_generate_fn(model, tokenizer, max_new_tokens=max_new_tokens, batch_size=batch_size, poll=poll)
    return evaluate_tasks(generate_fn, tasks, samples=samples, prompt_format=prompt_format, seed=seed)
