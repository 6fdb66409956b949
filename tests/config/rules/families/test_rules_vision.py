"""Rules about vision-language models: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts

VLM = "--model-family vlm --img-h 28 --img-w 28 --patch-dim 14"
CLIP = f"{VLM} --vision-model-type clip --vision-hidden-size 16 --vision-num-attention-heads 4"

CASES = [
    (f"{VLM} --img-h 8", "", None, ("--img-h 8", "--patch-dim 14"), ("14",)),
    (f"{VLM} --img-w 30", "", None, ("--img-w 30", "--patch-dim 14"), ("--img-w 28",)),
    (f"{VLM} --vision-model-type clip --vision-num-attention-heads 4", "", None, ("--vision-hidden-size",), ("--vision-hidden-size 1024",)),
    (f"{CLIP} --vision-hidden-size 18", "", None,
     ("--vision-hidden-size 18", "--vision-num-attention-heads 4"), ("--vision-hidden-size 20",)),
    (f"{CLIP} --vision-num-attention-heads 1 --tensor-model-parallel-size 2", "", Facts(world_size=2),
     ("--vision-num-attention-heads 1", "2"), ("--tensor-model-parallel-size 1",)),
    (f"{VLM} --mtp-num-layers 1", "", None, ("--mtp-num-layers",), ("remove --mtp-num-layers",)),
    (f"{VLM} --freeze-ViT --optimizer muon", "", None,
     ("--freeze-ViT", "--optimizer muon"), ("remove --freeze-ViT or --optimizer muon",)),
    (f"{VLM} --freeze-LM --optimizer-cpu-offload", "", None,
     ("--freeze-LM", "--optimizer-cpu-offload"), ("remove --freeze-LM",)),
    (f"{VLM} --tensor-model-parallel-size 4 --sequence-parallel", "", Facts(world_size=4),
     ("with 5 tokens of images", "--tensor-model-parallel-size 4"), ("--seq-length",)),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "without", "facts", "named", "remedy"), CASES)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    "flags", [VLM, CLIP, f"{VLM} --freeze-LM --freeze-ViT", f"{VLM} --decoder-num-layers 3"]
)
def test_vision_language_models_resolve(problems_of, flags):
    assert problems_of(flags) == []


def test_the_language_model_has_its_own_depth_and_length(plan_of):
    plan = plan_of(f"{VLM} --decoder-num-layers 3 --dataloader-seq-length 20")
    spec = plan.derived.model_spec
    assert (len(spec.layers), len(spec.vision.layers)) == (3, plan.config.model.num_layers)
    assert plan.derived.tokens_per_iteration == 25 * plan.config.training.global_batch_size


@pytest.mark.parametrize(
    ("flags", "has_norm"),
    [("", True), ("--transformer-impl local", False), ("--vision-model-type clip", False)],
)
def test_a_norm_precedes_the_projector_as_in_megatron(plan_of, flags, has_norm):
    sizes = "--vision-hidden-size 16 --vision-num-attention-heads 4"
    vision = plan_of(f"{VLM} {sizes} {flags}").derived.model_spec.vision
    assert vision.projector.has_norm == has_norm
