"""What the schedules of a run follow, and what a checkpoint keeps of them.

A run that continues a checkpoint must mean the same schedules, or say which of the two it wants:

    --use-checkpoint-opt-param-scheduler   the checkpoint's
    --override-opt-param-scheduler         its own
    neither                                a difference is an error
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

_NAMES: Final = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "lr_warmup_init": "--lr-warmup-init",
    "lr_decay_style": "--lr-decay-style",
    "lr_warmup_samples": "samples of warm-up (--lr-warmup-iters, --lr-warmup-samples, --lr-warmup-fraction)",
    "lr_decay_samples": "samples until the decay ends (--lr-decay-iters, --lr-decay-samples, the end of training)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "lr_wsd_decay_samples": "samples of the WSD decay (--lr-wsd-decay-iters, --lr-wsd-decay-samples)",
    "start_weight_decay": "--start-weight-decay",
    "end_weight_decay": "--end-weight-decay",
    "weight_decay_incr_style": "--weight-decay-incr-style",
    "weight_decay_incr_samples": "samples until weight decay ends to increase (the end of training)",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleValues:
    """Counted in samples."""

    lr: float
    min_lr: float
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    lr_warmup_init: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    lr_warmup_samples: float
    lr_decay_samples: int
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"]
    lr_wsd_decay_samples: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    weight_decay_incr_samples: int

    def __str__(self) -> str:
        decay = self.start_weight_decay
        increase = "" if decay == self.end_weight_decay else f" to {self.end_weight_decay:g}"
        return f"{self.lr_decay_style}, lr {self.lr:g} to {self.min_lr:g}, weight decay {decay:g}{increase}"

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return dataclasses.asdict(self)

    def changes(self, stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Flag, stored value and own value of what differs and plays a role. What is not stored does not differ."""
        own = self.to_dict()
        return [
            (said, stored[name], own[name])
            for name, said in _NAMES.items()
            if name in stored and stored[name] != own[name] and self._matters(name)
        ]

    def _matters(self, name: str) -> bool:
        match name:
            case "lr_wsd_decay_style" | "lr_wsd_decay_samples":
                return self.lr_decay_style == "WSD"
            case "lr_warmup_init":
                return self.lr_warmup_samples > 0
            case "lr_decay_samples" | "min_lr" | "decoupled_min_lr":
                return self.lr_decay_style != "constant"
            case "weight_decay_incr_samples":
                return self.weight_decay_incr_style != "constant"
            case "start_weight_decay":  # equals the end: one word about it is enough
                return self.weight_decay_incr_style != "constant"
        return True
