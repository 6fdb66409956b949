"""What is said about each flag of Megatron-LM's that is no setting here (core 0.20.0), by answer.

    --name            a switch: accepted where the answer is `accepted`
    --name=           one value; all are refused
    --name=a|b        one value; a and b are accepted, as what is here anyway, and others are refused
    --name=*          one value; all are accepted
    --name=+...       the same of several values; `a,b` stands for `a b`

Flags of its former versions are in `megatron_former.py`. A line leaves this file when its feature arrives as a
setting. The words must be true of what is here today.
"""

from collections.abc import Mapping
from typing import Final

from megatrain.config.megatron.answers import Alias, here, later, never
from megatrain.config.megatron.removed_flags import FORMER

ALIASES: Final[Mapping[str, Alias]] = {
    "--disable-manual-gc-eval": Alias("training.manual_gc_eval", "false"),
    "--encoder-num-layers": Alias("model.num_layers"),
    "--encoder-seq-length": Alias("data.seq_length"),
    "--persistent-save-interval": Alias("checkpoint.save_interval"),
    "--use-torch-fsdp2": Alias("parallel.data_parallel_sharding_strategy", "optim_grads_params"),
    "--use-rotary-position-embeddings": Alias("model.position_embedding_type", "rope"),
}

_ACCEPTED: Final = (
    # The model
    here("there is one model definition here", "--use-mcore-models"),
    here(
        "--attention-backend picks the kernel of attention; auto is the fastest that is there",
        "--use-flash-attn",
    ),
    here("here the softmax of attention always computes in fp32", "--attention-softmax-in-fp32"),
    here(
        "meant for fp16, it changes no result but by rounding; here attention scores are always kept in fp32",
        "--apply-query-key-layer-scaling",
    ),
    here("here the head and its loss are always computed together, in chunks", "--cross-entropy-loss-fusion"),
    here("here there is one way to compute the loss", "--cross-entropy-fusion-impl=native"),
    here("here the loss is always computed in fp32", "--output-logit-dtype=fp32"),
    here(
        "here the implementation decides which operations are fused; results are the same but for rounding",
        "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"
        " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion"
        " --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding --disable-jit-fuser",
    ),
    here(
        "here initial weights depend on --seed alone, neither on the device nor on the layout",
        "--use-cpu-initialization --init-model-with-meta-device",
    ),
    here(
        "here random numbers have no state that would be tracked", "--te-rng-tracker --inference-rng-tracker"
    ),
    here("here every feature has a flag of its own, without a gate before it", "--enable-experimental"),
    # Experts
    here(
        "here experts' products are always grouped in bf16, and made expert by expert in other dtypes",
        "--moe-grouped-gemm --moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor"
        " --use-grouped-gemm-for-shared-expert",
    ),
    here(
        "here the implementation decides which operations of experts are fused; results are the same but for rounding",
        "--moe-permute-fusion --moe-router-fusion --use-fused-weighted-squared-relu",
    ),
    # Parallelism
    here(
        "here a matrix is put together whole for Muon, on one rank, whatever the layout; what is not whole is refused",
        "--muon-tp-mode=duplicated|distributed",
        instead="leave this out: blocks of a matrix, made orthogonal each by itself, are another optimizer for each layout",
    ),
    here(
        "here what is no matrix of a layer moves by Adam",
        "--muon-scalar-optimizer=adam",
        instead="leave this out: lion is not there yet",
    ),
    here("it changes how a product is formed, not its result", "--muon-use-syrk"),
    here(
        "here shards of the optimizer are cut alike for all optimizers, and matrices put together of them",
        "--no-use-layer-wise-param-layout",
    ),
    here(
        "here --exp-avg-dtype and --exp-avg-sq-dtype work without it, also without the distributed optimizer",
        "--use-precision-aware-optimizer",
    ),
    here(
        "here gradients and weights always travel beside the updates of --optimizer-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
    ),
    here(
        "here the memory that --optimizer-cpu-offload pins is for two buckets on their way, never for all",
        "--no-pin-cpu-grads --no-pin-cpu-params",
    ),
    here(
        "here --optimizer-cpu-offload always computes with torch's own operations",
        "--use-torch-optimizer-for-cpu-offload",
    ),
    here(
        "here gradients are always added up in fp32, or in fp64, and travel so but with --grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32 --megatron-fsdp-main-grads-dtype=auto|fp32"
        " --megatron-fsdp-main-params-dtype=auto|fp32",
        instead="leave this out",
    ),
    here(
        "here gradients travel as they are added up, in fp32, but with --grad-reduce-in-bf16",
        "--megatron-fsdp-grad-comm-dtype=auto|fp32",
        instead="use --grad-reduce-in-bf16 for bf16",
    ),
    here("here losses are scaled before, so that sums are averages", "--ddp-average-in-collective"),
    here(
        "here what is sharded is megatrain's own matter: by layers, with memory for two of them on their way",
        "--megatron-fsdp-version=1|2 --fsdp-double-buffer --fsdp-manual-registration"
        " --fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-max-pool-double-buffer"
        " --megatron-fsdp-enable-fine-grained-param-gather --suggested-communication-unit-size=*"
        " --outer-dp-sharding-strategy=no_shard",
        instead="use --num-distributed-optimizer-instances, between which nothing is sharded",
    ),
    here("here a bucket holds one layer's gradients", "--ddp-bucket-size=* --ddp-num-buckets=*"),
    here(
        "here each pipeline stage reduces and gathers as soon as it can",
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather",
    ),
    here(
        "here --overlap-param-gather, which is on by default, begins as soon as a layer is updated",
        "--overlap-param-gather-with-optimizer-step",
    ),
    here("here pipeline stages do not overlap sending with computing yet", "--no-overlap-p2p-communication"),
    here(
        "here process groups have the backend of --distributed-backend alone", "--disable-gloo-process-groups"
    ),
    here("here --profile always uses torch's profiler", "--use-pytorch-profiler"),
    here("here the launcher says it (LOCAL_RANK)", "--local-rank=*"),
    # Data and tokenizers
    here("here the data loader never builds an attention mask", "--no-create-attention-mask-in-dataloader"),
    here("here one thread of a rank builds its datasets", "--num-dataset-builder-threads=1"),
    here(
        "here the code that comes with a tokenizer is never run, only its files are read",
        "--trust-remote-code",
    ),
    here("here there is no Multi-Storage Client", "--disable-msc"),
    # Checkpoints
    here(
        "checkpoints are written in megatrain's own format (safetensors and a JSON manifest), which every layout loads",
        "--ckpt-format=torch_dist|torch|torch_dcp|fsdp_dtensor --dist-ckpt-format=torch_dist|torch|torch_dcp|zarr --use-dist-ckpt"
        " --auto-detect-ckpt-format --dist-ckpt-optim-fully-reshardable"
        " --distrib-optim-fully-reshardable-mem-efficient",
        instead="leave this out, or use torch_dist",
    ),
    here(
        "here each rank writes what it alone holds, and reads what it needs",
        "--ckpt-fully-parallel-save --ckpt-fully-parallel-load",
    ),
    here(
        "here layouts say what each rank saves: there is no plan to keep", "--ckpt-assume-constant-structure"
    ),
    here(
        "here a checkpoint always has to hold exactly the tensors of the model, as with raise_all",
        "--dist-ckpt-strictness=assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all",
    ),
    here("here checksums are always written, and checked when they are read", "--verify-integrity"),
    here(
        "here a checkpoint holds no state of random numbers: --seed and the iteration decide",
        "--no-load-rng --no-save-rng",
    ),
    here(
        "here a checkpoint holds the fingerprint of its tokenizer, and flags name the tokenizer",
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args"
        " --no-save-tokenizer-assets --disable-save-tokenizer-assets",
    ),
    # The run
    here(
        "here SIGTERM, SIGINT and SIGUSR1 always save and stop",
        "--exit-signal-handler --exit-signal-handler-for-training",
    ),
    here("here threads read ahead, and end with their rank", "--exit-signal-handler-for-dataloader"),
    here("here nothing waits at a barrier to be timed", "--no-barrier-with-level-1-timing"),
    here("here nothing is reported to NVIDIA's one-logger", "--no-one-logger"),
    here("Megatron-LM does not read it either", "--max-tokens-to-oom=* --dist-ckpt-save-pre-mcore-014"),
)

_NOT_YET: Final = (
    # Parallelism
    later(
        "context parallelism whose ranks change with the samples",
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank=",
        instead="use --tensor-model-parallel-size with --sequence-parallel for long sequences",
    ),
    later(
        "overlap of experts' communication with computation",
        "--moe-shared-expert-overlap --overlap-moe-expert-parallel-comm --overlap-dispatch-backward-with-experts-wgrad"
        " --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream",
        instead="leave this out: results are the same, and steps take longer",
    ),
    later(
        "a dispatcher of experts' tokens other than allgather and alltoall",
        "--moe-flex-dispatcher-backend= --moe-flex-dispatcher-num-sms= --moe-enable-deepep --moe-deepep-num-sms="
        " --moe-hybridep-num-sms= --moe-hybridep-num-sms-preprocessing= --moe-hybridep-num-blocks-permute="
        " --moe-hybridep-num-blocks-unpermute= --moe-hybridep-pad-uneven-dispatch-inputs"
        " --moe-permute-fusion-into-hybridep --moe-ncclep-zero-copy --moe-expert-rank-capacity-factor="
        " --moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16",
        instead="use --moe-token-dispatcher-type alltoall",
    ),
    later(
        "memory for experts' activations outside of PyTorch's allocator",
        "--moe-paged-stash --moe-paged-stash-page-size= --moe-paged-stash-buffer-size-factor-cpu="
        " --moe-paged-stash-buffer-size-factor-cuda=",
        instead="use --recompute-granularity selective --recompute-modules moe_act, or moe",
    ),
    later(
        "recomputation by this name",
        "--moe-layer-recompute",
        instead="use --recompute-granularity selective --recompute-modules moe",
    ),
    later(
        "another form of experts",
        "--moe-latent-size= --moe-apply-probs-on-input --moe-use-upcycling --moe-upcycling-granularity=1"
        " --moe-mlp-glu-interleave-size= --moe-shared-expert-glu-interleave-size=",
        instead="leave this out",
    ),
    later(
        "a record or a forced choice of routes",
        "--moe-router-force-biased= --moe-enable-routing-replay"
        " --moe-router-quantile-balancing-ema=0|0.0 --moe-routing-trace-capture-hidden-states"
        " --moe-routing-trace-capture-logits --moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters="
        " --moe-routing-trace-path= --moe-per-layer-logging --save-tokens-per-expert-interval=",
        instead="leave this out",
    ),
    later(
        "experts in fp8, or CUDA graphs of them,",
        "--moe-router-padding-for-quantization --moe-router-padding-for-fp8 --moe-pad-experts-for-cuda-graph-inference",
        instead="leave this out and train in bf16",
    ),
    later(
        "overlap of tensor-parallel communication within one product, and so in forward passes,",
        "--tp-comm-overlap --tp-comm-overlap-cfg= --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend="
        " --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs"
        " --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs",
        instead="leave this out: backward passes run the gather of a layer's input and the reduction of its gradient"
        " beside products anyway, and results are the same",
    ),
    later(
        "computation beside what pipeline stages exchange, such as weight gradients that are formed later,",
        "--delay-wgrad-compute --defer-embedding-wgrad-compute --wgrad-deferral-limit=0 --overlap-p2p-communication-warmup-flush",
        instead="leave this out: results are the same, and steps take longer",
    ),
    later(
        "more than one model chunk a stage, or a cut of the layers other than into equal stages",
        "--num-layers-per-virtual-pipeline-stage= --num-virtual-stages-per-pipeline-rank=1"
        " --microbatch-group-size-per-virtual-pipeline-stage= --decoder-first-pipeline-num-layers="
        " --decoder-last-pipeline-num-layers= --account-for-embedding-in-pipeline-split"
        " --account-for-loss-in-pipeline-split --pipeline-model-parallel-layout= --mtp-standalone",
        instead="leave this out: --pipeline-model-parallel-size cuts the layers into equal stages",
    ),
    later(
        "another sharing of ranks",
        "--tensor-parallel-num-weight-shards=1"
        " --expert-tensor-parallel-num-weight-shards=1 --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub"
        " --gtp-remat-opt-in-modules=+ --gtp-remat-reduce-scatter-with-fp32-accumulation",
        instead="leave this out: --tensor-model-parallel-size and --pipeline-model-parallel-size share out the ranks",
    ),
    later(
        "weights that stay between the forward and the backward pass, or a sharing of them between instances",
        "--torch-fsdp2-no-reshard-after-forward --enable-full-sharding-in-hsdp",
        instead="leave this out, or use --data-parallel-sharding-strategy optim_grads, which keeps weights whole",
    ),
    later(
        "a choice of the arithmetic that reduces gradients",
        "--ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation=+",
        instead="leave this out: gradients are summed in fp32",
    ),
    later("a run without its ranks", "--fake-process-group"),
    # The model
    later(
        "multi-latent attention (MLA)",
        "--multi-latent-attention --kv-lora-rank= --q-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim="
        " --cache-mla-latents --mla-down-proj-fusion --rope-type=",
        instead="leave this out; --group-query-attention keeps keys and values small too",
    ),
    later(
        "multi-token prediction (MTP)",
        "--mtp-num-layers=0 --mtp-loss-scaling-factor= --mtp-detach-heads --mtp-hsm --mtp-use-repeated-layer"
        " --mtp-hybrid-override-pattern=",
    ),
    later(
        "a model of Mamba or linear-attention layers",
        "--hybrid-layer-pattern= --hybrid-override-pattern= --is-hybrid-model --mamba-num-heads= --mamba-head-dim="
        " --mamba-num-groups= --mamba-state-dim= --mamba-training-ssm-states-dtype= --disable-mamba-mem-eff-path"
        " --linear-attention-freq= --linear-conv-kernel-dim= --linear-key-head-dim= --linear-num-key-heads="
        " --linear-num-value-heads= --linear-value-head-dim= --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute="
        " --gdp-num-householder= --experimental-attention-variant=",
        instead="leave this out: every layer is attention and an MLP, --num-layers of them",
    ),
    later(
        "sparse attention",
        "--dsa-indexer-head-dim= --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32 --dsa-indexer-loss-coeff="
        " --dsa-indexer-n-heads= --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation"
        " --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu"
        " --dsa-indexer-skip-topk-offset= --dsa-indexer-topk= --dsa-indexer-topk-freq= --dsa-indexer-use-sparse-loss"
        " --dsa-kernel-backend=none",
    ),
    later(
        "this kind of attention",
        "--qk-l2-norm --qk-clip --qk-clip-alpha= --qk-clip-threshold= --attention-output-gate --log-max-attention-logit",
    ),
    later(
        "this kind of position embedding",
        "--mrope-section=+ --relative-attention-max-distance= --relative-attention-num-buckets=",
        instead="leave this out, and use --position-embedding-type rope",
    ),
    later(
        "this kind of MLP",
        "--openai-gelu --use-te-activation-func --use-grouped-gemm-for-dense-mlp",
        instead="leave this out, and use --swiglu",
    ),
    later(
        "this kind of norm or residual",
        "--apply-residual-connection-post-layernorm --fused-residual-rmsnorm --enable-mhc-connections --mhc-init-gating-factor= --mhc-num-residual-streams="
        " --mhc-recompute-layer-num= --mhc-sinkhorn-iterations=",
    ),
    later(
        "this way of giving weights their initial values",
        "--init-method-xavier-uniform --no-initialization",
        instead="leave this out, and use --init-method-std",
    ),
    later(
        "fill-in-the-middle data",
        "--fim-data --fim-rate= --fim-spm-rate= --fim-eod-token= --fim-fragment-rate="
        " --fim-middle-token= --fim-no-prefix= --fim-pad-token= --fim-prefix-token= --fim-split-sample="
        " --fim-suffix-token=",
    ),
    later("fine-tuning on conversations", "--sft --sft-tokenizer-prompt-format= --chat-template="),
    later(
        "this shortcut to a fast start",
        "--dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --per-dataset-sequences-path=",
        instead="leave this out: sample indices are kept in --data-cache-path",
    ),
    later("a change of the data in mid-run", "--phase-transition-iterations="),
    later(
        "reading from an object store",
        "--object-storage-cache-path= --enable-msc",
        instead="leave this out, and copy the data to a file system",
    ),
    later(
        "a name for each validation set",
        "--validation-set-names=+",
        instead="leave this out: sets are told apart by their paths",
    ),
    later("another micro-batch size for evaluation", "--eval-micro-batch-size="),
    later(
        "this option of tokenizers",
        "--tokenizer-sentencepiece-legacy --vocab-extra-ids=0"
        " --no-tokenizer-sentencepiece-ignore-extra-whitespaces"
        " --disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    # Precision, memory, speed
    later(
        "fp8 or fp4",
        "--fp8-format= --fp8-recipe= --fp8-param-gather --fp8-amax-compute-algo= --fp8-amax-history-len= --fp8-interval="
        " --fp8-margin= --fp8-output-proj --fp8-quantizer-factory= --no-fp8-wgrad --disable-fp8-wgrad"
        " --first-last-layers-bf16 --num-layers-at-end-in-bf16= --num-layers-at-start-in-bf16= --fp4-format="
        " --fp4-recipe= --fp4-param-gather --fp4-quantizer-factory= --te-precision-config-file="
        " --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag",
        instead="use --bf16",
    ),
    later(
        "another number format of main weights and of sums of gradients than fp32",
        "--main-grads-dtype=fp32 --main-params-dtype=fp32",
    ),
    later(
        "spreading what recomputation keeps over tensor ranks",
        "--distribute-saved-activations",
        instead="use --recompute-granularity; with --sequence-parallel what is kept is spread anyway",
    ),
    later(
        "moving activations to the host",
        "--cpu-offloading-num-layers=0 --cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading"
        " --fine-grained-offloading-max-inflight-offloads= --activation-offload-fraction= --offload-modules=+"
        " --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks=0 --min-offloaded-tensor-size=",
        instead="leave this out; --recompute-granularity and --optimizer-cpu-offload, or --use-distributed-optimizer and --tensor-model-parallel-size save memory too",
    ),
    later(
        "CUDA graphs",
        "--cuda-graph-impl=none --cuda-graph-modules=+ --cuda-graph-scope=+ --cuda-graph-warmup-steps= --enable-cuda-graph"
        " --external-cuda-graph --optimizer-cuda-graph",
    ),
    later(
        "a choice of kernels",
        "--flash-attention-version= --use-kitchen-attention --kitchen-attention-backend= --use-transformer-engine-op-fuser"
        " --disable-bf16-reduced-precision-matmul --batch-invariant-backend= --batch-invariant-mode"
        " --mlp-chunks-for-training=1",
    ),
    later("freeing memory between steps", "--empty-unused-memory-level=0"),
    # Optimizer and schedule
    later(
        "this optimizer",
        "--lion-beta1= --lion-beta2=",
        instead="leave this out, and use --optimizer adam or sgd",
    ),
    later("training no weight, or not all", "--freeze-all-layers"),
    # Checkpoints
    later(
        "saving in the background",
        "--async-save --use-persistent-ckpt-worker --async-strategy= --async-ckpt-cpu-priority= --async-ckpt-io-priority="
        " --async-ckpt-use-cpu-shm",
        instead="leave this out: the run waits while it saves",
    ),
    later(
        "this way of starting from the weights of another run",
        "--load-main-params-from-ckpt",
        instead="use --load with --finetune",
    ),
    later(
        "choosing an iteration to load, or to call it",
        "--ckpt-step= --override-ckpt-iteration=",
        instead="leave this out: the newest checkpoint that is whole is loaded",
    ),
    later(
        "taking the model's shape from a checkpoint",
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args",
        instead="give --config FOLDER/config.yaml: every run writes that file into its --save folder",
    ),
    later("removing older checkpoints", "--save-retain-interval="),
    later(
        "checkpoints beside those of --save",
        "--non-persistent-ckpt-type= --non-persistent-global-ckpt-dir= --non-persistent-local-ckpt-algo="
        " --non-persistent-local-ckpt-dir= --non-persistent-save-interval= --replication --replication-factor="
        " --replication-jump=",
        instead="use --save and --save-interval",
    ),
    later(
        "writing gradients, activations or weights apart",
        "--save-activations-interval= --save-dgrads-interval= --save-params-interval= --save-wgrads-interval=",
    ),
    # The run and what is said about it
    later(
        "TensorBoard",
        "--disable-log-loss-scale-to-tensorboard",
        instead="leave this out: metrics.jsonl in --save (or --metrics-file) has the values",
    ),
    later(
        "logging this",
        "--log-memory-interval= --log-device-memory-used --log-energy --log-progress --logging-level=",
        instead="leave this out; metrics.jsonl in --save has loss, norm, rates and times",
    ),
    later(
        "this part of profiling",
        "--memory-snapshot-path= --nvtx-ranges --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes"
        " --record-memory-history --record-shapes",
    ),
    later("OpenTelemetry", "--otel-enabled --otel-service-name= --otel-span-groups="),
    later(
        "watching for faulty or slow hardware",
        "--check-weight-hash-across-dp-replicas-interval="
        " --gpu-sniff-test-interval= --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port="
        " --straggler-minmax-count= --rerun-mode=disabled --result-rejected-tracker-filename= --train-sync-interval=",
    ),
    later("leaving out iterations", "--iterations-to-skip=+"),
    later(
        "planting faults",
        "--error-injection-rate=0 --error-injection-type= --fault-injector-delay-start-iteration="
        " --fault-injector-fault-delay= --fault-injector-fault-probabilities= --fault-injector-fault-types="
        " --fault-injector-mtti-seconds= --fault-injector-num-ranks= --fault-injector-offset-seconds="
        " --fault-injector-ranks= --fault-injector-seed=",
    ),
    later(
        "restarting inside a process",
        "--inprocess-active-world-size= --inprocess-barrier-timeout= --inprocess-completion-timeout="
        " --inprocess-empty-cuda-cache --inprocess-granularity= --inprocess-hard-timeout="
        " --inprocess-heartbeat-interval= --inprocess-heartbeat-timeout= --inprocess-last-call-wait="
        " --inprocess-max-iterations= --inprocess-monitor-process-interval= --inprocess-monitor-thread-interval="
        " --inprocess-progress-watchdog-interval= --inprocess-restart --inprocess-soft-timeout="
        " --inprocess-termination-grace-time= --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=",
        instead="leave this out: torchrun --max-restarts starts a run again, and it goes on from its last checkpoint",
    ),
    later(
        "distilling logits",
        "--logits-load-decode-threads= --logits-load-dir= --logits-load-ignore-errors --logits-load-kd-loss-alpha="
        " --logits-load-msc-prefetch-depth= --logits-load-prefetch-factor= --logits-save-dir= --logits-save-dtype="
        " --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k=",
    ),
)

_NEVER: Final = (
    # Names that Megatron-LM has given up itself
    never(
        "the gather and the reduction of a column-parallel layer's backward pass always run beside its products",
        "--no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad",
        instead="leave this out: results are the same bits",
    ),
    never(
        "the name of long ago", "--batch-size=", instead="use --micro-batch-size, samples of a rank at once"
    ),
    never(
        "the name of long ago",
        "--checkpoint-activations",
        instead="use --recompute-activations, or --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1, which is what it did",
    ),
    never("the name of long ago", "--model-parallel-size=", instead="use --tensor-model-parallel-size"),
    never("the name of long ago", "--warmup=", instead="use --lr-warmup-fraction"),
    never(
        "the name of long ago",
        "--no-weight-decay-cond-type=",
        instead="leave this out: norms and biases do not decay",
    ),
    never(
        "it says only what positions are not",
        "--no-position-embedding",
        instead="use --position-embedding-type none, or rope without this flag",
    ),
    never("sections and names of YAML files are megatrain's own", "--yaml-cfg=", instead="use --config FILE"),
    never("what it promises, Megatron-LM does not read", "--onnx-safe="),
    # What is done otherwise here
    never("the loss is always computed in fp32", "--fp16-lm-cross-entropy"),
    never(
        "replicas always start from the same weights",
        "--data-parallel-random-init",
        instead="leave this out, and use --seed for other weights",
    ),
    never("each rank always writes what it alone holds", "--no-ckpt-fully-parallel-save"),
    never(
        "this belongs to Megatron-LM's own checkpoint format",
        "--ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-load-per-rank-objects"
        " --ckpt-fully-parallel-load-process-group= --ckpt-fully-parallel-save-process-group="
        " --ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path= --ckpt-drop-redundant-extra-state"
        " --dist-ckpt-workers= --no-ckpt-load-validate-sharding-integrity"
        " --disable-ckpt-load-validate-sharding-integrity --ckpt-convert-format= --ckpt-convert-save="
        " --ckpt-convert-update-legacy-dist-opt-format",
    ),
    never(
        "the vocabulary is always padded",
        "--no-pad-vocab-size --disable-pad-vocab-size",
        instead="use --make-vocab-size-divisible-by 1, or --padded-vocab-size",
    ),
    never(
        "tokenizers are read by other means",
        "--tokenizer-metadata= --tokenizer-hf-no-use-fast --use-gigatoken",
        instead="use --tokenizer-type and --tokenizer-model",
    ),
    never(
        "the plan that is printed at start says it", "--dump-param-to-param-group-map= --config-logger-dir="
    ),
    never(
        "nothing is reported to NVIDIA's services",
        "--one-logger-async --one-logger-project= --one-logger-run-name= --app-tag-run-name= --app-tag-run-version="
        " --adlr-autoresume --adlr-autoresume-interval= --run-workload-inspector-server",
    ),
    never(
        "NCCL is tuned by its own environment variables",
        "--nccl-communicator-config-path= --use-nccl-ub --use-sharp --sharp-enabled-group= --high-priority-stream-groups=+"
        " --disable-symmetric-registration --create-all-gather-group --symmetric-ar-type="
        " --ddp-pad-buckets-for-high-nccl-busbw --pipeline-model-parallel-comm-backend= --use-ring-exchange-p2p",
        instead="leave this out; set NCCL_... for all ranks if NCCL needs tuning",
    ),
    never(
        "PyTorch's flight recorder has environment variables of its own",
        "--flight-recorder-dump-path= --flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size="
        " --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout"
        " --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec"
        " --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active",
        instead="leave this out; TORCH_NCCL_TRACE_BUFFER_SIZE and its like turn it on",
    ),
    never("the model is always built when the ranks have met", "--lazy-mpu-init"),
    never("it is for Megatron-LM's own tests", "--test-mode"),
    # What is not part of megatrain
    never(
        "a checkpoint always has to hold exactly the tensors of the model",
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
    ),
    never(
        "BERT, T5 and retrieval models are not part of megatrain",
        "--decoder-num-layers= --decoder-seq-length= --bert-no-binary-head --mask-prob= --short-seq-prob= --sample-rate="
        " --bert-load= --biencoder-projection-dim= --biencoder-shared-query-context-model --block-data-path="
        " --embedding-path= --evidence-data-path= --ict-head-size= --ict-load= --indexer-batch-size="
        " --indexer-log-interval= --query-in-block-prob= --retriever-report-topk-accuracies=+ --retriever-score-scaling"
        " --titles-data-path= --use-one-sent-docs --bert-embedder-type= --output-bert-embeddings",
        instead="leave this out and train a GPT",
    ),
    never(
        "models of images are not part of megatrain",
        "--img-h= --img-w= --patch-dim= --num-classes= --num-channels= --classes-fraction= --data-per-class-fraction="
        " --dino-bottleneck-size= --dino-freeze-last-layer= --dino-head-hidden-size= --dino-local-crops-number="
        " --dino-local-img-size= --dino-norm-last-layer --dino-teacher-temp= --dino-warmup-teacher-temp="
        " --dino-warmup-teacher-temp-epochs= --head-lr-mult= --iter-per-epoch= --mask-factor= --mask-type="
        " --swin-backbone-type= --vision-backbone-type= --vision-pretraining --vision-pretraining-type=",
        instead="leave this out and train a GPT",
    ),
    never(
        "serving a model is not part of pretraining",
        "--inference-batch-times-seqlen-threshold= --inference-coordinator-port= --inference-cuda-graph-all-prefills"
        " --inference-cuda-graph-max-tokens= --inference-cuda-graph-scope= --inference-disable-ep-consensus"
        " --no-inference-disable-ep-consensus --inference-disable-triton-nvls-kernels --inference-dynamic-batching"
        " --inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-block-size="
        " --inference-dynamic-batching-buffer-size-gb= --inference-dynamic-batching-cuda-graph-mixed-prefill-count="
        " --inference-dynamic-batching-cuda-graph-sizing-distribution= --inference-dynamic-batching-prefix-caching"
        " --no-inference-dynamic-batching-prefix-caching --inference-dynamic-batching-logprobs-mode="
        " --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-max-requests="
        " --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs="
        " --inference-dynamic-batching-paused-buffer-size-gb="
        " --inference-dynamic-batching-prefix-caching-coordinator-policy="
        " --inference-dynamic-batching-prefix-caching-eviction-policy="
        " --inference-dynamic-batching-prefix-caching-mamba-gb="
        " --inference-dynamic-batching-prefix-caching-routing-alpha= --inference-dynamic-batching-sampling-backend="
        " --inference-dynamic-batching-track-generated-token-events"
        " --inference-dynamic-batching-track-paused-request-events --inference-dynamic-batching-unified-memory-level="
        " --inference-fuse-tp-communication --inference-grouped-gemm-backend= --inference-logging-step-interval="
        " --inference-max-requests= --inference-max-seq-length= --inference-moe-disable-fused-quant-kernels"
        " --inference-moe-token-dispatcher-type= --inference-shards= --inference-text-gen-server-logging"
        " --no-inference-text-gen-server-logging --inference-use-synchronous-zmq-collectives"
        " --no-inference-use-synchronous-zmq-collectives --inference-wandb-logging --no-inference-wandb-logging"
        " --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype= --num-speculative-tokens="
        " --use-same-sampling-seed-across-dp-ranks --use-legacy-static-engine --decode-only-cuda-graphs"
        " --enable-chunked-prefill --flash-decode --mlp-chunks-for-prefill= --nccl-all-reduce-for-prefill",
    ),
    never(
        "reinforcement learning is not part of pretraining",
        "--grpo-clamp-eps-lower= --grpo-clamp-eps-upper= --grpo-entropy-term-weight="
        " --grpo-filter-groups-with-same-reward --grpo-group-size= --grpo-iterations= --grpo-kl-beta="
        " --grpo-prompts-per-step= --langrl-env-config= --perform-rl-step --refit-method="
        " --rl-consumption-granularity= --rl-default-temperature= --rl-default-top-k= --rl-default-top-p="
        " --rl-durable-rollout-bank --rl-generation-lag= --rl-importance-sampling-truncation-coef="
        " --rl-inference-expert-model-parallel-size= --rl-inference-expert-tensor-model-parallel-size="
        " --rl-inference-logprobs-is-correction= --no-rl-inference-logprobs-is-correction="
        " --rl-inference-model-unified-memory-level= --rl-inference-parsers=+"
        " --rl-inference-pipeline-model-parallel-size= --rl-inference-tensor-model-parallel-size="
        " --rl-kv-cache-management-mode= --rl-max-inflight-requests= --rl-offload-inference-model-weights-when-idle"
        " --no-rl-offload-inference-model-weights-when-idle --rl-offload-optimizer-during-inference"
        " --rl-partial-rollouts --no-rl-partial-rollouts --rl-persist-cuda-graphs= --no-rl-persist-cuda-graphs="
        " --rl-profile --rl-profile-dir= --rl-prompts-per-eval= --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes="
        " --rl-sequence-packing-algo= --rl-sequence-packing-max-sequences-per-bin= --rl-skip-bos-token="
        " --no-rl-skip-bos-token= --rl-submission-granularity= --rl-training-cuda-graphs="
        " --no-rl-training-cuda-graphs= --rl-use-sequence-packing= --no-rl-use-sequence-packing="
        " --no-rl-verify-model-weights-swap --rl-verify-model-weights-swap",
    ),
)

CHOICES_TO_COME: Final[Mapping[str, tuple[str, ...]]] = {
    "--dataloader-type": ("external",),
    "--moe-router-load-balancing-type": ("quantile_balancing",),
    "--exp-avg-dtype": ("fp16", "fp8"),
    "--exp-avg-sq-dtype": ("fp16", "fp8"),
    "--muon-coefficient-type": ("cans", "aol", "deepseekv4", "custom"),
    "--muon-fp32-matmul-prec": ("low",),
    "--optimizer": ("adaptive_muon", "lion", "soap"),
    "--position-embedding-type": ("mrope", "relative", "yarn"),
    "--transformer-impl": ("inference_optimized",),
}
"""Choices of Megatron-LM's that settings do not have yet. Those that they have win."""

CHOICES_ELSEWHERE: Final[Mapping[str, Mapping[str, str]]] = {
    "--optimizer": {
        "dist_muon": "use --optimizer muon; --use-distributed-optimizer (the default) spreads its state over the ranks"
    },
}
"""Choices of Megatron-LM's that are had by other means here."""

ANSWERS: Final = (*_ACCEPTED, *_NOT_YET, *_NEVER, *FORMER)
