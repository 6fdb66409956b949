"""Checkpoints of the format `torch` for any layout, cut from a recorded one of the format `torch_dist`.

No recording of this format exists: the files follow what is known of Megatron-LM's code, not files that it wrote.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.interop.megatron.names import STORED_TWICE
from megatrain.interop.megatron.torch_dist import TorchDistFolder
from megatrain.parallel.layout import whole_box

BY_ROWS = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1)\.(weight|bias)"
)
LAYER = re.compile(r"((?:en|de)coder\.layers)\.(\d+)\.")
BY_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight")
KINDS = ("exp_avg", "exp_avg_sq")


def write_torch_files(source: Path, target: Path, *, tp: int = 1, pp: int = 1, ep: int = 1) -> Path:
    """Write the checkpoint `source`/iter_0000008 as one of the format `torch`; return the folder of the run."""
    folder = TorchDistFolder(source / "iter_0000008")
    common = folder.object("common_state")[0]
    plain = {
        name: value
        for name, value in common["args"].state.items()
        if isinstance(value, bool | int | float | str | list | None)
    }
    sizes = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp, "world_size": tp * pp * ep, "ckpt_format": "torch",
    }  # fmt: skip
    arguments = argparse.Namespace(**{**plain, **sizes})
    whole = {name: folder.read(name, whole_box(tensor.shape)) for name, tensor in folder.tensors.items()}
    states = [unstacked(whole, f"optimizer.state.{kind}.") for kind in KINDS]
    model = unstacked(
        {name: tensor for name, tensor in whole.items() if not name.startswith("optimizer.")}, ""
    )
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            for ep_rank in range(ep):

                def local(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
                    return part(tensors, arguments, tp_rank, pp_rank, ep_rank)  # noqa: B023 (called at once)

                own, moments = local(model), list(map(local, states))
                vectors = {
                    name for name, tensor in own.items() if tensor.dim() == 1 or name.endswith(".bias")
                }
                trained = [name for name in own if not is_second_name(name, own)]
                names = [
                    [name for name in trained if (name in vectors) == is_vector]
                    for is_vector in (False, True)
                ]
                ids = {name: number for number, name in enumerate(name for group in names for name in group)}
                optimizer = {
                    "state": {
                        ids[name]: {
                            kind: moment.get(name, moment.get(second_name(name)))
                            for kind, moment in zip(KINDS, moments, strict=True)
                        }
                        for name in trained
                    },
                    "param_groups": [
                        {"wd_mult": factor, "step": 8, "params": [ids[name] for name in group]}
                        for factor, group in zip((1.0, 0.0), names, strict=True)
                    ],
                }
                name = f"mp_rank_{tp_rank:02d}{f'_{pp_rank:03d}' * (pp > 1)}{f'_{ep_rank:03d}' * (ep > 1)}"
                path = target / "iter_0000008" / name / "model_optim_rng.pt"
                path.parent.mkdir(parents=True)
                extra = {f"{next(iter(own))}._extra_state": None}
                state: dict[str, Any] = {
                    "args": arguments, "checkpoint_version": 3.0, "iteration": 8, "model": {**own, **extra},
                    "optimizer": optimizer, "opt_param_scheduler": common["opt_param_scheduler"],
                }  # fmt: skip
                torch.save(state, path)
    (target / "latest_checkpointed_iteration.txt").write_text("8")
    return target


def unstacked(whole: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors of single layers, with stacked experts, in the order of the model."""
    found: dict[str, Tensor] = {}
    for stored, tensor in whole.items():
        name = stored.removeprefix(prefix)
        if prefix and name == stored:
            continue
        if re.match(r"(en|de)coder\.layers\.\D", name):
            found |= {name.replace("layers", f"layers.{i}", 1): one for i, one in enumerate(tensor)}
        else:
            found[name] = tensor
    order = "embedding position_embeddings encoder decoder lm_head output_layer binary_head pooler".split()

    def place(name: str) -> tuple[int, int]:
        match = LAYER.match(name)
        return order.index(name.split(".", maxsplit=1)[0]), int(match[2]) if match else 1000

    return {name: found[name] for name in sorted(found, key=place)}


def second_name(name: str) -> str:
    """Return the other name of a module with two; the same name if it has one."""
    first = next((one for one in STORED_TWICE if name.startswith(one)), "")
    return name.replace(first, STORED_TWICE[first]) if first else name


def is_second_name(name: str, names: Iterable[str]) -> bool:
    return any(name == second_name(one) != one for one in names)


def part(
    tensors: dict[str, Tensor], arguments: argparse.Namespace, tp_rank: int, pp_rank: int, ep_rank: int
) -> dict[str, Tensor]:
    """Return what a rank holds, with its own numbers of layers and experts."""
    tp, pp, ep = (
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.expert_model_parallel_size,
    )
    per_stage = arguments.num_layers // pp
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = LAYER.match(name)
        is_first = name.startswith(("embedding", "position_embeddings"))
        if layer is None and pp_rank != (0 if is_first else pp - 1):
            continue
        if layer is not None:
            number = int(layer[2]) - pp_rank * per_stage
            if not 0 <= number < per_stage:
                continue
            name = f"{layer[1]}.{number}.{name[layer.end() :]}"
        if ".mlp.experts." not in name:
            found[name] = sliced(name, tensor, arguments, tp, tp_rank)
            continue
        per_rank = len(tensor) // ep
        for expert in range(per_rank):
            of_one = name.replace("experts.experts", f"experts.local_experts.{expert}")
            found[of_one] = sliced(name, tensor[expert + ep_rank * per_rank], arguments, tp, tp_rank)
    return found


def sliced(name: str, tensor: Tensor, arguments: argparse.Namespace, tp: int, tp_rank: int) -> Tensor:
    """Return the rows or columns of a tensor rank, in memory of their own."""
    if BY_ROWS.search(name) and arguments.swiglu and "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[tp_rank] for half in tensor.chunk(2)])
    dim = 0 if BY_ROWS.search(name) else 1 if BY_COLUMNS.search(name) else None
    return (tensor if dim is None else tensor.chunk(tp, dim)[tp_rank]).clone()
