"""Checks the packages that fairseq_plugin needs, before other imports; lets torch read fairseq's checkpoints.

Every failed check is one ImportError with its cause and a command that helps.
"""

import argparse
import collections
import importlib
import runpy
import typing
from pathlib import Path


def check_host() -> None:
    """Check ``common``, numpy and fairseq, in this order.

    Raises:
        ImportError: one of them is missing, broken, another package of the same name, or, like numpy 2, too new.
    """
    check_common()
    check_fairseq()


def check_common() -> None:
    """Raise ImportError unless the package ``common`` that Python finds belongs to this project.

    The check is in the ``common`` next to this plugin, if there is one, whatever Python finds by that name.
    """
    path = Path(__file__).resolve().parents[1] / "common" / "_installed.py"
    checks = runpy.run_path(str(path)) if path.is_file() else vars(importlib.import_module("common._installed"))
    checks["check_common"]("fairseq_plugin")


def check_fairseq() -> None:
    """Raise ImportError unless fairseq can be imported and works with the installed numpy."""
    from common._installed import import_for, install_command, version_numbers

    command = install_command("fairseq")
    numpy = import_for("fairseq_plugin", "numpy", command)
    if version_numbers(numpy.__version__) >= (2,):
        raise ImportError(
            f"fairseq_plugin found numpy {numpy.__version__}; fairseq works with numpy 1 only (its generation fails on "
            "np.compat, its compiled parts may not load). Run: pip install 'numpy<2'"
        )
    # PyPI's fairseq 0.12.2 and its hydra-core 1.0 fail on Python >= 3.11: "mutable default ... use default_factory".
    for name in ("fairseq", "fairseq.models.transformer_lm"):
        import_for("fairseq_plugin", name, f"{command}; if PyPI's fairseq is installed, first pip uninstall fairseq")


def allow_checkpoint_classes() -> None:
    """Let ``torch.load(weights_only=True)`` read the configuration objects in fairseq's checkpoints.

    torch only loads tensors and plain containers. fairseq's checkpoints may also hold argparse namespaces (of a model,
    optimizer or criterion registered without a dataclass), omegaconf containers with the types of their values, and
    dictionaries, which tasks of audio store, and arrays and numbers of numpy, which ``--eval-bleu`` leaves in the
    metrics. All are plain data; any other class in a checkpoint is still refused.
    torch's list is global: every ``torch.load`` of the process accepts these classes from now on.
    """
    import numpy
    import omegaconf
    import torch
    from fairseq.data import Dictionary
    from omegaconf import base, nodes

    node_classes = [cls for cls in vars(nodes).values() if isinstance(cls, type) and issubclass(cls, base.Node)]
    # With its name, since timm allows the class while it reads its own files and then removes its entry.
    namespace = (argparse.Namespace, "argparse.Namespace")
    multiarray = numpy.core.multiarray
    numpy_names = [multiarray._reconstruct, multiarray.scalar, numpy.ndarray, numpy.dtype]
    numpy_names += [type(numpy.dtype(x)) for x in ("int64", "float64", "float32")]
    torch.serialization.add_safe_globals(
        [namespace, collections.defaultdict, dict, list, int, float, str, bool, typing.Any]
        + [omegaconf.DictConfig, omegaconf.ListConfig, base.Metadata, base.ContainerMetadata]
        + [Dictionary, *node_classes]
        + numpy_names
    )
