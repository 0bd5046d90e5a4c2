"""``lineartime_adam``, ``lineartime_sgd``, ...: weight decay on the weights of linear layers alone.

An architecture's ``--lineartime-decay-linear-only`` puts them in the place of fairseq's ``adam``, ``sgd``, ...; their
options are the same. The model marks its parameters as fairseq's composite optimizer has it, with ``optim_overrides``,
which fairseq hands on to the float32 copies that half precision trains.
"""

from collections.abc import Iterable
from typing import Any

from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY, FairseqOptimizer, register_optimizer
from torch import nn

from ..loading.known_options import model_options
from . import radam  # noqa: F401  is registered first, and so has a form of its own here

#: How the names begin.
PREFIX = "lineartime_"
FLAG = "--lineartime-decay-linear-only"
#: Where a mark stands in ``optim_overrides``, as fairseq's composite optimizer reads it.
_PLACE, _SCALE = "optimizer", "weight_decay_scale"
#: Of the marks of a model: whether an optimizer of ours has read them.
_READ = "read"


def mark(parameters: Iterable[nn.Parameter], decays: bool) -> dict[str, Any]:
    """Mark ``parameters`` as ones that ``decays`` or not, for the optimizers of this file; returns their mark."""
    overrides = {_PLACE: {_SCALE: float(decays)}}
    for parameter in parameters:
        parameter.optim_overrides = overrides
    return overrides


def is_read(overrides: dict[str, Any]) -> bool:
    """Whether an optimizer has read the mark ``overrides``."""
    return overrides.get(_READ, False)


class LinearDecay:
    """In front of an optimizer of fairseq: two groups of parameters, of which the second has no weight decay.

    Raises:
        ValueError: a parameter without a mark, such as the one that fairseq puts all of a model's into.
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
        """fairseq's hook: False, in one flat parameter the weights of linear layers are not told apart."""
        return False

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """fairseq's hook; ``--optimizer-overrides`` with a weight decay are for the weights of linear layers."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.param_groups[1]["weight_decay"] = 0.0


def _register(name: str, optimizer: type[FairseqOptimizer]) -> None:
    made = type(f"LinearDecay{optimizer.__name__}", (LinearDecay, optimizer), {"__module__": __name__})
    made.__doc__ = f"``--optimizer {name}`` with weight decay on the weights of linear layers alone."
    register_optimizer(PREFIX + name, dataclass=OPTIMIZER_DATACLASS_REGISTRY.get(name))(made)


#: The optimizers that have one of these: all with weight decay.
NAMES = tuple(name for name, found in OPTIMIZER_REGISTRY.items() if "weight_decay" in model_options(found))
for _name in NAMES:
    _register(_name, OPTIMIZER_REGISTRY[_name])
