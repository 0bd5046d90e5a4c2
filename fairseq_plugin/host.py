"""What the plugin needs of its surroundings, checked once, and what it adds to torch's list of harmless classes."""

import argparse
import collections
import importlib
import typing
from types import ModuleType

INSTALL = "pip install 'lineartime[fairseq]'"


def import_host() -> ModuleType:
    """Import and return fairseq.

    Raises:
        ImportError: fairseq is missing, cannot be imported here, or numpy 2 stands beside it, or the package
            ``common`` is somebody else's; the message names the cause and the command that mends it.
    """
    import common

    if getattr(common, "DISTRIBUTION", None) != "lineartime":
        raise ImportError(
            f"fairseq_plugin needs lineartime's package 'common', but Python finds another one at "
            f"{getattr(common, '__file__', None) or list(common.__path__)}. "
            "Put the folder that holds fairseq_plugin first: PYTHONPATH=/path/to/lineartime, or rename the other one."
        )
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise ImportError(f"fairseq_plugin needs fairseq, which needs numpy. Mend it with: {INSTALL}") from error
    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ImportError(
            f"fairseq_plugin found numpy {numpy.__version__}; fairseq works with numpy 1 only (its generation fails on "
            "np.compat, its compiled parts may not load). Mend it with: pip install 'numpy<2'"
        )
    try:
        fairseq = importlib.import_module("fairseq")
        importlib.import_module("fairseq.models.transformer_lm")
    except ModuleNotFoundError as error:
        missing = error.name or "fairseq"
        raise ImportError(f"fairseq_plugin needs {missing}, which is not installed. Mend it with: {INSTALL}") from error
    except (ImportError, ValueError, AttributeError) as error:
        # fairseq 0.12.2 and its hydra-core 1.0 on Python >= 3.11: "mutable default ... use default_factory".
        raise ImportError(
            f"fairseq is installed but cannot be imported ({error}). PyPI's fairseq 0.12.2 does not work on Python "
            f">= 3.11. Mend it with: pip uninstall -y fairseq && {INSTALL}"
        ) from error
    return fairseq


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
    torch.serialization.add_safe_globals(
        [argparse.Namespace, collections.defaultdict, dict, list, int, float, str, bool, typing.Any]
        + [omegaconf.DictConfig, omegaconf.ListConfig, base.Metadata, base.ContainerMetadata]
        + node_classes
    )
