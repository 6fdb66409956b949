"""Parity features of training: embeddings, documents, loss, optimizer."""

from __future__ import annotations

from typing import Final

from megatrain.config.parity_features.feature import Feature, Option, PlanOrDraft


def _separates_documents(plan: PlanOrDraft) -> bool:
    return plan.config.data.reset_attention_mask or plan.config.data.reset_position_ids


TRAINING_OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "embeddings",
        ("model.untie_embeddings_and_output_weights",),
        (
            Feature(
                "untied",
                "--untie-embeddings-and-output-weights",
                lambda p: p.config.model.untie_embeddings_and_output_weights,
            ),
            Feature("tied", "", lambda p: not p.config.model.untie_embeddings_and_output_weights),
        ),
    ),
    Option(
        "documents",
        ("data.reset_attention_mask", "data.reset_position_ids"),
        (
            Feature("whole", "", lambda p: not _separates_documents(p)),
            Feature("documents", "--reset-attention-mask --reset-position-ids", _separates_documents),
        ),
    ),
    Option(
        "attention dropout",
        ("model.attention_dropout",),
        (
            Feature(
                "noattentiondropout", "--attention-dropout 0", lambda p: p.config.model.attention_dropout == 0
            ),
            Feature(
                "attentiondropout", "--attention-dropout 0.1", lambda p: p.config.model.attention_dropout > 0
            ),
        ),
    ),
    Option(
        "loss",
        ("training.calculate_per_token_loss",),
        (
            Feature("means", "", lambda p: not p.config.training.calculate_per_token_loss),
            Feature(
                "tokens",
                "--calculate-per-token-loss",
                lambda p: p.config.training.calculate_per_token_loss,
            ),
        ),
    ),
    Option(
        "z-loss",
        ("model.z_loss_coeff",),
        (
            Feature("nozloss", "", lambda p: p.config.model.z_loss_coeff == 0),
            Feature("zloss", "--z-loss-coeff 0.01", lambda p: p.config.model.z_loss_coeff > 0),
        ),
    ),
    Option(
        "multi-token prediction",
        ("model.mtp_num_layers",),
        (
            Feature("onetoken", "", lambda p: not p.config.model.mtp_num_layers),
            Feature(
                "mtp",
                "--mtp-num-layers",
                lambda p: bool(p.config.model.mtp_num_layers),
                rows={
                    "mtp1": "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
                    "mtp2": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
                },
            ),
        ),
    ),
    Option(
        "loss scale",
        ("precision.loss_scale",),
        (
            Feature("noscale", "", lambda p: p.config.precision.loss_scale is None),
            Feature("scale", "--loss-scale 30000", lambda p: p.config.precision.loss_scale is not None),
        ),
    ),
    Option(
        "optimizer",
        ("optimizer.optimizer",),
        (
            Feature("adam", "--optimizer adam", lambda p: p.config.optimizer.optimizer == "adam"),
            Feature("sgd", "--optimizer sgd", lambda p: p.config.optimizer.optimizer == "sgd"),
            Feature(
                "muon",
                "--optimizer muon",
                lambda p: p.config.optimizer.optimizer == "muon",
                rows={
                    "muon": "--optimizer muon --muon-nesterov",
                    "muonjoint": "--optimizer muon --muon-no-split-qkv",
                },
            ),
        ),
    ),
    Option(
        "optimizer state",
        ("optimizer.optimizer_cpu_offload",),
        (
            Feature("ondevice", "", lambda p: not p.config.optimizer.optimizer_cpu_offload),
            Feature(
                "offload",
                "--optimizer-cpu-offload",
                lambda p: p.config.optimizer.optimizer_cpu_offload,
                rows={"offload": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"},
            ),
        ),
        is_layout=True,
    ),
    Option(
        "learning rate",
        ("optimizer.decoupled_lr",),
        (
            Feature("onerate", "", lambda p: p.config.optimizer.decoupled_lr is None),
            Feature("tworates", "--decoupled-lr 3e-3", lambda p: p.config.optimizer.decoupled_lr is not None),
        ),
    ),
    Option(
        "clipping",
        ("optimizer.clip_grad",),
        (
            Feature("clip", "--clip-grad 0.5", lambda p: p.config.optimizer.clip_grad > 0),
            Feature("noclip", "--clip-grad 0", lambda p: p.config.optimizer.clip_grad == 0),
        ),
    ),
)
