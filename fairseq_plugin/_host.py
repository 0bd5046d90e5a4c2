"""Checks, before anything else is imported, of the packages that fairseq_plugin needs, and what fairseq's files need.

Every failure is one ImportError: its cause, and the command that helps.
"""

import argparse
import collections
import importlib
import importlib.util
import typing
from pathlib import Path


def check_host() -> None:
    """Check ``common``, numpy and fairseq, in this order.

    Raises:
        ImportError: one of them is missing, broken, not the right one, or, as numpy 2, too new for fairseq.
    """
    check_common()
    check_fairseq()


def check_common() -> None:
    """Raise ImportError unless the package ``common`` that Python finds is this project's.

    An error inside of this project's own ``common``, such as torch that is missing, is raised as it is.
    """
    root = Path(__file__).resolve().parents[1]
    try:
        common = importlib.import_module("common")
        place = getattr(common, "__file__", None) or list(getattr(common, "__path__", ["an unknown place"]))
        found = f"Python found another one in {place}"
    except Exception as error:  # whatever another package of that name raises
        spec = None if getattr(error, "name", None) == "common" else importlib.util.find_spec("common")
        place = getattr(spec, "origin", None)
        if place is not None and Path(place).resolve().parent == root / "common":
            raise
        common = None
        failed = f"Python found another one in {place}, which fails: {type(error).__name__}: {error}"
        found = "it is not on the path" if spec is None else failed
    if getattr(common, "DISTRIBUTION", None) != "lineartime":
        raise ImportError(
            f"fairseq_plugin needs lineartime's package common, but {found}. Run: export PYTHONPATH='{root}'"
            '"${PYTHONPATH:+:$PYTHONPATH}" (if another common is in the folder of your script, rename it)'
        )


def check_fairseq() -> None:
    """Raise ImportError unless fairseq imports, and numpy is one that it works with."""
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
    """Let ``torch.load(weights_only=True)`` read the configuration objects that fairseq puts into its checkpoints.

    torch loads tensors and plain containers only. fairseq's checkpoints may also hold argparse namespaces (a model,
    optimizer or criterion registered without a dataclass), omegaconf containers, with the types that those note of
    their values, and arrays and numbers of numpy, which ``--eval-bleu`` leaves in the metrics. All are data without
    behaviour of their own; any other class in a checkpoint is refused as before.
    torch's list is the process's: every ``torch.load`` in it accepts these classes from now on.
    """
    import numpy
    import omegaconf
    import torch
    from omegaconf import base, nodes

    node_classes = [cls for cls in vars(nodes).values() if isinstance(cls, type) and issubclass(cls, base.Node)]
    # With its name: timm allows the class while it reads a file of its own and takes that entry away afterwards.
    namespace = (argparse.Namespace, "argparse.Namespace")
    multiarray = numpy.core.multiarray
    numpy_names = [multiarray._reconstruct, multiarray.scalar, numpy.ndarray, numpy.dtype]
    numpy_names += [type(numpy.dtype(x)) for x in ("int64", "float64", "float32")]
    torch.serialization.add_safe_globals(
        [namespace, collections.defaultdict, dict, list, int, float, str, bool, typing.Any]
        + [omegaconf.DictConfig, omegaconf.ListConfig, base.Metadata, base.ContainerMetadata]
        + node_classes
        + numpy_names
    )
