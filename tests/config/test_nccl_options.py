"""Options of NCCL communicators: of a file, by the names of Megatron-LM's groups, for the communicators here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.config import ConfigError, parse, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.nccl_options import group_options, options_of, read_group_options
from megatrain.config.schema.parallel import NCCL_GROUPS
from megatrain.parallel import process_groups
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.launch.facts import gather_facts

FILE = "ep: {max_ctas: 16, net_name: IB}\ndp_cp:\n  min_ctas: 2\n"


def test_options_of_a_file_and_high_priority() -> None:
    options = group_options(FILE, ("ep", "pp"))
    assert options_of("ep", options) == {"max_ctas": 16, "net_name": "IB", "is_high_priority_stream": True}
    assert (
        options_of("pp_forward_0", options) == options_of("pp", options) == {"is_high_priority_stream": True}
    )
    assert options_of("dp", options) == options_of("replicas", options) == {"min_ctas": 2}
    assert (
        options_of("tp", options) == options_of("world", options) == options_of("expert_shard", options) == {}
    )
    assert group_options(None, ()) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- ep", "expected groups"),
        ("ep: 1", "expected groups"),
        ("xy: {max_ctas: 1}", "xy is none of tp, cp"),
        ("3: {max_ctas: 1}", "3 is none of tp, cp"),
        ("ep: {max_cta: 1}", "ep max_cta: 1 is none of min_ctas"),
        ("ep: {max_ctas: many}", "ep max_ctas: many is none of min_ctas"),
        ("ep: {max_ctas: true}", "ep max_ctas: True"),
    ],
)
def test_wrong_files(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_group_options(text)


def test_a_wrong_file_is_a_problem_of_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    request = parse(
        f"--micro-batch-size 1 --tokenizer-type NullTokenizer --nccl-communicator-config-path {file}".split()
    )
    for text in (None, "ep: {max_cta: 1}"):
        if text is not None:
            file.write_text(text)
        with pytest.raises(
            ConfigError,
            match=rf"--nccl-communicator-config-path {file}: [\s\S]*fix: correct the file; such as",
        ):
            resolve(request, gather_facts(request, LaunchEnvironment()))


def test_options_are_set_where_nccl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(is_high_priority_stream=False, config=SimpleNamespace(max_ctas=0))
    world = SimpleNamespace(bound_device_id=0, _get_backend=lambda _: SimpleNamespace(options=given))
    monkeypatch.setattr(process_groups.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(process_groups.dist, "split_group", lambda *_, pg_options, **__: pg_options)
    options = process_groups.make_group("ep", [[0, 1]], options=group_options("ep: {max_ctas: 16}", ["ep"]))
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, 16)
    assert (given.is_high_priority_stream, given.config.max_ctas) == (False, 0)
    assert process_groups.make_group("tp", [[0, 1]]) == given


def test_every_communicator_can_have_options() -> None:
    """All that a grid makes, but the world's and the store, has a name of Megatron-LM."""
    shape, made = GridShape(tp=2, cp=2, dp=2, pp=2, ep=2, etp=1, cp_heads=1), set[str]()
    build_grid(shape, 0, lambda name, _: made.add(name))
    every = {name: {"max_ctas": 1} for name in NCCL_GROUPS}
    others = {name for name in made if not options_of(name, every)}  # type: ignore[arg-type]
    assert others == {"world", "messages"}
