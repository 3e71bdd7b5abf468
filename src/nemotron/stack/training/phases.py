"""A pretraining in phases: each goes on with the model of the one before, behind the windows that it read.

`PhaseLoaders` has the sequences of a phase whose steps are of one length or of two: the published long-context phase
has steps of long and of short sequences, so many more of these that a step has the same number of tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.kit import Checkpoint
from nemotron.kit.schemas.pretraining import DatasetConfig
from nemotron.stack.models import NemotronHConfig
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.training.blend import is_short_step
from nemotron.stack.training.distributed import Ranks
from nemotron.stack.training.loaders import BlendLoader


class PhaseLoaders:
    """The loader of full sequences, that of short ones where there are such, and which of them a step reads.

    Args:
        dataset: blends, phases of them, and lengths.
        rows: full sequences of the whole phase.
        seed: of the order of windows.
        ranks: among which the rows of a batch are dealt.
    """

    def __init__(self, dataset: DatasetConfig, rows: int, seed: int, ranks: Ranks) -> None:
        self._short, self._drawn_before = dataset.short, dict[str, Any]()
        length, folder = dataset.seq_length, dataset.path / dataset.blend
        self.full = BlendLoader(folder, length, rows, seed, ranks, dataset.phase)
        # By the streams that they read: those of one name read the same windows in the same order.
        self._loaders = {f"{dataset.blend} {length} {seed}": self.full}
        if (short := dataset.short) is not None:
            rows *= length // short.seq_length
            loader = BlendLoader(dataset.path, short.seq_length, rows, seed, ranks, short.phase)
            self._loaders[f". {short.seq_length} {seed}"] = loader
            for key, each in (("dataset.phase", self.full), ("dataset.short.phase", loader)):
                names = [phase.name for phase in each.blend.phases]
                if len(names) > 1:  # the phases end at shares of all steps, and neither loader reads in all of them
                    raise UserError(
                        f"{key}: steps of two lengths draw from one phase each", f"one of {', '.join(names)}"
                    )

    def of_step(self, step: int) -> BlendLoader:
        """The one that step `step`, counted from 0, reads: a function of the step alone."""
        *_, last = self._loaders.values()
        return last if self._short is not None and is_short_step(step, self._short.share) else self.full

    def go_on_from(self, base: Checkpoint, data: Path) -> None:
        """Leave out the windows that the phases before `base` read of `data`; another version has other streams."""
        if base.dataset_path == data:
            drawn = base.metrics.get("drawn")
            self._drawn_before = drawn if isinstance(drawn, dict) else {}
        for name, loader in self._loaders.items():
            if name in self._drawn_before:
                loader.go_on_from(self._drawn_before[name])

    def trained_tokens(self) -> np.ndarray:
        """All tokens that were drawn, those of short sequences included, as `BlendLoader.trained_tokens`."""
        return np.concatenate([loader.trained_tokens() for loader in self._loaders.values()])

    def metrics(self) -> dict[str, Any]:
        """For the record of the model: the mixture, realised beside requested; epochs; what has been read so far."""
        return {
            "mixture": [asdict(row) for loader in self._loaders.values() for row in loader.mixture()],
            "epochs": self.full.epochs(),
            "drawn": self._drawn_before | {name: loader.drawn for name, loader in self._loaders.items()},
        }

    def state_dict(self) -> list[dict[str, Any]]:
        """The cursors, for a checkpoint."""
        return [loader.state_dict() for loader in self._loaders.values()]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from the cursors of a checkpoint."""
        for loader, state in zip(self._loaders.values(), states, strict=True):
            loader.load_state_dict(state)


def check_base(base: Checkpoint, architecture: NemotronHConfig, tokenizer_dir: Path) -> None:
    """UserError where the model to go on from is another than the config describes, or reads other tokens."""
    of_config, of_base = architecture.to_dict(), load_config(base.path).to_dict()
    if different := [key for key, value in of_base.items() if of_config[key] != value]:
        key = different[0]
        raise UserError(
            f"model.{key} is {of_config[key]}, but {base.ref} has {of_base[key]}",
            f"state the model's own architecture; {counted(len(different), 'key')} differ: {', '.join(different)}",
        )
    if (tokenizer_dir / "tokenizer.json").read_bytes() != (base.path / "tokenizer.json").read_bytes():
        raise UserError(
            f"the data was tokenised with another tokenizer than that of {base.ref}",
            "go on with the data that the model was trained on",
        )
