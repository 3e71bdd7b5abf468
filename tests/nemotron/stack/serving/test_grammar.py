"""What an untrained model writes under a grammar is what the grammar describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import ReasoningBudget
from nemotron.stack.serving.engine import Engine, Grammar, Limits, Sampling
from nemotron.stack.serving.held import json_answer
from nemotron.stack.serving.sampling import Choice

pytest.importorskip("llguidance")

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bé", None, 3]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
    "choice": {"anyOf": [{"type": "null"}, {"const": "yes"}, {"type": "number", "minimum": -2, "maximum": 2}]},
    "pattern": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
    "reference": {
        "$defs": {"tree": {"type": "object", "properties": {"l": {"$ref": "#/$defs/leaf"}}, "required": ["l"],
                           "additionalProperties": False}, "leaf": {"enum": [1, 2]}},
        "$ref": "#/$defs/tree",
    },
}  # fmt: skip
END, THINK = "<|im_end|>", "</think>"


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes and 40 merges, two special tokens, and an end of text that no request names."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", END, THINK]
    trainer = trainers.BpeTrainer(
        vocab_size=299, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(['{"name": "ab", "age": 12}, [{"kind": null, "ok": true}], "yes" -1.5'] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "drafts"])
def engine(small_model: Callable[..., NemotronH], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Of a model with more tokens than the tokenizer has."""
    model = small_model("M*E", 0, vocab_size=320, num_nextn_predict_layers=1)
    engine = Engine(model, Limits(max_length=500, max_rows=16, num_drafts=request.param))
    engine.start()
    yield engine
    engine.stop(0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_complete_validates(engine: Engine, tokenizer_json: Path, name: str) -> None:
    """At temperature 1, with others beside it that are held to nothing."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    end = tokenizer.token_to_id(END)
    grammar = Grammar(json_answer(SCHEMAS[name], ""), tokenizer_json)
    free = [engine.submit([1, 2], Sampling(20, (end,), seed=seed)) for seed in range(4)]
    held = [engine.submit([5, 7, seed], Sampling(60, (end,), seed=seed, grammar=grammar)) for seed in range(12)]
    complete = 0
    for answer in held:
        ids = [token.id for tokens in answer for token in tokens]
        assert answer.finish_reason in ("stop", "length") and all(i < tokenizer.get_vocab_size() for i in ids)
        if answer.finish_reason == "stop":
            assert ids.pop() == end
            jsonschema.validate(json.loads(tokenizer.decode(ids, skip_special_tokens=False)), SCHEMAS[name])
            complete += 1
    assert complete >= 3
    assert all(list(answer) and answer.finish_reason in ("stop", "length") for answer in free)


def test_a_grammar_begins_behind_the_reasoning(engine: Engine, tokenizer_json: Path) -> None:
    """Reasoning is free, ends by budget, and is not held to the grammar; the answer behind it is."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    end, think = tokenizer.token_to_id(END), tokenizer.token_to_id(THINK)
    grammar = Grammar(json_answer(SCHEMAS["pattern"], ""), tokenizer_json)
    budget = ReasoningBudget(7, (think,), (think,))
    for seed in range(6):
        sampling = Sampling(40, (end,), seed=seed, budget=budget, grammar=grammar, grammar_after=(think,))
        answer = engine.submit([1, 2, 3], sampling)
        ids = [token.id for tokens in answer for token in tokens]
        if end in ids[:7]:
            continue
        assert ids.index(think) <= 7 and ids.count(end) == 1 and answer.finish_reason == "stop"
        text = tokenizer.decode(ids[ids.index(think) + 1 : -1], skip_special_tokens=False)
        jsonschema.validate(json.loads(text), SCHEMAS["pattern"])


def test_without_a_stop_token_an_answer_ends_where_nothing_can_follow(engine: Engine, tokenizer_json: Path) -> None:
    grammar = Grammar(json_answer({"enum": ["one", "two"]}, ""), tokenizer_json)
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    texts = set()
    for seed in range(8):
        answer = engine.submit([1], Sampling(40, (), seed=seed, grammar=grammar))
        texts.add(tokenizer.decode([token.id for tokens in answer for token in tokens]))
        assert answer.finish_reason == "stop"
    assert texts == {'"one"', '"two"'}


def test_a_lark_grammar_names_special_tokens(engine: Engine, tokenizer_json: Path) -> None:
    grammar = Grammar(f'start: {THINK} "call" /[xy]/', tokenizer_json)
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    answer = engine.submit([1], Sampling(40, (tokenizer.token_to_id(END),), seed=0, grammar=grammar))
    text = tokenizer.decode([token.id for tokens in answer for token in tokens], skip_special_tokens=False)
    assert text in (f"{THINK}callx{END}", f"{THINK}cally{END}")


def test_a_tokenizer_without_the_characters_ends_one_request_with_an_error(
    engine: Engine, tmp_path: Path, tokenizer_json: Path
) -> None:
    poor = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    poor.add_special_tokens(["</s>"])
    poor.decoder = decoders.ByteLevel()
    poor.save(str(tmp_path / "tokenizer.json"))
    beside = engine.submit([1, 2], Sampling(20, (), seed=0))
    with pytest.raises(ValueError, match=r"the grammar can.t be kept to: NoExtensionBias$"):
        Grammar(json_answer({"type": "object"}, ""), tmp_path / "tokenizer.json")
    grammar = Grammar('start: "a" /c/', tmp_path / "tokenizer.json")
    answer = engine.submit([1], Sampling(9, (0,), grammar=grammar))
    assert [token.id for tokens in answer for token in tokens] == [1] and answer.finish_reason == "error"
    assert answer.error is not None and "grammar" in answer.error
    assert sum(map(len, beside)) == 20 and beside.finish_reason == "length"


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "strange"}, "strange"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "nsatisfiable"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_in_one_line(
    tokenizer_json: Path, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        Grammar(json_answer(schema, ""), tokenizer_json)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("the grammar can't be compiled: ")


def test_an_answer_does_not_end_within_the_reasoning_before_its_grammar(tokenizer_json: Path) -> None:
    grammar = Grammar(json_answer({"type": "object"}, ""), tokenizer_json)
    choice = Choice(Sampling(9, (0,), grammar=grammar, grammar_after=(3,)), 299)
    allowed = choice.allowed()
    assert allowed is not None and (~allowed).nonzero().flatten().tolist() == [0]
    choice.take(3)
    held = choice.allowed()
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    assert (
        held is not None and held[tokenizer.token_to_id("{")] and not held[0] and not held[tokenizer.token_to_id("a")]
    )
