"""The scripts behind `nano3 model export` and `artifacts add`, on a tiny random model with a trained tokenizer."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hub_uploads import running_uploads
from safetensors.torch import load_file

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.local_store import LocalStore
from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Dataset, Model, Results
from nemotron.recipes.tools import add_model, model_export
from nemotron.recipes.tools.model_files import whole_directory
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate

TEXTS = [f"def function_{i}(value):\n    return value + {i * 37}\n" for i in range(50)] + ["the quick brown fox " * 20]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]) -> Path:
    """A registry with data, a model trained on it, and an evaluation of that model."""
    root = tmp_path_factory.mktemp("published")
    folder, data_dir, results_dir = root / "model", root / "data", root / "results"
    tokenizer = train_tokenizer(TEXTS, 400)
    save_tokenizer(tokenizer, folder, model_max_length=512, template="nano3")
    # transformers multiplies the experts of all tokens at once, by rows of a multiple of 16 bytes.
    model = small_model("MEM*E-", 1, vocab_size=tokenizer.get_vocab_size(), moe_intermediate_size=16)
    for moe in model.moe_blocks():
        moe.gate.e_score_correction_bias.normal_(0, 0.1)
    model.save_pretrained(folder)
    data_dir.mkdir()
    (data_dir / "train.jsonl").write_text('{"text": "x"}\n')
    results_dir.mkdir()
    artifacts = root / "artifacts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(artifacts))
        data = Dataset(path=data_dir, num_examples=1, sources=["the-raw-text"]).save("nano3-sft-data-tiny")
        metrics = {"valid_loss": {"stories": 1.25}, "active_parameters": 12345, "mixture": [{"source": "a"}]}
        metrics |= {"drawn": {". 128 1234": {"stories": 7020}}}
        saved = Model(path=folder, num_steps=70, tokens=4096, tokenizer_path=folder, metrics=metrics, sources=["x"])
        saved.save("nano3-sft-model-tiny")
        entry = {"tasks": 40, "greedy": 0.625, "greedy_95": [0.47, 0.76]}
        tasks = {"sft": {"prompt_format": "chat", "samples": 0, "mean": entry, "families": {"math": entry}}}
        Results(path=results_dir, metrics={"tasks": tasks}).save("nano3-eval-results-tiny")
    _add_inputs(artifacts, "nano3-sft-model-tiny", {"data": data.version.pinned})
    pinned = Registry(artifacts).resolve("nano3-sft-model-tiny").pinned
    _add_inputs(artifacts, "nano3-eval-results-tiny", {"sft": pinned})
    return artifacts


def _add_inputs(root: Path, name: str, inputs: dict[str, str]) -> None:
    """Publish once more what a run with these inputs would have published, without a run: version 2."""
    registry = Registry(root)
    version = registry.resolve(name)
    raw = json.loads((version.directory / "artifact.json").read_text())
    own = ("schema", "name", "digest", "num_files", "size_bytes")
    record = {key: value for key, value in raw.items() if key not in own} | {"inputs": inputs, "sources": []}
    record["producer"] |= {"argv": ["nemotron", "nano3", "sft", "sources=[{name: a|b}]"]}
    registry.publish(name, version.path, record)


@pytest.fixture(scope="module")
def exported(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `export` wrote of it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    code, said = run(model_export, model="nano3-sft-model-tiny", output=folder, artifacts=published)
    assert code == 0, said
    return folder


DEFAULTS: dict[ModuleType, dict[str, Any]] = {
    model_export: {"output": "out", "push": None, "dtype": "auto", "max_shard_size": "5GB", "force": False},
    add_model: {"name": None},
}


def run(script: ModuleType, *, artifacts: Path, **chosen: Any) -> tuple[int, str]:
    """The script with these options of its command, in this process: the exit code, and what it said on stderr."""
    said = io.StringIO()
    options = json.dumps({**DEFAULTS[script], **chosen}, default=str)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(artifacts))
        patch.setattr(sys, "argv", [str(script.__file__), options])
        code = run_tool(script.main, script.Options)
    return code, said.getvalue()


def source_model(published: Path) -> NemotronH:
    return NemotronH.from_pretrained(Registry(published).resolve("nano3-sft-model-tiny").path)


def test_transformers_generates_the_same_tokens(published: Path, exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = source_model(published)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("def function_3(value):", return_tensors="pt")["input_ids"]
    length = prompt.shape[1]
    ours = generate(model, prompt.tolist(), 24, temperature=0, stop_token_ids=(2, 11)).tokens[0]
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor([ours])], dim=1)).logits[0, length - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-3, "too close to call: another seed"
    assert theirs.generate(prompt, max_new_tokens=24, do_sample=False)[0, length:].tolist() == ours
    assert sorted(theirs.generation_config.eos_token_id) == [2, 11]
    assert theirs.config.max_position_embeddings == 512


def test_the_card_says_what_the_records_say(published: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["nemotron_h", "nano3-sft-model-tiny"],
    }  # fmt: skip
    version = Registry(published).resolve("nano3-sft-model-tiny")
    total, active = source_model(published).num_parameters()
    for said in (
        version.pinned, version.record["created_at"], "source: the-raw-text", "nano3-sft-data-tiny:1",
        "| optimizer steps | 70 |", "| tokens | 4,096 |", "| `valid_loss.stories` | 1.25 |",
        "| math | 40 | 0.625 [0.470, 0.760] |  |", "as `sft`", f"| parameters | {total:,} |", f"{active:,}",
        "| weights | float32 |", r"| command | `nemotron nano3 sft 'sources=[{name: a\|b}]'` |",
    ):  # fmt: skip
        assert said in body, said
    assert "7,020" not in body, "where pretraining goes on, no measure of the model"


def test_a_folder_of_somebody_else_in_the_registry_keeps_no_model_from_its_card(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = LocalStore.versions

    def refuse(store: LocalStore, name: str) -> list[int]:
        if name == "theirs":
            raise UserError(f"{name}: cannot be read: Permission denied")
        return versions(store, name)

    monkeypatch.setattr(LocalStore, "names", lambda store: ["nano3-eval-results-tiny", "theirs"])
    monkeypatch.setattr(LocalStore, "versions", refuse)
    code, said = run(model_export, model="nano3-sft-model-tiny", output=tmp_path / "model", artifacts=published)
    assert code == 0, said
    assert "| math | 40 | 0.625" in (tmp_path / "model/README.md").read_text()


def test_the_card_shows_how_a_base_model_and_one_that_answers_are_used(published: Path, tmp_path: Path) -> None:
    source = Registry(published).resolve("nano3-sft-model-tiny").path
    uses = {"base": 'tokenizer("def main("', "answering": "apply_chat_template"}
    for name, template in (("base", None), ("answering", "nano3")):
        folder = shutil.copytree(source, tmp_path / "models" / name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
            Model(path=folder, num_steps=7, tokenizer_path=folder, chat_template=template).save(name)
        assert run(model_export, model=name, output=tmp_path / name, artifacts=tmp_path / "artifacts")[0] == 0
        card = (tmp_path / name / "README.md").read_text()
        assert [use for use in uses.values() if use in card] == [uses[name]]


def test_dtype_and_shard_size(published: Path, tmp_path: Path) -> None:
    chosen = {"model": "nano3-sft-model-tiny", "output": tmp_path / "small", "dtype": "bfloat16"}
    done = run(model_export, **chosen, max_shard_size="20KB", artifacts=published)
    shards = sorted((tmp_path / "small").glob("model-*-of-*.safetensors"))
    written = "".join(f"{shard.name} written\n" for shard in shards)
    assert done == (0, f"{written}nano3-sft-model-tiny:2 -> {tmp_path / 'small'}\n")
    assert len(shards) > 2
    state: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
        state |= tensors
    expected = load_file(Registry(published).resolve("nano3-sft-model-tiny").path / "model.safetensors")
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        wanted = expected[name] if name.endswith("e_score_correction_bias") else expected[name].to(torch.bfloat16)
        assert torch.equal(tensor, wanted), name
    assert json.loads((tmp_path / "small" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_comes_back_to_the_bit(published: Path, exported: Path, tmp_path: Path) -> None:
    code, said = run(add_model, place=exported, name="back", artifacts=tmp_path)
    assert code == 0, said
    version = Registry(tmp_path).resolve_verified("back")
    assert Model.load(version.path).ref == "back:1"  # as `eval` does
    assert version.record["sources"][0]["name"] == str(exported)
    before, after = source_model(published), NemotronH.from_pretrained(version.path)
    assert after.config == before.config
    state = after.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.state_dict().items())
    assert version.record["fields"]["num_parameters"] == before.num_parameters()[0]
    assert {path.name for path in version.path.iterdir()} == {path.name for path in exported.iterdir()}
    # And out again: what is no architecture (context length, token ids) went all the way.
    assert run(model_export, model="back", output=tmp_path / "out", artifacts=tmp_path)[0] == 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes(), name
    assert "| optimizer steps | 70 |" in (tmp_path / "out" / "README.md").read_text()


def test_a_directory_that_is_not_empty_is_left_alone(published: Path, exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    chosen = {"model": "nano3-sft-model-tiny", "output": output, "artifacts": published}
    for force, expected in (False, "is not empty"), (True, "thesis.txt, which is no part of a model"):
        code, said = run(model_export, **chosen, force=force)
        assert code == 2 and expected in said and len(said.splitlines()) <= 2
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (output / "thesis.txt").unlink()
    shutil.copyfile(exported / "config.json", output / "config.json")
    (output / "model-00001-of-00002.safetensors").write_text("of an older model")
    assert run(model_export, **chosen, force=True)[0] == 0
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in exported.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_nothing_is_left(published: Path, tmp_path: Path, signal_number: signal.Signals) -> None:
    """The script stops before it writes the card, when everything else is on disk, and waits to be interrupted."""
    code = (
        "import sys, time\nfrom nemo_runspec.errors import end_on_signals\nend_on_signals()\n"
        "from nemotron.recipes.tools import model_export\nfrom nemotron.recipes.tools.options import run_tool\n"
        "def wait(*_):\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "model_export.model_card = wait\nsys.exit(run_tool(model_export.main, model_export.Options))"
    )
    options = {**DEFAULTS[model_export], "model": "nano3-sft-model-tiny", "output": str(tmp_path / "new" / "out")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(options)],
        env={**os.environ, "RUNSPEC_ARTIFACTS_ROOT": str(published)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"waiting\n"
    assert [path.name.partition("-")[0] for path in (tmp_path / "new").iterdir()] == [".partial"]
    process.send_signal(signal_number)
    process.communicate(timeout=30)
    assert process.returncode == (130 if signal_number == signal.SIGINT else 143)
    assert list((tmp_path / "new").iterdir()) == []


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: flip(d / "model.safetensors", -1), "model.safetensors: "),
        (lambda d: flip(d / "config.json", 200), "config.json: "),
        (lambda d: flip(d / "tokenizer.json", 500), "tokenizer.json: content differs"),
        (lambda d: flip(d / "model.safetensors.index.json", 100), "model.safetensors.index.json: "),
        (lambda d: (d / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
        (lambda d: (d / "config.json").unlink(), "--type dataset"),
        (lambda d: (d / "pytorch_model.bin").write_bytes(b"\x80\x02."), "pytorch_model.bin: a pickle"),
    ],
    ids=["weights", "config", "tokenizer", "index", "no tokenizer config", "no config", "pickle"],
)
def test_a_damaged_export_is_refused(
    exported: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(exported, folder)
    damage(folder)
    code, printed = run(add_model, place=folder, artifacts=tmp_path / "artifacts")
    assert code == 2
    assert said in printed and len(printed.splitlines()) <= 2, printed
    assert not (tmp_path / "artifacts").exists()


def test_a_damaged_artifact_is_not_exported(published: Path, tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    shutil.copytree(published, artifacts)
    flip(Registry(artifacts).resolve("nano3-sft-model-tiny").path / "model.safetensors", -1)
    code, said = run(model_export, model="nano3-sft-model-tiny", output=tmp_path / "out", artifacts=artifacts)
    assert code == 2 and "model.safetensors: content differs from its sha256" in said
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]


@pytest.mark.parametrize(
    ("script", "chosen", "said"),
    [
        (model_export, {"model": "nano3-sft-data-tiny"}, "is of type Dataset, not Model"),
        (model_export, {"model": "nano3-sft-model-tiny", "dtype": "bfloat"}, "did you mean bfloat16?"),
        (model_export, {"model": "nano3-sft-model-tiny", "max_shard_size": "big"}, "bad size 'big'"),
        (add_model, {"place": "nowhere"}, "no directory nowhere"),
        (add_model, {"place": ".", "name": "a/b"}, "bad artifact name 'a/b'"),
        (add_model, {"place": "someone/a-model"}, "or hf://ORG/NAME"),
        (add_model, {"place": __file__}, "test_model_exchange.py is a file, a directory expected"),
        (model_export, {"model": "nano3-sft-model-tiny", "output": f"{__file__}/x"}, "error: cannot write to "),
    ],
)
def test_refusals(
    published: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: ModuleType,
    chosen: dict[str, str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = run(script, artifacts=published, **chosen)
    assert code == 2 and said in printed and len(printed.splitlines()) <= 2, printed
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_is_refused(published: Path, exported: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    source_model(published).save_pretrained(bare)
    code, said = run(add_model, place=bare, artifacts=tmp_path / "artifacts")
    assert code == 2 and "no tokenizer.json in" in said
    bigger = train_tokenizer([f"{text} and more words {i}" for i, text in enumerate(TEXTS)], 420)
    save_tokenizer(bigger, bare, model_max_length=512, template="nano3")
    code, said = run(add_model, place=bare, artifacts=tmp_path / "artifacts")
    assert code == 2 and f"tokens, the model only {source_model(published).config.vocab_size}" in said


def test_keys_that_mean_nothing_here_are_said(published: Path, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "manifest.sha256").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "expand": 2, "secret_sauce": 1}))
    code, said = run(add_model, place=folder, artifacts=tmp_path / "artifacts")
    assert code == 0 and "config.json: of no meaning here: secret_sauce\n" in said


def test_a_hub_model_comes_from_the_cache_without_network(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hf" / "hub" / "models--someone--a-model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in exported.iterdir():  # as in the real cache: links to blobs
        (repo / "blobs").mkdir(exist_ok=True)
        shutil.copyfile(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, said = run(add_model, place="hf://someone/a-model@main", artifacts=tmp_path / "artifacts")
    assert code == 0, said
    version = Registry(tmp_path / "artifacts").resolve_verified("a-model")
    assert version.record["sources"][0]["name"] == f"https://huggingface.co/someone/a-model/tree/{commit}"
    code, said = run(add_model, place="hf://someone/another", artifacts=tmp_path / "artifacts")
    download = "hf download someone/another, and give its folder here; private and gated models need hf auth login"
    said_offline = (
        "error: hf://someone/another: HF_HUB_OFFLINE is set, and it is not in the cache\n"
        f"where it can be reached: {download}, or HF_TOKEN\n"
    )
    assert (code, said) == (2, said_offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    code, said = run(add_model, place="hf://someone/another", artifacts=tmp_path / "artifacts")
    assert (code, said) == (2, said_offline.replace("HF_HUB_OFFLINE is set", "the Hub was not reached"))


@pytest.mark.parametrize("force", [False, True])
def test_of_two_exports_into_one_directory_the_slower_one_is_refused(tmp_path: Path, force: bool) -> None:
    output, quicker = tmp_path / "out", tmp_path / "quicker"
    quicker.mkdir()
    (quicker / "config.json").write_text("quicker")
    with (
        pytest.raises(UserError, match="was written by another export meanwhile"),
        whole_directory(output, force) as slower,
    ):
        (slower / "config.json").write_text("slower")
        quicker.rename(output)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (output / "config.json").read_text() == "quicker"


def test_of_two_exports_into_one_empty_folder_the_slower_one_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="was written by another export meanwhile"),
        whole_directory(tmp_path, False) as slower,
    ):
        (slower / "config.json").write_text("slower")
        (tmp_path / "config.json").write_text("quicker")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "quicker"}


def test_a_folder_that_is_there_stays_the_same_one(tmp_path: Path) -> None:
    """A link would be replaced, a mount point cannot be renamed, and a shell would be in a deleted folder."""
    output, link = tmp_path / "out", tmp_path / "link"
    output.mkdir()
    link.symlink_to(output)
    inode = output.stat().st_ino
    for text in ("first", "second"):
        with whole_directory(link, text == "second") as folder:
            (folder / "config.json").write_text(text)
        assert link.is_symlink() and output.stat().st_ino == inode
        assert [(path.name, path.read_text()) for path in output.iterdir()] == [("config.json", text)]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()])
@pytest.mark.parametrize("done", [False, True])  # Ctrl-C may come when the move is made and nothing has noted it
def test_a_replacement_that_fails_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, done: bool
) -> None:
    names, rename = ["config.json", "model.safetensors"], Path.rename
    for name in names:
        (tmp_path / name).write_text("old")

    def failing(path: Path, target: Path) -> None:
        if fails := target == tmp_path / "model.safetensors" and path.read_text() == "new":
            monkeypatch.setattr(Path, "rename", rename)
        if done or not fails:
            rename(path, target)
        if fails:
            raise error

    monkeypatch.setattr(Path, "rename", failing)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
    with pytest.raises(expected) as failed, whole_directory(tmp_path, True) as folder:
        for name in names:
            (folder / name).write_text("new")
    assert expected is KeyboardInterrupt or str(failed.value) == f"cannot write to {tmp_path}: Device or resource busy"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "old")


def test_an_import_knows_where_the_export_came_from(published: Path, exported: Path, tmp_path: Path) -> None:
    original = Registry(published).resolve("nano3-sft-model-tiny")
    # In the same registry the lineage goes on.
    here = shutil.copytree(published, tmp_path / "here")
    assert run(add_model, place=exported, artifacts=here)[0] == 0
    record = Registry(here).resolve("model").record
    assert record["inputs"]["exported"] == original.pinned
    assert [source["detail"] for source in record["sources"]] == [f"an export of {original.ref}"]
    assert (record["fields"]["num_steps"], record["fields"]["tokens"]) == (70, 4096)
    # Elsewhere its raw sources are known, and which artifact it was.
    assert run(add_model, place=exported, artifacts=tmp_path / "there")[0] == 0
    record = Registry(tmp_path / "there").resolve("model").record
    assert "exported" not in record["inputs"]
    assert [source["name"] for source in record["sources"]] == [str(exported), original.ref, "the-raw-text"]
    assert record["sources"][1]["sha256"] == original.digest
    (broken := shutil.copytree(exported, tmp_path / "broken")).joinpath("manifest.sha256").unlink()
    (broken / "nemotron.json").write_text("{}")
    code, said = run(add_model, place=broken, artifacts=tmp_path / "there")
    assert code == 2 and "nemotron.json: not what an export writes" in said


def test_a_model_is_uploaded_with_its_card(
    published: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    chosen = {"model": "nano3-sft-model-tiny", "output": None, "push": "hf://me/mine", "artifacts": published}
    assert "--push needs a token of the Hub" in run(model_export, **chosen)[1]
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with running_uploads() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        code, said = run(model_export, **chosen)
        assert (code, hub.tokens) == (0, {"hf_good"}), said
        assert hub.created[0]["visibility"] == "private" and hub.messages == ["nano3-sft-model-tiny:2"]
        assert said.endswith(f"nano3-sft-model-tiny:2 -> hf://me/mine@{'a' * 40}\n")
        assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}
        hub.refused = ("/commit/",)  # what was there before stays
        code, said = run(model_export, **chosen)
        assert code == 1 and "hf://me/mine: not uploaded: " in said and "hf_good" not in said
        assert (len(hub.created), hub.repositories) == (1, {"me/mine"})
        chosen["push"] = "hf://me/other"  # what is made for an upload that fails does not
        code, said = run(model_export, **chosen)
        assert code == 1 and "hf://me/other: not uploaded: " in said and "stays" not in said
        assert (len(hub.created), hub.repositories) == (2, {"me/mine"})
        hub.refused += ("DELETE",)
        code, said = run(model_export, **chosen)
        assert code == 1 and "hf://me/other was made for this and stays, empty: 403" in said
        assert hub.repositories == {"me/mine", "me/other"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    code, said = run(model_export, **{**chosen, "push": "hf://me/mine"})
    assert code == 1 and said.splitlines() == [
        "error: hf://me/mine: not uploaded: the Hub was not reached (ConnectError)",
        "without a network, -o DIR writes the model; later, hf upload me/mine DIR uploads it",
    ]
    assert run(model_export, **{**chosen, "push": "hf://me/mine@v2"})[0] == 2
    assert run(model_export, **{**chosen, "push": None})[0] == 2
