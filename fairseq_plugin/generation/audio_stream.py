"""A recording that a causal model of audio reads in parts, as from a microphone."""

import torch
from torch import Tensor

from ..models._audio import LinearTimeAudioModel
from ..modules.audio_blocks import field_and_stride
from ..modules.audio_encoder import FRAMES_OPTION
from ..modules.multihead_attention import IncrementalState
from ..modules.positions import check_count


class AudioStream:
    """Recordings that ``model`` reads in parts of any length; all features together are those of one pass.

    ``model`` is one of our models of audio with ``--lineartime-causal``, such as ``linear_wav2vec2``, in evaluation
    mode; in a fine-tuned model it is ``w2v_encoder.w2v_model``. Between parts, the stream keeps the samples that the
    next frame reads, the frames that its position reads, and the state of each attention, whose size does not depend on
    the length of the recording unless the attention keeps all frames, as softmax attention does.

    Raises:
        ValueError: ``model`` is another model, is not causal, or is in training mode.
    """

    def __init__(self, model: LinearTimeAudioModel) -> None:
        if not isinstance(model, LinearTimeAudioModel) or not model.encoder.causal:
            raise ValueError(
                f"model is a {type(model).__name__} whose frames see those that follow; allowed: NAME_wav2vec2, "
                "NAME_hubert or NAME_data2vec_audio, built with --lineartime-causal"
            )
        self.model = model
        self._check_evaluation()
        self._state: IncrementalState = {}
        self._rest: Tensor | None = None
        self._frames = 0

    @torch.no_grad()
    def read(self, samples: Tensor) -> Tensor:
        """The next samples (B, n) of B recordings -> features (B, T, C) of the T frames that they complete, maybe 0.

        Raises:
            ValueError: ``samples`` has other dimensions, or another B than before; the recording becomes longer than a
                part of the model has parameters for; or the model has been set to training mode.
        """
        self._check_evaluation()
        rows = "any" if self._rest is None else len(self._rest)
        if samples.dim() != 2 or rows not in ("any", len(samples)):
            raise ValueError(f"samples has shape {tuple(samples.shape)}; allowed: (B, n) with {rows} B")
        if self._rest is not None:
            samples = torch.cat([self._rest, samples], 1)
        field, stride = field_and_stride(self.model.feature_extractor.conv_layers)
        frames = max(0, (samples.shape[1] - field) // stride + 1)
        check_count(torch.tensor([self._frames + frames]), self.model.encoder.max_tokens, FRAMES_OPTION)
        self._rest, self._frames = samples[:, frames * stride :].clone(), self._frames + frames
        if frames == 0:
            return samples.new_empty(len(samples), 0, self.model.encoder.embedding_dim)
        with self.model.encoder.continuing(self._state):
            return self.model(samples, mask=False, features_only=True)["x"]

    def _check_evaluation(self) -> None:
        if self.model.training:
            raise ValueError("model is in training mode; allowed: model.eval()")
