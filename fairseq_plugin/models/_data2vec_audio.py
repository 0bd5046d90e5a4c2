"""The base of ``NAME_data2vec_audio``: fairseq's data2vec for audio with another attention.

fairseq keeps the model among its examples. Importing it registers fairseq's own ``data2vec_audio``, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.examples.data2vec.models.data2vec_audio import Data2VecAudioConfig, Data2VecAudioModel
from torch import nn

from ._audio import AudioOptions, LinearTimeAudioModel

#: The entry of a state dict that holds the weights of the model's teacher, a moving average, by name.
_AVERAGE = "_ema"


@dataclass
class LinearTimeData2vecAudioConfig(AudioOptions, Data2VecAudioConfig):
    """Options of ``data2vec_audio`` and ours."""


class LinearTimeData2vecAudioModel(LinearTimeAudioModel, Data2VecAudioModel):
    """fairseq's data2vec for audio with another attention, also in the moving average that gives the targets."""

    stock_model = Data2VecAudioModel
    former_names = frozenset({_AVERAGE})  # no tensor, and only there in training: not compared with the model's

    @classmethod
    def build_model(cls, cfg: Any, task: Any = None) -> nn.Module:
        """fairseq's hook."""
        return cls.built(cfg)

    def make_ema_teacher(self) -> None:
        """fairseq's hook at the beginning of pretraining, which copies the encoder.

        torch cannot copy the weight that a single convolution with weight norm has computed with gradients, so it is
        computed without them here, and again at the next call.
        """
        with torch.no_grad():
            self.encoder.pos_conv(self.mask_emb.new_zeros(1, len(self.mask_emb), 1))
        super().make_ema_teacher()
        average = self.ema.model  # of the encoder or of the whole model
        getattr(average, "encoder", average).long_input = False  # results of its layers are the targets

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """fairseq's hook: leave out the moving average if this model has none, as in evaluation."""
        super().upgrade_state_dict(state_dict)
        if self.ema is None:
            state_dict.pop(_AVERAGE, None)
