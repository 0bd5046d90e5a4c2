"""``--lineartime-decay-linear-only``: weight decay on the weights of linear layers only, for every model."""

from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.utils import safe_getattr
from torch import nn

from common.attention import InnerAttention

from ..loading.known_options import option_field
from ..optim import linear_decay


@dataclass
class DecayOptions(FairseqDataclass):
    """Options of weight decay: which parameters it applies to."""

    lineartime_decay_linear_only: bool = option_field(
        False,
        "weight decay for the weights of linear layers alone, as in the DAFT paper: not for biases, norms, "
        "embeddings, positions and what else an attention holds; --fp16 needs --fp16-no-flatten-grads with it",
    )


def choose_optimizer(args) -> None:
    """Replace ``--optimizer`` by its variant that decays only weights of linear layers, if the option is given.

    Raises:
        ValueError: the optimizer has no such variant, since it has no weight decay.
    """
    if not safe_getattr(args, "lineartime_decay_linear_only", False) or not safe_getattr(args, "optimizer"):
        return
    name = args.optimizer.removeprefix(linear_decay.PREFIX)
    if name not in linear_decay.NAMES:
        allowed = ", ".join(linear_decay.NAMES)
        raise ValueError(f"--optimizer is {name}; allowed with {linear_decay.FLAG}: {allowed}")
    args.optimizer = linear_decay.PREFIX + name


class MarksDecay:
    """Mixin before a fairseq model that marks its parameters for the optimizer, if the options ask for it."""

    _decay_marks: dict[str, Any] | None = None
    _unread = 0  # how often fairseq set the update number before an optimizer had read the marks

    def mark_decay(self, args) -> None:
        """Mark all parameters as the options ``args`` say; call again after parameters were added.

        A matrix shared with the token embedding (``--share-decoder-input-output-embed``) counts as an embedding.
        """
        if not safe_getattr(args, "lineartime_decay_linear_only", False):
            return
        linear_ids = {id(x.weight) for x in self.modules() if isinstance(x, nn.Linear)}
        for x in self.modules():
            if isinstance(x, InnerAttention):
                linear_ids |= {id(getattr(x, name)) for name in x.linear_weights()}
        linear_ids -= {id(x.weight) for x in self.modules() if isinstance(x, nn.Embedding)}
        parameters = list(self.parameters())
        linear_decay.mark([x for x in parameters if id(x) in linear_ids], decays=True)
        self._decay_marks = linear_decay.mark([x for x in parameters if id(x) not in linear_ids], decays=False)

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook before each update; also called before there is an optimizer, when a checkpoint is loaded.

        Raises:
            ValueError: the optimizer decays everything, which can happen with hydra, where no command line chooses it.
        """
        self._unread += self._decay_marks is not None and not linear_decay.is_read(self._decay_marks)
        if self._unread > 1:
            raise ValueError(
                f"{linear_decay.FLAG} is given with an optimizer that does not read it; allowed with hydra: "
                f"optimizer={linear_decay.PREFIX}adam and others that begin with {linear_decay.PREFIX}"
            )
        super().set_num_updates(num_updates)
