"""What the plugin needs of its surroundings, checked once, and what it adds to lists of torch and fairseq."""

import argparse
import collections
import importlib
import typing
from pathlib import Path
from types import ModuleType

INSTALL = "pip install 'lineartime[fairseq]'"


def import_host() -> ModuleType:
    """Import and return fairseq.

    Raises:
        ImportError: fairseq is missing, cannot be imported here, or numpy 2 stands beside it, or the package
            ``common`` is missing or somebody else's; the message names the cause and the command that mends it.
    """
    _check_common()
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise ImportError(f"fairseq_plugin needs fairseq, which needs numpy. Run: {INSTALL}") from error
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ImportError(
            f"fairseq_plugin found numpy {numpy.__version__}; fairseq works with numpy 1 only (its generation fails on "
            "np.compat, its compiled parts may not load). Run: pip install 'numpy<2'"
        )
    try:
        fairseq = importlib.import_module("fairseq")
        importlib.import_module("fairseq.models.transformer_lm")
    except ModuleNotFoundError as error:
        missing = error.name or "fairseq"
        raise ImportError(f"fairseq_plugin needs {missing}, which is not installed. Run: {INSTALL}") from error
    except (ImportError, ValueError, AttributeError) as error:
        # fairseq 0.12.2 and its hydra-core 1.0 on Python >= 3.11: "mutable default ... use default_factory".
        raise ImportError(
            f"fairseq is installed but cannot be imported ({error}). PyPI's fairseq 0.12.2 does not work on Python "
            f">= 3.11. Run: pip uninstall -y fairseq && {INSTALL}"
        ) from error
    return fairseq


def _check_common() -> None:
    """Raise ImportError unless the package ``common`` that Python finds is this project's."""
    mend = f"Run: export PYTHONPATH='{Path(__file__).resolve().parents[1]}'\"${{PYTHONPATH:+:$PYTHONPATH}}\""
    try:
        common = importlib.import_module("common")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"fairseq_plugin needs lineartime's package common, which is not on the path. {mend}"
        ) from error
    if getattr(common, "DISTRIBUTION", None) != "lineartime":
        place = getattr(common, "__file__", None) or list(common.__path__)
        raise ImportError(
            f"fairseq_plugin needs lineartime's package common, but Python found another one in {place}. {mend} "
            "(if that one is in the folder of your script, rename it)"
        )


def allow_checkpoint_classes() -> None:
    """Let ``torch.load(weights_only=True)`` read the configuration objects fairseq puts into its checkpoints.

    torch >= 2.6 loads tensors and plain containers only. fairseq's checkpoints may also hold argparse namespaces (a
    model, optimizer or criterion registered without a dataclass) and omegaconf containers; both are data without
    behaviour of their own. Everything else in a checkpoint is refused as before.
    """
    import omegaconf
    import torch
    from omegaconf import base, nodes

    node_classes = [cls for cls in vars(nodes).values() if isinstance(cls, type) and issubclass(cls, base.Node)]
    # With its name: timm allows the class while it reads a file of its own and takes that entry away afterwards.
    namespace = (argparse.Namespace, "argparse.Namespace")
    torch.serialization.add_safe_globals(
        [namespace, collections.defaultdict, dict, list, int, float, str, bool, typing.Any]
        + [omegaconf.DictConfig, omegaconf.ListConfig, base.Metadata, base.ContainerMetadata]
        + node_classes
    )


def allow_quantization() -> None:
    """Let fairseq's scalar quantisation (``--quant-noise-scalar``) take ``common.linear.Linear`` for ``nn.Linear``."""
    from fairseq.modules.quantization.scalar.utils import MAPPING
    from torch import nn

    from common.linear import Linear

    MAPPING[Linear] = MAPPING[nn.Linear]
