"""A folder of transformers as the start of a run, and as the source of its settings.

--load hf:FOLDER, --pretrained-checkpoint hf:FOLDER ─> StoredRun: weights alone; each rank reads its boxes from the files
--from-hf FOLDER ─> config.json ─> settings of the model, tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config import Request, StoredRun
from megatrain.config.schema.resume_class import FUNCTION, SHAPE
from megatrain.config.schema.training import HF_PREFIX
from megatrain.config.schema.tree import paths_of
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.config_file import CONFIG_NAME
from megatrain.interop.hf.families.table import family_of
from megatrain.interop.hf.family import COUNT
from megatrain.interop.hf.folder import TOKENIZER_NAME, HfFolder
from megatrain.interop.hf.peft_adapters import CONFIG as ADAPTER_CONFIG
from megatrain.interop.hf.settings import read_settings


def start_of_folder(name: str) -> tuple[StoredRun, Mapping[str, Any]]:
    """Return the start of a run that `hf:FOLDER` names, and its configuration for --use-checkpoint-args.

    Raises:
        InputError: the folder is damaged, or of a model that megatrain lacks.
    """
    folder = Path(name.removeprefix(HF_PREFIX))
    reader, name = HfCheckpoint(folder), f"{HF_PREFIX}{folder}"
    config = reader.manifest.config
    compared: dict[str, dict[str, Any]] = {"model": {"padded_vocab_size": reader.num_rows}, "experts": {}}
    if config["model"]["model_family"] == "vlm":
        compared["vision"] = {}
    for path in paths_of(SHAPE, FUNCTION):
        section, _, setting = path.partition(".")
        if section in compared:
            compared[section][setting] = config[section][setting]
    start = StoredRun(
        path=name, iteration=0, consumed_train_samples=0, config=compared, sources=(name,), is_start=True
    )
    return start, config


def fix_of_transformers(flag: str, folder: Path) -> str:
    """Return the fix for a flag of checkpoints that names a folder of transformers or peft; empty: it names neither."""
    if (folder / CONFIG_NAME).is_file():
        return f"give {flag} {HF_PREFIX}{folder}, since it is a folder of transformers"
    if (folder / ADAPTER_CONFIG).is_file():
        return f"convert the adapters of peft first: megatrain convert peft-to-megatrain {folder} TARGET --base FOLDER"
    return ""


def described_settings(request: Request) -> tuple[dict[str, Any], str]:
    """Return the settings of --from-hf that are not given, by path, and the file that describes them.

    Raises:
        InputError: the folder's config.json is damaged, or of a model that megatrain lacks.
    """
    name = request.known("checkpoint.from_hf")
    if name is None:
        return {}, ""
    path = Path(name)
    folder = HfFolder(path)
    family = family_of(folder.config)
    found = read_settings(family, folder.config)
    has_tokenizer = any(
        path.startswith("tokenizer.") and request.origins[path].is_given for path in request.origins
    )
    if not has_tokenizer and (path / TOKENIZER_NAME).is_file():
        found["tokenizer.tokenizer_type"] = "HuggingFaceTokenizer"
        found["tokenizer.tokenizer_model"] = str(path.resolve())
    elif not has_tokenizer:
        found["tokenizer.tokenizer_type"] = "NullTokenizer"
        found["tokenizer.vocab_size"] = family.text_config(folder.config).checked("vocab_size", check=COUNT)
    taken = {key: value for key, value in found.items() if not request.origins[key].is_given}
    return taken, str(path / CONFIG_NAME)
