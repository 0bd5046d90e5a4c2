"""``lineartime_adam``, ``lineartime_sgd``, ...: weight decay on the weights of linear layers only.

An architecture's ``--lineartime-decay-linear-only`` replaces fairseq's ``adam``, ``sgd``, ... by them; their options
are the same. The model marks its parameters with ``optim_overrides``, as for fairseq's composite optimizer, which
fairseq copies to the float32 parameters that half precision trains.
"""

from collections.abc import Iterable
from typing import Any

from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY, FairseqOptimizer, register_optimizer
from torch import nn

from ..loading.known_options import model_options
from . import radam  # noqa: F401  registers radam first, so that it gets a variant here

#: The prefix of the optimizers' names.
PREFIX = "lineartime_"
FLAG = "--lineartime-decay-linear-only"
#: The keys of a mark in ``optim_overrides``, as fairseq's composite optimizer reads it.
_PLACE, _SCALE = "optimizer", "weight_decay_scale"
#: The key in a model's marks that says whether one of our optimizers has read them.
_READ = "read"


def mark(parameters: Iterable[nn.Parameter], decays: bool) -> dict[str, Any]:
    """Mark ``parameters`` as decaying or not, for the optimizers of this file; returns their mark."""
    overrides = {_PLACE: {_SCALE: float(decays)}}
    for parameter in parameters:
        parameter.optim_overrides = overrides
    return overrides


def is_read(overrides: dict[str, Any]) -> bool:
    """Whether an optimizer has read the mark ``overrides``."""
    return overrides.get(_READ, False)


class LinearDecay:
    """Mixin before a fairseq optimizer: two groups of parameters, the second without weight decay.

    Raises:
        ValueError: a parameter has no mark, such as the flat one into which fairseq can join all parameters.
    """

    def __init__(self, cfg: Any, params: Iterable[nn.Parameter]) -> None:
        decaying: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in params:
            overrides = getattr(parameter, "optim_overrides", {})
            if _SCALE not in overrides.get(_PLACE, {}):
                raise ValueError(
                    f"{FLAG}: fairseq hands the optimizer a parameter of shape {tuple(parameter.shape)} that the model "
                    f"did not mark; allowed: an architecture of ours with {FLAG}, with --fp16 also "
                    "--fp16-no-flatten-grads, no --ddp-backend fully_sharded, and a criterion without parameters"
                )
            overrides[_READ] = True
            (decaying if overrides[_PLACE][_SCALE] else others).append(parameter)
        super().__init__(cfg, [{"params": decaying}, {"params": others, "weight_decay": 0.0}])

    @property
    def supports_flat_params(self) -> bool:
        """fairseq's hook: False, since in one flat parameter the weights of linear layers cannot be distinguished."""
        return False

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """fairseq's hook; a weight decay in ``--optimizer-overrides`` applies to the weights of linear layers."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.param_groups[1]["weight_decay"] = 0.0


def _register(name: str, optimizer: type[FairseqOptimizer]) -> None:
    new_class = type(f"LinearDecay{optimizer.__name__}", (LinearDecay, optimizer), {"__module__": __name__})
    new_class.__doc__ = f"``--optimizer {name}`` with weight decay on the weights of linear layers alone."
    register_optimizer(PREFIX + name, dataclass=OPTIMIZER_DATACLASS_REGISTRY.get(name))(new_class)


#: The optimizers that have such a variant: all with weight decay.
NAMES = tuple(name for name, optimizer in OPTIMIZER_REGISTRY.items() if "weight_decay" in model_options(optimizer))
for _name in NAMES:
    _register(_name, OPTIMIZER_REGISTRY[_name])
