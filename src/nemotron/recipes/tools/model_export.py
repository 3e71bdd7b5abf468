"""Write a model artifact as a Hugging Face directory, for `nemotron FAMILY model export`, which starts this script.

The weights go from file to file one tensor at a time: the model is never in memory. This is a tool and no step of a
recipe: it reads no config and publishes nothing, so it carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.inputs import is_place
from nemo_runspec.errors import RunFailed, UserError, first_line
from nemo_runspec.installation import install_line
from nemotron.kit import Model, Source
from nemotron.kit.chat_template import load_template, token_text
from nemotron.kit.found_model import chat_template_of
from nemotron.kit.hub import what_failed
from nemotron.kit.lineage import raw_sources, walk
from nemotron.kit.model_folder import (
    ADAPTER_FOLDER,
    CARD_FILE,
    TOKENIZER_FILES,
    Origin,
    adopt_model,
    hub_address,
)
from nemotron.recipes.tools.model_card import model_card
from nemotron.recipes.tools.model_files import whole_directory, write_manifest
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import is_quantized, kept_values, load_config, read_config
from nemotron.stack.models.published.generation_config import write_generation_config
from nemotron.stack.models.published.hub import (
    DTYPES,
    Written,
    checked_weights,
    dtype_in,
    hub_config,
    parse_dtype,
    parse_size,
    write_directory,
)


@dataclass(frozen=True)
class Options:
    """Of `nemotron FAMILY model export`. `model`: an artifact's reference, a directory or an hf:// address."""

    model: str
    output: str | None
    push: str | None
    dtype: str
    max_shard_size: str
    force: bool


def export(model: Model, folder: Path, dtype: torch.dtype | None, max_shard_size: int) -> None:
    """Fill the empty `folder` with the model: weights, config, tokenizer, generation config, model card, manifest.

    Adapters that the model was trained by stay beside it, in their own folder and dtype.
    """
    config = load_config(model.path)
    if is_quantized(read_config(model.path)):
        raise UserError(f"{model.ref} is quantised, and its folder is what engines read", f"copy {model.path}")
    with torch.device("meta"):
        state = NemotronH(config).state_dict()
    stored = checked_weights(model.path, state)
    tokenizer_config = write_tokenizer(model, folder)
    others = read_others(model.path, folder, tokenizer_config)

    tensors = {
        name: Written(tensor, dtype_in(name, dtype) if dtype else DTYPES[tensor.dtype])
        for name, tensor in stored.items()
    }
    main_dtype = tensors["lm_head.weight"].dtype
    write_directory(folder, hub_config(config, main_dtype, others), tensors, max_shard_size)
    write_generation_config(folder, model.path, others, model.template)
    if (model.path / ADAPTER_FOLDER).is_dir():
        shutil.copytree(model.path / ADAPTER_FOLDER, folder / ADAPTER_FOLDER)
    registry = model.version.registry
    shown_dtype = str(main_dtype).removeprefix("torch.")
    lineage = walk(model.ref, registry)
    card = model_card(model.version, lineage, registry, config, shown_dtype)
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    Origin(
        artifact=model.version.pinned,
        is_base=model.template is None,
        num_steps=model.num_steps,
        tokens=model.tokens,
        reasoning=model.reasoning,
        sources=[Source(**dataclasses.asdict(source)) for source in raw_sources(lineage)],
    ).write(folder)
    write_manifest(folder)


def write_tokenizer(model: Model, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer's files, with the chat template of the model where it is not the tokenizer's own.

    Returns:
        tokenizer_config.json.

    Raises:
        UserError: there is no tokenizer.json, or a file cannot be read.
    """
    source = model.tokenizer_path or model.path
    load_tokenizer(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    path = folder / "tokenizer_config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{source / path.name}: cannot be read: {error}") from error
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    template = chat_template_of(folder, model.template, model.producer.name)
    if template not in (None, str(folder.absolute())):
        settings["chat_template"] = load_template(template).source
        (folder / "chat_template.jinja").unlink(missing_ok=True)  # transformers would take that one
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return settings


def read_others(source: Path, folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says beside the architecture: as the artifact has it, else from the tokenizer."""
    tokenizer = load_tokenizer(folder)
    others: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        text = token_text(tokenizer_config.get(f"{kind}_token"))
        if text is not None and (index := tokenizer.token_to_id(text)) is not None:
            others[f"{kind}_token_id"] = index
    length = tokenizer_config.get("model_max_length")
    if isinstance(length, int) and length < 10**9:  # transformers writes 1e30 for "none"
        others["max_position_embeddings"] = length
    return others | kept_values(source)


def push(folder: Path, address: str, ref: str) -> None:
    """Upload the directory, card included, as one commit; a repository that does not exist is made, and is private.

    Where the upload fails, a repository that was made for it is deleted again.

    Raises:
        RunFailed: the Hub does not take it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    name = hub_address(address)[0]
    api, is_ours = HfApi(), False
    try:
        if not api.repo_exists(name):
            api.create_repo(name, private=True)
            is_ours = True
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message=ref)
    except BaseException as error:  # Ctrl-C, too; the HTTP library's have no base class in common with the Hub's own
        if is_ours:
            try:
                api.delete_repo(name)
            except Exception as failure:
                print(f"{address} was made for this and stays, empty: {first_line(failure)}", file=sys.stderr)
        if not isinstance(error, Exception):
            raise
        if isinstance(error, HfHubHTTPError):
            reason, hint = first_line(error), "the token needs the right to write there"
        else:
            reason = what_failed(error)
            hint = f"without a network, -o DIR writes the model; later, hf upload {name} DIR uploads it"
        raise RunFailed(f"{address}: not uploaded: {reason}", hint) from error
    print(f"{ref} -> {address}@{commit.oid}", file=sys.stderr)


def check_push(address: str) -> None:
    """Refuse what `push` could not do, before the export."""
    if hub_address(address)[1] is not None:
        raise UserError(f"--push {address}: a revision cannot be chosen", "write hf://ORG/NAME")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise UserError("--push needs huggingface_hub", install_line("hf")) from None
    if get_token() is None:
        raise UserError("--push needs a token of the Hub", "set HF_TOKEN, or log in: hf auth login")


def main(options: Options) -> None:
    """Verify the artifact, write the directory, upload it."""
    dtype, max_shard_size = parse_dtype(options.dtype), parse_size(options.max_shard_size)
    if options.push is not None:
        check_push(options.push)
    elif options.output is None:
        raise UserError("where to? --output DIR, --push hf://ORG/NAME, or both")
    with contextlib.ExitStack() as area:
        output = Path(options.output or area.enter_context(tempfile.TemporaryDirectory()))
        with whole_directory(output, options.force) as folder:
            ref = options.model
            if is_place(ref):
                version = adopt_model(ref, Registry.default())
                assert version is not None  # it publishes
                ref = version.ref
            model = Model.load(ref)
            export(model, folder, dtype, max_shard_size)
        if options.output is not None:
            print(f"{model.ref} -> {options.output}", file=sys.stderr)
        if options.push is not None:
            push(output, options.push, model.ref)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
