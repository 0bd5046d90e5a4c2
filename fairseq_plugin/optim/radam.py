"""``--optimizer radam``: torch's rectified Adam, which the Flowformer paper uses for time series.

Liu et al., *On the Variance of the Adaptive Learning Rate and Beyond*, ICLR 2020.
"""

from ast import literal_eval
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035  fairseq reads List[...]

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from ..loading.known_options import option_field

#: Values of ``--radam-foreach``, and torch's argument for each.
_FOREACH = {"auto": None, "on": True, "off": False}


@dataclass
class FairseqRAdamConfig(FairseqDataclass):
    """Options of ``torch.optim.RAdam`` for training: all except ``maximize`` and two for CUDA graphs."""

    radam_betas: str = option_field("(0.9, 0.999)", "decays of the running means of gradients and of their squares")
    radam_eps: float = option_field(1e-8, "what is added to the denominator")
    weight_decay: float = option_field(0.0, "weight decay")
    radam_decoupled_weight_decay: bool = option_field(
        False, "weight decay as in AdamW, apart from the gradient; otherwise added to it"
    )
    radam_foreach: ChoiceEnum(tuple(_FOREACH)) = option_field(
        "auto", "update many parameters in one operation: speed and memory; auto: torch decides"
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_optimizer("radam", dataclass=FairseqRAdamConfig)
class FairseqRAdam(FairseqOptimizer):
    """``torch.optim.RAdam`` as an optimizer of fairseq; its state is saved in checkpoints and resumed from them.

    Raises:
        ValueError: torch's optimizer does not allow a value; the message names the command-line option.
    """

    def __init__(self, cfg: FairseqRAdamConfig, params) -> None:
        super().__init__(cfg)
        _check_at_least("--radam-eps", cfg.radam_eps)
        _check_at_least("--weight-decay", cfg.weight_decay)
        self._optimizer = torch.optim.RAdam(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """fairseq's hook: the arguments of torch's optimizer; they override those in a checkpoint."""
        cfg = self.cfg
        return {
            "lr": cfg.lr[0] if isinstance(cfg.lr, Collection) else cfg.lr,
            "betas": _read_betas(cfg.radam_betas),
            "eps": cfg.radam_eps,
            "weight_decay": cfg.weight_decay,
            "decoupled_weight_decay": cfg.radam_decoupled_weight_decay,
            "foreach": _FOREACH[getattr(cfg.radam_foreach, "value", cfg.radam_foreach)],
        }

    @property
    def supports_flat_params(self) -> bool:
        """fairseq's hook: True, since the update is elementwise."""
        return True


def _read_betas(text: str) -> tuple[float, float]:
    try:
        first, second = literal_eval(text)
        if 0.0 <= first < 1.0 and 0.0 <= second < 1.0:
            return float(first), float(second)
    except (ValueError, SyntaxError, TypeError):
        pass
    raise ValueError(f"--radam-betas is {text!r}; allowed: two numbers from 0 to below 1, such as '(0.9, 0.999)'")


def _check_at_least(option: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"{option} is {value}; allowed: at least 0")
