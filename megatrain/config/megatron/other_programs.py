"""Flags of other programs of Megatron-LM's repository, and of launchers: they do not belong to pretraining.

`flags.py` defines the notation; `=+` stands for any number of values.
"""

from typing import Final

from megatrain.config.megatron.answer import accepted, refused


def _any_values(names: str) -> str:
    return " ".join(f"--{name}=+" for name in names.split())


OTHER_PROGRAMS: Final = (
    refused(
        "torchrun reads it, not pretrain.py",
        _any_values(
            "nproc-per-node nnodes node-rank master-addr master-port standalone rdzv-endpoint rdzv-id rdzv-backend"
        ),
        instead="write it before pretrain.py: torchrun FLAG VALUE pretrain.py ...",
    ),
    refused(
        "preprocess_data.py reads it, not pretrain.py",
        _any_values("append-eod output-prefix json-keys split-sentences keep-newlines") + " --chat-template=",
        instead="give it to preprocess_data.py, and the datasets that it makes to --data-path",
    ),
    accepted(
        "datasets keep the format that preprocess_data.py --sft had, as the .json next to each says",
        "--sft-tokenizer-prompt-format=*",
        grade="result",
    ),
    accepted(
        "--export-kd-teacher-load recognises checkpoints by their files",
        "--export-kd-teacher-ckpt-format=*",
    ),
    accepted(
        "there is one model definition, which all checkpoints load into",
        "--export-te-mcore-model --export-default-te-spec --export-model-type=GPTModel|HybridModel|MambaModel",
    ),
    refused(
        "quantization and pruning after training are not part of megatrain",
        _any_values(
            "export-force-local-attention export-moe-apply-probs-on-input export-qk-l2-norm"
            " export-quant-cfg export-real-quant-cfg export-kv-cache-quant export-offline-model export-dir"
            " export-num-medusa-heads modelopt-enabled finetune-hf-dataset finetune-data-split"
        ),
    ),
    refused(
        "no flag stands for a whole model",
        _any_values("enable-gpt-oss"),
        instead=(
            "give the settings of the model: --position-embedding-type yarn, --softmax-type learnable, --quick-geglu,"
            " --glu-linear-offset, --window-size and --window-attn-skip-freq"
        ),
    ),
    refused(
        "one training run of models of several sizes (elastification) is not part of megatrain",
        _any_values(
            "flextron enable-router binary-mask soft-mask hard-sample-th router-beta router-gbs router-inter-dim"
            " router-std original-model-sample-prob tau-init tau-decay loss-alpha lr-mult-router budget-list"
            " budget-probs budget-type emb-int-list mlp-int-list mamba-int-list moe-expert-int-list linear-scaler-start"
            " linear-scaler-end slice"
        ),
    ),
    refused(
        "other models of images, video and sound, and providers of other packages, are not part of megatrain",
        _any_values(
            "language-model-type language-model-checkpoint audio-encoder-model model-provider"
            " dataset-provider image-tag-type"
            " use-tile-tags num-frames recompute-vision"
            " allow-missing-vision-projection-checkpoint tokenizer-prompt-format special-tokens use-te"
            " dataloader-save total-seq-length packing-buffer-size packing-seq-length"
            " use-area-weighted-aspect-ratio use-loss-scaling dynamic-resolution"
            " encoder-ddp-overlap encoder-dp encoder-tp llm-cp llm-dp llm-ep llm-expt-tp llm-offset llm-pp llm-tp"
            " hf-assign-unused-tokens force-system-message"
        ),
    ),
    refused(
        "text generation is another command",
        _any_values(
            "temperature top-k top-p top-n-logprobs num-tokens-to-generate return-log-probs prompts prompt-file"
            " prompt-file-num-truncate out-seq-length output-every-n-results output-path termination-id stop-words"
            " incoming-requests-per-sec incoming-requests-per-step inference-repeat-n inference-ckpt-non-strict"
            " batch-boundaries drain-between-batches use-coordinator use-flashinfer-fused-rope no-record-throughput"
            " suspend-resume-interval suspend-timeout async-mode osl draft-length"
        ),
        instead="remove the flag; megatrain generate --help lists the flags of text generation",
    ),
)
