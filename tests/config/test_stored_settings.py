"""Settings that a run takes from a checkpoint: code is none of them."""

from megatrain.config import parse
from megatrain.config.stored_settings import stored_settings


def test_a_function_that_a_checkpoint_names_is_not_taken():
    request = parse(["--load", "c", "--eval-only"])
    for style, expected in (("cosine", "cosine"), ("theirs.py:decay", None)):
        stored = {"schedule": {"lr_decay_style": style}, "data": {"dataset": "theirs.py:data"}}
        taken = stored_settings(stored, request, with_layout=True, with_training=True)
        assert taken.get("schedule.lr_decay_style") == expected
        assert "data.dataset" not in taken
