"""fairseq's generator for images: as many subpixels as an image has, no other symbol among them, then the end."""

import math
from collections.abc import Sequence

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor, nn

from ..data.pixels import FIRST_TOKEN

# A given subpixel may be so improbable that its probability is 0 in float32, and of a row of zeros nothing can be
# drawn. A probability of e^-80 changes no other draw.
_LEAST_SCORE = -80.0


class PixelEnsemble(EnsembleModel):
    """fairseq's ensemble, which says one of the 256 values ``length`` times and then the end.

    The model is not asked for the end: an image that is whole would be one token longer than the model's positions.
    """

    def __init__(self, models: Sequence[nn.Module], dictionary: Dictionary, length: int) -> None:
        super().__init__(models)
        self.dictionary = dictionary
        self.length = length

    def forward_decoder(self, tokens: Tensor, encoder_outs, incremental_states, temperature: float = 1.0):
        """Log-probabilities (rows, symbols) of what follows tokens (rows, 1 + subpixels so far), and no attention."""
        if tokens.size(1) > self.length:
            scores = torch.full((tokens.size(0), len(self.dictionary)), -math.inf, device=tokens.device)
            scores[:, self.dictionary.eos()] = 0.0
            return scores, None
        scores, _ = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        scores = scores.clamp(min=_LEAST_SCORE)
        scores[:, :FIRST_TOKEN] = -math.inf
        return scores, None


def build_pixel_generator(
    models: Sequence[nn.Module],
    dictionary: Dictionary,
    length: int,
    generator_class: type[SequenceGenerator] = SequenceGenerator,
    **options,
) -> SequenceGenerator:
    """fairseq's generator of images of ``length`` subpixels; ``options`` are the generator's, but for its lengths."""
    options.update(max_len_a=0, max_len_b=length, max_len=length + 1)  # fairseq counts the end in max_len
    return generator_class(PixelEnsemble(models, dictionary, length), dictionary, **options)
