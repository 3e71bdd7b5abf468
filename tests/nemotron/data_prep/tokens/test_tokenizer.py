"""The trained tokenizer: ids of special tokens, digits, round trip, Hugging Face layout, plain encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hub_server import running_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.encoding import plain_tokenizer
from nemotron.data_prep.tokens.tokenizer import (
    SPECIAL_TOKENS,
    check_covers,
    find_tokenizer,
    save_tokenizer,
    template_with,
    train_tokenizer,
)
from nemotron.kit.chat import render

TEXTS = [f"def function_{i}(value):\n    return value + {i * 37}\n" for i in range(50)] + ["the quick brown fox " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 400)


def test_special_tokens_have_the_published_ids(tokenizer: Tokenizer) -> None:
    expected = {
        "<pad>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 10, "<|im_end|>": 11,
        "<think>": 12, "</think>": 13, "<tool_call>": 14, "</tool_call>": 15,
    }  # fmt: skip
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected
    assert [tokenizer.id_to_token(i) for i in range(16)] == list(SPECIAL_TOKENS)
    assert SPECIAL_TOKENS[3] == "<SPECIAL_3>"


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    # 37 and its multiples abound in the corpus, so merged digits would pay if they were allowed.
    pieces = [tokenizer.decode([i]).strip() for i in tokenizer.encode("37 * 1369").ids]
    assert [piece for piece in pieces if piece.isdigit()] == list("371369")
    assert not [token for token in tokenizer.get_vocab() if sum(map(str.isdigit, token)) > 1 and "SPECIAL" not in token]


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = plain_tokenizer(tokenizer.to_str()).encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_running_text_cannot_forge_control_tokens(tokenizer: Tokenizer) -> None:
    plain = plain_tokenizer(tokenizer.to_str()).encode("a<|im_end|>b</s>").ids
    assert min(plain) >= 16
    assert 11 in tokenizer.encode("a<|im_end|>b").ids


def test_training_writes_nothing_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(TEXTS, 300)
    assert capfd.readouterr() == ("", "")


def test_training_does_not_depend_on_the_order_of_texts() -> None:
    assert train_tokenizer(TEXTS, 350).to_str() == train_tokenizer(TEXTS[::-1], 350).to_str()


@pytest.mark.parametrize(
    ("model", "is_lost"),
    [
        (models.BPE(vocab={"a": 0, "b": 1}, merges=[]), True),  # left out without a word
        (models.WordLevel({"a": 0}, unk_token="<unk>"), True),  # an exception while encoding
        (models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>"), False),
        (models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"), False),
    ],
)
def test_a_tokenizer_that_would_lose_letters_is_refused(model: models.Model, is_lost: bool) -> None:
    with pytest.raises(UserError, match="tokenizer mine has no token for letters") if is_lost else nullcontext():
        check_covers(Tokenizer(model), "mine")


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 272"):
        train_tokenizer(TEXTS, 271)


def test_saved_layout_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, model_max_length=512, template="nano3")
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == tokenizer.to_str()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert theirs.model_max_length == 512
    messages = [{"role": "user", "content": "2 + 37?"}]
    text = render(messages, add_generation_prompt=True, template="nano3")
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text


# --- Tokenizers that are there already ------------------------------------------------------------------------------


def test_a_folder_and_its_file_are_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tok", model_max_length=512, template="nano3")
    (tmp_path / "tok" / "modeling.py").write_text("raise SystemExit\n")
    folder, file = find_tokenizer(str(tmp_path / "tok")), find_tokenizer(str(tmp_path / "tok" / "tokenizer.json"))
    assert folder.files == file.files
    assert set(folder.files) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert folder.digest == file.digest
    assert (folder.special_token("eos_token"), folder.special_token("bos_token")) == ("</s>", "<s>")
    folder.copy_to(tmp_path / "copy")
    assert find_tokenizer(str(tmp_path / "copy")).digest == folder.digest
    # A file of another name stands alone; an object may stand for a token.
    (tmp_path / "tok" / "other.json").write_text(folder.json_text())
    alone = find_tokenizer(str(tmp_path / "tok" / "other.json"))
    assert set(alone.files) == {"tokenizer.json"} and alone.special_token("eos_token") is None
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps(config))
    changed = find_tokenizer(str(tmp_path / "copy"))
    assert changed.special_token("eos_token") == "<|im_end|>"
    assert changed.digest != folder.digest
    # Data preparation takes no template whose mask would be wrong, of whomever it is.
    (tmp_path / "copy" / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    with pytest.raises(UserError, match="no prompt for an answer"):
        template_with(find_tokenizer(str(tmp_path / "copy")), "tokenizer")
    with pytest.raises(UserError, match=r"no tokenizer at .*nowhere"):
        find_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_of_the_hub_only_the_tokenizer_is_fetched_and_pinned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    save_tokenizer(tokenizer, tmp_path / "tok", model_max_length=512, template="nano3")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tok").iterdir()}
    files |= {"model.safetensors": b"weights", "tokenization_own.py": b"raise SystemExit", "README.md": b"#"}
    code = (
        "import sys\nfrom nemo_runspec.errors import run_main\n"
        "from nemotron.data_prep.tokens.tokenizer import find_tokenizer\n"
        "def main():\n    found = find_tokenizer(sys.argv[1])\n"
        "    print(found.revision, found.digest, *sorted(found.files))\n"
        "sys.exit(run_main(main))"
    )
    with running_hub() as hub:
        commit = hub.add("org/name", files)
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        environment = {key: value for key, value in environment.items() if key not in ("HF_HUB_OFFLINE", "HF_TOKEN")}

        def find(location: str, **more: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-c", code, location]
            return subprocess.run(words, env={**environment, **more}, capture_output=True, text=True)

        result = find("hf://org/name")
        here = find_tokenizer(str(tmp_path / "tok"))
        names = "special_tokens_map.json tokenizer.json tokenizer_config.json"
        assert result.stdout.split("\n")[0] == f"{commit} {here.digest} {names}", result.stderr
        assert {line.rpartition("/")[2] for line in hub.requests if "/resolve/" in line} == set(names.split())
        assert find(f"hf://models/org/name@{commit}").stdout == result.stdout
        missing = find("hf://org/nothing")
    assert missing.returncode == 2
    assert "hf://org/nothing: the Hugging Face Hub does not give it" in missing.stderr
    assert "the Hub answered 401" in missing.stderr and "hf download org/nothing" in missing.stderr
    assert len(missing.stderr.strip().splitlines()) == 2
    away = find("hf://org/another", HF_HUB_OFFLINE="1")
    assert away.returncode == 2 and "HF_HUB_OFFLINE is set" in away.stderr
    assert "and it is not in the cache" in away.stderr
    # Now nothing listens at the Hub's address.
    cut = find("hf://org/another").stderr
    assert "the Hub was not reached, and it is not in the cache" in cut and len(cut.strip().splitlines()) == 2
    wrong = find("hf://a--b/c..d").stderr
    assert "Repo id must" in wrong or "Cannot have -- or .." in wrong
    # Without a network the pinned files are there.
    assert find("hf://org/name", HF_HUB_OFFLINE="1").stdout == result.stdout
