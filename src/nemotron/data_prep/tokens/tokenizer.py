"""Train a byte-level BPE tokenizer and save it in Hugging Face layout, chat template included; find one that is there.

Ids of the special tokens are those of Nemotron 3 Nano (pad 0, bos 1, eos 2, `<|im_start|>` 10, `<|im_end|>` 11,
`<think>` 12, …), or of Nano v2, which has the first three and `<SPECIAL_10>` and so on; digits are single tokens, so
that numbers have one spelling. Byte-level: every text round-trips, nothing is unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemo_runspec.user_files import expanded
from nemotron.kit.chat import render, required_tokens
from nemotron.kit.chat_template import has_template, load_template, special_token
from nemotron.kit.chat_templates import OF_TOKENIZER, TEMPLATES
from nemotron.kit.hub import download_hint, what_failed
from nemotron.kit.tokenizer import read_tokenizer

NUM_SPECIAL = 16
_NAMED = {
    0: "<pad>",
    1: "<s>",
    2: "</s>",
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<tool_call>",
    15: "</tool_call>",
}
SPECIAL_TOKENS: tuple[str, ...] = tuple(_NAMED.get(i, f"<SPECIAL_{i}>") for i in range(NUM_SPECIAL))
NANO2_SPECIAL_TOKENS = (*SPECIAL_TOKENS[:10], *(f"<SPECIAL_{i}>" for i in range(10, NUM_SPECIAL)))
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 10, 11
MIN_VOCAB_SIZE = NUM_SPECIAL + 256

# Words with their leading blank or punctuation mark, single digits, runs of punctuation, line ends with the blank lines
# around them, indentation. A merge never crosses these borders.
_SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def special_tokens(template: str) -> tuple[str, ...]:
    """The first NUM_SPECIAL tokens of a tokenizer that is trained here for a chat template."""
    return NANO2_SPECIAL_TOKENS if template == "nano2" else SPECIAL_TOKENS


def chat_texts(
    conversations: Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]]]], template: str
) -> Iterator[str]:
    """What a template makes of messages and tools, without special tokens: the words of chat, for `train_tokenizer`."""
    special = re.compile("|".join(map(re.escape, special_tokens(template))))
    for messages, tools in conversations:
        yield from filter(None, special.split(render(messages, tools=tools, template=template)))


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048, template: str = "nano3") -> Tokenizer:
    """Learn `vocab_size` tokens (those of `special_tokens` and the 256 bytes included) from `texts`.

    Merges depend on the texts' content only, not on their order. A corpus too small for so many merges yields fewer
    tokens; `save_tokenizer` records the real number.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} (special tokens and bytes), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens(template)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),  # elsewhere it writes empty lines
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, model_max_length: int, template: str) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (with that chat template) and `special_tokens_map.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {
        **named,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(special_tokens(template))
        },
        "chat_template": load_template(template).source,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (directory / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n", "utf-8")


def check_trained_tokens(template: str) -> None:
    """UserError if a tokenizer that `train_tokenizer` makes lacks a token that a chat template needs."""
    for token in required_tokens(template):
        if token not in special_tokens(template):
            raise UserError(
                f"the tokenizer that is trained here has no token {token}, which chat_template {template} needs",
                f"its special tokens: {' '.join(_NAMED.values())}",
            )


@lru_cache(maxsize=1)
def tokenizer_from(text: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`; the last one is kept, for tasks that get the same text each."""
    return read_tokenizer(text)


def check_template_tokens(tokenizer: Tokenizer, location: str, template: str) -> None:
    """UserError if what opens and closes turns in a template would be spelled out letter by letter.

    `location`: of the tokenizer, as messages name it.
    """
    for token in required_tokens(template):
        if len(tokenizer.encode(token, add_special_tokens=False).ids) != 1:
            raise UserError(
                f"tokenizer {location} has no token {token}, which chat_template {template} needs",
                "take the tokenizer of a model of that family, or another chat_template",
            )


_RARE = "\U00010348"  # a Gothic letter: in no vocabulary but for its bytes


def check_covers(tokenizer: Tokenizer, location: str) -> None:
    """UserError if a letter outside of the vocabulary would be lost, or end the run: neither its bytes nor an unknown
    token stand for it.

    `location`: of the tokenizer, as messages name it.
    """
    try:
        is_lost = not tokenizer.encode(_RARE, add_special_tokens=False).ids
    except Exception:  # the library raises nothing narrower
        is_lost = True
    if is_lost:
        raise UserError(
            f"tokenizer {location} has no token for letters outside of its vocabulary, which would be lost",
            "take a byte-level tokenizer, or one with byte_fallback or an unk_token in its vocabulary",
        )


# --- A tokenizer that is there already ------------------------------------------------------------------------------

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)
"""What is read of a tokenizer and goes on into what is made with it. No code: nothing in it is ever run."""

_HUB = re.compile(r"hf://(?:models/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@]+))?")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer on this machine.

    `location`: as it was asked for. `revision`: the commit on the Hub, which `location` may leave open; None for files
    that were here. `files`: name in Hugging Face layout -> where it lies; `tokenizer.json` is always among them.
    """

    location: str
    revision: str | None
    files: Mapping[str, Path]

    @property
    def digest(self) -> str:
        """sha256 (hex) over the names and contents of the files."""
        total = hashlib.sha256()
        for name in sorted(self.files):
            content = self.files[name].read_bytes()
            total.update(f"{name}\0{len(content)}\0".encode() + content)
        return total.hexdigest()

    def json_text(self) -> str:
        """Content of tokenizer.json. UserError if it is not UTF-8."""
        path = self.files["tokenizer.json"]
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not a readable tokenizer (not UTF-8)") from error

    def special_token(self, name: str) -> str | None:
        """The token that the tokenizer names as its `eos_token` or `bos_token`; None where it names none.

        UserError: a file that should say so cannot be read.
        """
        names = ("tokenizer_config.json", "special_tokens_map.json")
        return special_token((self.files[file] for file in names if file in self.files), name)

    def copy_to(self, directory: Path) -> None:
        """Write the files into `directory`, under their names in Hugging Face layout."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in self.files.items():
            shutil.copyfile(path, directory / name)


def find_tokenizer(location: str) -> TokenizerFiles:
    """The tokenizer at a folder, in a `tokenizer.json`, or on the Hugging Face Hub (`hf://ORG/MODEL[@REVISION]`).

    Of the Hub only the files in `FILES` are fetched, into its own cache; a branch is pinned to the commit that it
    stands at. UserError: there is none, or the Hub (through extra `hf`) does not give it.
    """
    if location.startswith("hf://"):
        return _on_hub(location)
    path = expanded(location).absolute()
    if path.is_file():
        # Under another name it stands alone: what lies beside it may be another tokenizer's.
        folder = path.parent if path.name == "tokenizer.json" else None
        beside = {name: folder / name for name in FILES[1:] if folder and (folder / name).is_file()}
        return TokenizerFiles(location, None, {"tokenizer.json": path, **beside})
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"no tokenizer at {path / 'tokenizer.json'}")
    return TokenizerFiles(location, None, {name: path / name for name in FILES if (path / name).is_file()})


def template_with(tokenizer: TokenizerFiles, chat_template: str) -> str:
    """A chat template as `kit.chat` takes it: `chat_template`, or where it says so the folder of the tokenizer.

    UserError: the tokenizer has no template, or not the tokens that the template needs, or would lose letters; or the
    template would train something else than answers.
    """
    if chat_template == OF_TOKENIZER:
        folder = tokenizer.files["tokenizer.json"].parent
        if not (tokenizer.files.keys() & {"tokenizer_config.json", "chat_template.jinja"} and has_template(folder)):
            raise UserError(
                f"tokenizer {tokenizer.location} comes without a chat template",
                f"chat_template={', '.join(TEMPLATES)}, or the path of a Jinja file",
            )
        chat_template = str(folder)
    load_template(chat_template).check_mask()
    made = tokenizer_from(tokenizer.json_text())
    check_template_tokens(made, tokenizer.location, chat_template)
    check_covers(made, tokenizer.location)
    return chat_template


def _on_hub(location: str) -> TokenizerFiles:
    match = _HUB.fullmatch(location)
    if match is None:
        raise UserError(f"tokenizer {location}: write hf://ORG/MODEL or hf://ORG/MODEL@REVISION")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"tokenizer {location}: the Hugging Face Hub needs extra hf ({error})", install_line("hf")
        ) from None
    try:
        folder = Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=list(FILES)))
    except Exception as error:  # the library's own, its HTTP client's, and the system's
        raise UserError(
            f"tokenizer {location}: the Hugging Face Hub does not give it: {what_failed(error)}",
            download_hint(match["repo"]),
        ) from error
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise UserError(
            f"tokenizer {location}: no tokenizer.json there",
            "convert it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)",
        )
    return TokenizerFiles(location, folder.name, files)
