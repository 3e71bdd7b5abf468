"""A module to have loaded before a fork (`forked.py`): what the modules behind the scripts of data preparation and of
evaluation import. The fingerprint of a run asks for it, and to read it takes half of what most runs of tests take."""

from pathlib import Path

import nemotron.recipes
from nemo_runspec.code import code_of
from nemo_runspec.runspec import parse

SCRIPTS = (
    "data/pack/pack.py",
    "data/tokenize/tokenize_documents.py",
    "nano3/stage0_pretrain/data_prep.py",
    "nano3/stage1_sft/data_prep.py",
    "nano3/stage2_rl/data_prep.py",
    "nano3/stage3_eval/evaluate.py",
)
for script in SCRIPTS:
    spec = parse(Path(nemotron.recipes.__file__).parent / script)
    code_of(spec.script_path, schema=spec.schema_path)
