"""``--lineartime-trained-parameters``: which parameters learn in a model that starts from a softmax Transformer."""

from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import safe_getattr
from torch import nn

from ..loading.known_options import flag_of, option_field
from ..modules.converted import converted_attentions, mechanism_name, projections
from ._options import option

OPTION = "lineartime_trained_parameters"
FLAG = flag_of(OPTION)
#: The criterion that does not allow all parameters to learn.
TRANSFER = "attention_transfer"
TRAINED = ("all", "attention", "new")


@dataclass
class TrainedOptions(FairseqDataclass):
    """Which parameters learn."""

    lineartime_trained_parameters: ChoiceEnum(TRAINED) = option_field(
        "all",
        "parameters that are trained; all others stay as they are: new, those that an attention has beside "
        "softmax attention's, such as learned feature maps; attention, these and its projections to queries, keys "
        f"and values; all. With --criterion {TRANSFER} the default is new",
    )


def choose_trained_parameters(args) -> None:
    """Choose the default for ``--criterion attention_transfer`` if the command line ``args`` leaves the option open.

    Raises:
        ValueError: the option is all.
    """
    if safe_getattr(args, "criterion") != TRANSFER or safe_getattr(args, "_name"):
        return  # fairseq sets _name after it parsed the command line, and calls this again to build the model
    if safe_getattr(args, OPTION, "new") == "all":
        raise ValueError(f"{FLAG} is all; allowed with --criterion {TRANSFER}: new, attention")
    setattr(args, OPTION, safe_getattr(args, OPTION, "new"))


def train_only_chosen(model: nn.Module, args) -> None:
    """Freeze the parameters of ``model`` that do not learn under the options ``args``, before an optimizer is built.

    Raises:
        ValueError: the model has only softmax attention; or only new parameters shall learn, and an attention has none.
    """
    chosen = option(args, TrainedOptions, OPTION)
    if chosen == "all":
        return
    attentions = converted_attentions(model).values()
    if not attentions:
        raise ValueError(
            f"the model has softmax attention alone; allowed with --criterion {TRANSFER} and with {FLAG} {chosen}: an "
            "architecture with another attention, such as hedgehog_lm"
        )
    parameterless = sorted({mechanism_name(x) for x in attentions if not any(True for _ in x.inner.parameters())})
    if chosen == "new" and parameterless:
        raise ValueError(
            f"{FLAG} is new (the default of --criterion {TRANSFER}), and {', '.join(parameterless)} attention has no "
            f"parameters of its own; allowed with it: {FLAG} attention, which trains its projections"
        )
    model.requires_grad_(False)
    for attention in attentions:
        for module in (attention.inner, *(projections(attention) if chosen == "attention" else ())):
            module.requires_grad_(True)
