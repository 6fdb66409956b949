"""Manifests that earlier versions wrote stay readable when settings come or change: `old/` has one of each time."""

from pathlib import Path

import pytest

from megatrain.checkpoint.manifest import decode
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.schema.tree import section_types

SECTIONS = {
    name: section_types()[name] for name in ("model", "experts", "vision", "data", "tokenizer", "precision")
}
"""Sections that programs build from a checkpoint alone."""
OLD = sorted((Path(__file__).parent / "old").iterdir())


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_an_old_manifest_is_read(path: Path) -> None:
    manifest = decode(path.read_bytes())
    for name, kind in SECTIONS.items():
        assert isinstance(stored_section(path, manifest.config, name, kind), kind)
    assert manifest.tensors


def test_a_setting_that_became_a_list_had_one_value_or_none() -> None:
    (path, *_) = OLD
    assert b'"image_data_path":null' in path.read_bytes()
    assert decode(path.read_bytes()).config["data"]["image_data_path"] == []
