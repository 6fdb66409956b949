"""Rules about devices: each fires, names its flags and a remedy."""

from megatrain.config import Facts

CUDA = Facts(device="cuda")
H100 = Facts(
    device="cuda", device_name="H100", device_capability=(9, 0), libraries={"transformer_engine": "2.20.2"}
)

MODULES = "--te-precision-config-file a.yaml"
EMPTY = '{"attention": {"no_op": true}, "mlp": {"no_op": true}}'
NO_LAYERS = f'{{"block_configs": [{EMPTY}, {EMPTY}, {EMPTY}, {EMPTY}]}}'


def modules(pattern, *more, device="cpu", **facts):
    """Return facts with a file whose only matcher gives linear layers the recipe mxfp8."""
    recipe = ", ".join(("fp8_quantization_recipe: mxfp8", *more))
    config = f"{{transformer_engine_config_type: TEQuantizationParams, training_recipe: {{{recipe}}}}}"
    matcher = f"{{type: glob, enabled: true, pattern: '{pattern}', config: own}}"
    text = f"configs: {{own: {config}}}\nmatchers: {{own: {matcher}}}"
    return Facts(device=device, module_precision=text, **facts)


CASES = {
    "device_is_available": [
        ("--device cuda", "", Facts(has_triton=False), ("--device cuda",), ("--device cpu",)),
    ],
    "each_rank_has_a_gpu": [
        ("", "", Facts(device="cuda", world_size=8, ranks_per_node=8, devices_per_node=4),
         ("8 ranks", "4"), ("--nproc-per-node 4",)),
    ],
    "world_size_is_for_dry_runs": [
        ("--world-size 8", "", None,
         ("--world-size 8", "--dry-run"), ("--dry-run", "--world-size", "--nproc-per-node", "--nnodes")),
    ],
    "kernels_can_be_compiled": [
        ("", "", Facts(device="cuda", has_triton=False), ("Triton",), ("--no-compile",)),
    ],
    "fp4_can_be_emulated": [
        ("--fp4-format e2m1 --bf16", "", H100, ("--fp4-format e2m1", "Blackwell"), ("remove --fp4-format", "--fp8-format hybrid")),
        ("--fp4-format e2m1 --ffn-hidden-size 100", "", None,
         ("--fp4-format e2m1", "100", "16"), ("--ffn-hidden-size", "remove --fp4-format")),
    ],
    "fp8_recipe_is_supported": [
        ("--fp8-format hybrid --fp8-recipe mxfp8 --bf16 --transformer-impl transformer_engine", "", H100,
         ("--fp8-recipe mxfp8", "Blackwell", "H100"), ("--fp8-recipe tensorwise", "blockwise")),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --bf16", "", Facts(device="cuda", device_name="B200", device_capability=(10, 0)),
         ("--fp8-recipe mxfp8", "--transformer-impl local"), ("--fp8-recipe tensorwise", "transformer_engine")),
        (f"{MODULES} --fp8-format e4m3 --fp8-recipe tensorwise --bf16", "",
         modules("*fc1", device="cuda", device_name="H100", device_capability=(9, 0)),
         ("a.yaml: fp8_quantization_recipe mxfp8", "Blackwell"), ("choose tensorwise in the file", "blockwise")),
    ],
    "fp8_products_can_run": [
        ("--fp8-format hybrid --bf16", "", Facts(device="cuda", device_name="A100", device_capability=(8, 0)),
         ("--fp8-format hybrid", "A100"), ("remove --fp8-format", "Hopper")),
        ("--fp8-format hybrid --bf16 --ffn-hidden-size 1000", "", CUDA,
         ("--fp8-format hybrid", "1000", "16"), ("--ffn-hidden-size",)),
        ("--fp8-format e4m3 --num-experts 4 --bf16", "",
         Facts(device="cuda", device_name="L40S", device_capability=(8, 9)),
         ("--fp8-format e4m3", "--num-experts", "L40S"), ("remove --fp8-format",)),
        ("--fp8-format e4m3 --fp8-recipe blockwise --bf16", "",
         Facts(device="cuda", device_name="B200", device_capability=(10, 0)),
         ("--fp8-recipe blockwise", "Hopper", "B200"), ("--fp8-recipe tensorwise",)),
        ("--fp8-format e4m3 --fp8-recipe blockwise --fp8-block-size 64 --bf16", "", CUDA,
         ("--fp8-block-size 64", "128"), ("--fp8-block-size 128",)),
    ],
    "precision_file_has_its_digest": [
        ("--te-precision-config-digest 0123", "", None,
         ("--te-precision-config-file none", "0123"), ("--te-precision-config-file", "remove --te-precision-config-digest")),
    ],
    "modules_have_the_precision_of_the_file": [
        (f"{MODULES} --fp8-format e4m3", "", modules("*.linear_fc3"),
         ("--te-precision-config-file a.yaml", "matchers.own.pattern '*.linear_fc3'"),
         ("enabled: false", "decoder.layers.0.self_attention.linear_qkv")),
        (f"{MODULES} --fp8-format e4m3 --heterogeneous-layers-config-path b.json", "",
         modules("*.linear_fc1", layers_config=NO_LAYERS),
         ("--te-precision-config-file a.yaml", "matches no linear layer"), ("the model has none: set enabled: false",)),
        (f"{MODULES} --fp8-format e4m3 --num-experts 4", "", modules("*.experts.linear_fc1"),
         ("decoder.layers.0.mlp.experts.linear_fc1", "linear_fc2"), ("same config",)),
        (MODULES, "", modules("*", "override_nonquantized_autocast: true"),
         ("override_nonquantized_autocast", "--fp8-format"), ("use --fp8-format e4m3", "'*'")),
    ],
    "cublas_is_deterministic": [
        ("--deterministic-mode", "", Facts(device="cuda", cublas_workspace=":0:0"),
         ("--deterministic-mode", ":0:0"), ("unset CUBLAS_WORKSPACE_CONFIG", ":4096:8")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_a_cpu_next_to_a_gpu_emulates_mxfp8(plan_of):
    plan_of("--fp8-format hybrid --fp8-recipe mxfp8 --device cpu", facts=H100)
