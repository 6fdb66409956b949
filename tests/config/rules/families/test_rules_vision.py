"""Rules about vision-language models: each fires, names its flags and a remedy."""

from itertools import accumulate, combinations, pairwise

import pytest

from megatrain.config import Facts
from megatrain.config.derive.vision import sample_length
from megatrain.config.facts import DatasetFacts

VLM = "--model-family vlm --img-h 28 --img-w 28 --patch-dim 14"
CLIP = f"{VLM} --vision-model-type clip --vision-hidden-size 16 --vision-num-attention-heads 4"
TEXT = DatasetFacts(split="all", prefix="d", weight=None, num_sequences=9999, num_tokens=99999, digest="d")

CASES = {
    "images_have_patches": [
        (f"{VLM} --img-h 8", "", None, ("--img-h 8", "--patch-dim 14"), ("14",)),
        (f"{VLM} --img-w 30", "", None, ("--img-w 30", "--patch-dim 14"), ("--img-w 28",)),
    ],
    "pinpoints_are_whole_tiles": [
        (f"{VLM} --disable-vision-class-token --image-grid-pinpoints 28x56 30x28", "", None,
         ("--image-grid-pinpoints 28x56 30x28", "28 x 28"), ("--img-h", "28x56")),
        (f"{VLM} --disable-vision-class-token --image-grid-pinpoints 28x56 --use-tiling", "", None,
         ("--use-tiling", "--image-grid-pinpoints"), ("remove --use-tiling",)),
        (f"{VLM} --image-grid-pinpoints 28x56", "", None, ("class token",), ("--disable-vision-class-token",)),
    ],
    "patches_form_squares": [
        (f"{VLM} --pixel-shuffle", "", None, ("--pixel-shuffle", "class token"), ("--disable-vision-class-token",)),
        (f"{VLM} --img-w 42 --pixel-shuffle --disable-vision-class-token", "", None,
         ("--img-w 42", "3 patches of 14", "--pixel-shuffle-factor 2"), ("--img-w 56",)),
    ],
    "tower_has_sizes": [
        (f"{VLM} --vision-model-type clip --vision-num-attention-heads 4", "", None, ("--vision-hidden-size",), ("--vision-hidden-size 1024",)),
        (f"{CLIP} --vision-hidden-size 18", "", None,
         ("--vision-hidden-size 18", "--vision-num-attention-heads 4"), ("--vision-hidden-size 20",)),
        (f"{CLIP} --vision-num-attention-heads 1 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--vision-num-attention-heads 1", "2"), ("--tensor-model-parallel-size 1",)),
    ],
    "images_are_mock_data": [
        (f"{VLM} --tokenizer-type NullTokenizer --data-path d", "--mock-data", Facts(datasets=(TEXT,)),
         ("--data-path names text",), ("remove --data-path", "--image-data-path", "--mock-data")),
    ],
    "frozen_parts_have_no_gradients": [
        (f"{VLM} --freeze-ViT --optimizer muon", "", None,
         ("--freeze-ViT", "--optimizer muon"), ("remove --freeze-ViT or --optimizer muon",)),
        (f"{VLM} --freeze-LM --optimizer-cpu-offload", "", None,
         ("--freeze-LM", "--optimizer-cpu-offload"), ("remove --freeze-LM",)),
    ],
    "sequence_divides_over_tp_ranks": [
        (f"{VLM} --tensor-model-parallel-size 4 --sequence-parallel", "", Facts(world_size=4),
         ("with 5 tokens of images", "--tensor-model-parallel-size 4"), ("--seq-length",)),
    ],
}  # fmt: skip


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
    [
        ("", True),
        ("--transformer-impl local", False),
        ("--vision-model-type clip", False),
        ("--vision-model-type internvit300M", True),
    ],
)
def test_a_norm_precedes_the_projector_as_in_megatron(plan_of, flags, has_norm):
    sizes = "--vision-hidden-size 16 --vision-num-attention-heads 4"
    vision = plan_of(f"{VLM} {sizes} {flags}").derived.model_spec.vision
    assert (vision.projector.norm is not None) == has_norm


@pytest.mark.parametrize(("images", "size"), [(1, 6), (4, 6), (40, 6), (40, 24)])
@pytest.mark.parametrize("frozen", ["", "--freeze-ViT"])
def test_the_automatic_split_weighs_the_tower_and_splits_one_that_is_trained(plan_of, images, size, frozen):
    flags = f"{VLM} --num-layers 6 --vision-num-layers {size} --images-per-sample {images} {frozen}"
    stages = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout auto"
    plan = plan_of(f"{flags} {stages}", facts=Facts(world_size=4))
    derived, length = plan.derived, sample_length(plan.config)
    layers, head = derived.model_spec.flops_per_token(length)
    tower = derived.model_spec.vision_flops_per_token(length)
    assert len(tower) == (1 if frozen else size)
    costs = [*tower, *layers, head]

    def slowest(ends):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)]))

    of_tower = derived.tower_layers or (len(tower), 0, 0, 0)
    ends = accumulate(map(sum, zip(of_tower, derived.pipeline_layers, strict=True)))
    assert slowest(list(ends)[:3]) == min(map(slowest, combinations(range(1, len(costs)), 3)))
    assert (sum(of_tower), sum(derived.pipeline_layers)) == (len(tower), 6)
    assert bool(derived.tower_layers) == (not frozen and images == 40)
    assert (0 in derived.pipeline_layers[1:3]) == (not frozen and size == 24)  # a stage of the tower alone
