"""Importing this keeps hydra from copying every option of fairseq whenever it makes a configuration.

That takes more than half of the time of a configuration, which most tests of fairseq's commands and checkpoints make.
What hydra reads from its store it copies by itself.
"""

from hydra.core.config_store import ConfigStore

ConfigStore.__deepcopy__ = lambda store, memo: store
