"""Settings of distillation: a teacher, whose outputs the model is trained to match (docs/post-training.md)."""

from dataclasses import dataclass
from typing import Literal

from megatrain.config.schema.needs import conflict, off, on
from megatrain.config.schema.resume_class import LOSS, SAFE, STEPS
from megatrain.config.schema.setting import Section, setting

_TEACHER, _CACHE = "distillation.export_kd_teacher_load", "distillation.logits_load_dir"
_UNBALANCED = off("distillation.kd_balance_losses", words="without --no-kd-balance-losses")
_UNSUPPORTED = (
    conflict("training.loss", why=": the loss of a teacher reads logits"),
    conflict("training.cuda_graph_impl", "local", "full_iteration", why=": a teacher's pass is not captured"),
    conflict("model.model_family", "bert", "t5", "vlm", why=": teachers are GPTs"),
    conflict(
        "parallel.pipeline_schedule",
        "zb-v",
        "dualpipe-v",
        why=", whose head is on the first rank: a teacher's is on the last",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section, on_resume=SAFE):
    """Distillation: the teacher and its losses."""

    export_kd_teacher_load: str | None = setting(None, conflicts=_UNSUPPORTED, on_resume=STEPS, may_move=True)
    """Teacher: a folder of checkpoints of megatrain or Megatron-LM, one of its iter_NNNNNNN folders, or hf:FOLDER with a folder of transformers."""
    export_kd_teacher_model_config: str | None = setting(None, needs=on(_TEACHER), on_resume=STEPS)
    """YAML file with settings of the teacher's model, which are compared with those that its checkpoint stores. none: FOLDER/model_config.yaml, if it exists."""
    export_kd_cfg: str | None = setting(None, needs=on(_TEACHER))
    """YAML file with the settings below as Megatron-LM names them: skip_lm_loss, kd_loss_scale, intermediate_layer_pairs, logit_kl_temperature. Flags win over it."""
    kd_teacher_fp8: bool = setting(False, needs=(on(_TEACHER), on("precision.fp8_format")))
    """Compute the linear layers of the teacher in FP8 with the recipe of the run; delayed: with the scales of tensorwise. Not in Megatron-LM."""
    kd_loss: Literal["forward_kl", "reverse_kl"] = setting(
        "forward_kl",
        choices={"forward_kl": "KL(teacher || student)", "reverse_kl": "KL(student || teacher)"},
        needs=on(_TEACHER),
        on_resume=LOSS,
    )
    """Divergence of the logits from the teacher's. Not in Megatron-LM."""
    kd_temperature: float = setting(1.0, above=0, needs=on(_TEACHER), on_resume=STEPS)
    """Divisor of the logits of teacher and model; the divergence is multiplied by its square. Not in Megatron-LM."""
    kd_skip_lm_loss: bool = setting(True, needs=on(_TEACHER), on_resume=LOSS)
    """Train on the teacher's losses alone. Off: on their sum with the language-model loss. Not in Megatron-LM, where its file says it."""
    kd_balance_losses: bool = setting(True, needs=on(_TEACHER), on_resume=STEPS)
    """Scale the losses of a micro-batch to equal shares, as Megatron-LM does: layers to logits, and both to the language-model loss. It computes logits twice. Off: fixed weights. Not in Megatron-LM."""
    kd_loss_scale: float = setting(
        1.0,
        above=0,
        needs=(
            on(_TEACHER),
            off("distillation.kd_skip_lm_loss", words="without --no-kd-skip-lm-loss"),
            _UNBALANCED,
        ),
        on_resume=STEPS,
    )
    """Weight of the teacher's losses, added to the language-model loss."""
    kd_layer_loss_scale: float = setting(1.0, above=0, needs=(on(_TEACHER), _UNBALANCED), on_resume=STEPS)
    """Weight of the mean loss of --kd-layer-pairs, added to the loss of the logits. Not in Megatron-LM."""
    logits_load_dir: str | None = setting(
        None,
        conflicts=(
            *_UNSUPPORTED[:3],
            conflict(_TEACHER, why=": the folder has the outputs of a teacher"),
            conflict("data.dataloader_type", "cyclic", why=", whose samples have no fixed number"),
        ),
        on_resume=LOSS,
        may_move=True,
    )
    """Folder of a teacher's outputs that `megatrain cache-logits` has written for the samples of this run, in place of a teacher."""
    logits_load_kd_loss_alpha: float = setting(1.0, at_least=0, at_most=1, needs=on(_CACHE), on_resume=STEPS)
    """Weight of the divergence from the outputs of --logits-load-dir; the language-model loss has the rest."""
    kd_layer_pairs: tuple[str, ...] = setting((), needs=on(_TEACHER), on_resume=LOSS)
    """Outputs to match, as STUDENT:TEACHER:LOSS with numbers of layers (from 0) or `final` for the final norm, and cosine or mse: 3:7:cosine final:final. Other widths are projected. Not in Megatron-LM."""
