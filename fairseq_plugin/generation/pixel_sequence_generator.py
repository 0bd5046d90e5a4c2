"""fairseq's generator for images: exactly the subpixels of one image, no other symbols, then the end."""

import math
from collections.abc import Sequence

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor, nn

from ..data.pixels import FIRST_TOKEN

# A given subpixel may be so improbable that its probability is 0 in float32, and nothing can be sampled from a row of
# zeros. A probability of e^-80 does not affect other samples.
_LEAST_SCORE = -80.0


class PixelEnsemble(EnsembleModel):
    """fairseq's ensemble, restricted to ``length`` times one of the 256 values and then the end.

    The end is not computed by the model: a whole image would be one token longer than the model's positions.
    """

    def __init__(self, models: Sequence[nn.Module], dictionary: Dictionary, length: int) -> None:
        super().__init__(models)
        self.dictionary = dictionary
        self.length = length

    def forward_decoder(self, tokens: Tensor, encoder_outs, incremental_states, temperature: float = 1.0):
        """Log-probabilities (rows, symbols) of the token after ``tokens`` (rows, 1 + subpixels so far), and None."""
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
    """fairseq's generator for images of ``length`` subpixels; ``options`` are its options other than lengths."""
    options.update(max_len_a=0, max_len_b=length, max_len=length + 1)  # fairseq counts the end in max_len
    return generator_class(PixelEnsemble(models, dictionary, length), dictionary, **options)
