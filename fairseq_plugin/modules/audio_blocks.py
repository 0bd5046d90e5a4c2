"""Feature extraction of long recordings in blocks of frames: the same result with less memory.

Legend: B batch, n samples, T frames, C channels.
"""

from collections.abc import Iterable, Iterator

import torch
from fairseq.models.wav2vec.wav2vec2 import ConvFeatureExtractionModel
from torch import Tensor, nn


class ExtractorInBlocks(ConvFeatureExtractionModel):
    """fairseq's ``extractor``, which without gradients computes ``block_frames`` frames at a time.

    Its convolutions have no padding, so a block reads the samples of its own frames alone, and the result is that of
    one pass. In ``--extractor-mode default``, where the first convolution is normalised over all frames, mean and
    variance are computed first, in blocks too. Memory beside input and output is O(B C ``block_frames``). With
    gradients this is fairseq's own pass. Names of parameters do not change.
    """

    def __init__(self, extractor: ConvFeatureExtractionModel, block_frames: int) -> None:
        nn.Module.__init__(self)  # the layers are those of ``extractor``; fairseq's constructor would draw new ones
        self.conv_layers, self.block_frames = extractor.conv_layers, block_frames

    def forward(self, x: Tensor) -> Tensor:
        """Samples (B, n) -> features (B, C, T)."""
        field, stride = field_and_stride(self.conv_layers)
        frames = (x.shape[1] - field) // stride + 1
        if torch.is_grad_enabled() or frames <= self.block_frames:
            return super().forward(x)
        first, *further = self.conv_layers
        norms = {module: self._statistics(x, first[0]) for module in first if isinstance(module, nn.GroupNorm)}
        features = x.new_empty(0)
        for start, samples in _blocks(x, self.conv_layers, self.block_frames):
            part = samples.unsqueeze(1)
            for module in first:
                part = _normalised(part, module, *norms[module]) if module in norms else module(part)
            for layer in further:
                part = layer(part)
            if start == 0:
                features = part.new_empty(*part.shape[:2], frames)
            features[:, :, start : start + part.shape[2]] = part
        return features

    def _statistics(self, x: Tensor, convolution: nn.Conv1d) -> tuple[Tensor, Tensor]:
        """Mean and variance over time, each (B, C, 1) in float64, of the first ``convolution`` of x (B, n)."""
        block = self.block_frames * field_and_stride(self.conv_layers)[1] // convolution.stride[0]
        count, total, squares = 0, 0.0, 0.0
        for _, samples in _blocks(x, [[convolution]], block):
            part = convolution(samples.unsqueeze(1)).float()
            count += part.shape[2]
            total = total + part.sum(2, keepdim=True, dtype=torch.float64)
            squares = squares + part.square().sum(2, keepdim=True, dtype=torch.float64)
        mean = total / count
        return mean, (squares / count - mean.square()).clamp(min=0.0)


def field_and_stride(layers: Iterable[nn.Sequential]) -> tuple[int, int]:
    """The samples that a frame of the extractor's ``layers`` reads, and those between the starts of two frames.

    n samples are (n - field) // stride + 1 frames.
    """
    field, stride = 1, 1
    for convolution, *_ in layers:
        (kernel,), (step,) = convolution.kernel_size, convolution.stride
        field, stride = field + (kernel - 1) * stride, stride * step
    return field, stride


def _blocks(x: Tensor, layers: Iterable[nn.Sequential], block_frames: int) -> Iterator[tuple[int, Tensor]]:
    """The first frame of each block, and the samples (B, at most n) that its frames read of x (B, n)."""
    field, stride = field_and_stride(layers)
    frames = (x.shape[1] - field) // stride + 1
    for start in range(0, frames, block_frames):
        end = min(start + block_frames, frames)
        yield start, x[:, start * stride : (end - 1) * stride + field]


def _normalised(part: Tensor, norm: nn.GroupNorm, mean: Tensor, variance: Tensor) -> Tensor:
    """``norm`` of ``part`` (B, C, t) with the statistics of all frames, computed in float32 as fairseq does."""
    scale = norm.weight[:, None] * (variance + norm.eps).rsqrt()
    shift = norm.bias[:, None] - mean * scale
    return torch.addcmul(shift.float(), part.float(), scale.float()).type_as(part)
