"""transformers' generation by models whose cache cannot take tokens back: greedy, by sampling and by beams.

Legend: B rows, n tokens. Masks of transformers are 1 at real tokens.
"""

from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import LineartimeCache, check_cache
from .tokens import compare_with_read, read_padding

#: The name of the cache in transformers' outputs, which has changed, and its other name.
CACHE_FIELD = "cache" if "cache" in {x.name for x in fields(CausalLMOutputWithPast)} else "past_key_values"
_OTHER_FIELD = "past_key_values" if CACHE_FIELD == "cache" else "cache"

_TAKES_BACK = "as it takes tokens back, and the sums of a cache cannot forget a token"
_OWN_CACHE = "as a model makes its own cache, which is neither static nor compiled"
#: Settings of transformers' generation that would fail or have no effect, and why.
REFUSED_SETTINGS = {
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha"), _TAKES_BACK
    ),
    **dict.fromkeys(("use_mtp", "speculation_type", "is_assistant"), _TAKES_BACK),
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len", "compile_config"), _OWN_CACHE),
    "continuous_batching_config": "as there is no continuous batching",
    "low_memory": "as there is no contrastive generation",
}


class StateGenerationMixin(GenerationMixin):
    """transformers' generation with a ``LineartimeCache``."""

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Any:
        """As transformers'; with ``cache``, the text goes on from an earlier call.

        With a cache, ``inputs`` are either the whole text, which begins with the tokens that the cache has read, or its
        next tokens alone. A text that begins with some of those tokens and not with all is neither, and refused, unless
        ``attention_mask`` has the columns of the cache and of ``inputs``, which says that these are next tokens. Any
        other mask covers ``inputs``. A target (``decoder_input_ids``) is always the whole one. What is
        returned begins with ``inputs``. A cache with one row for each of ``inputs`` is copied and repeated for beams
        and for several sequences.

        Raises:
            ValueError: inputs that do not go on from the cache; a mask of another width; assisted or contrastive
                generation, which take back tokens that were read; a setting without effect, such as
                ``cache_implementation``.
        """
        settings = (options, vars(generation_config or self.generation_config), vars(self.generation_config))
        for name, reason in REFUSED_SETTINGS.items():
            value = _setting(name, settings)
            if value is not None and value is not False:
                raise ValueError(f"{name} is given; allowed for {type(self).__name__}: None, {reason}")
        for name in (_OTHER_FIELD, CACHE_FIELD):
            if options.get(name) is not None:
                options[CACHE_FIELD] = check_cache(options.pop(name))
        if _setting("prefill_chunk_size", settings) and _setting("use_cache", settings) is not False:
            options.setdefault(CACHE_FIELD, LineartimeCache())
        cache = options.get(CACHE_FIELD)
        if cache is not None and cache.columns:
            self._go_on(cache, inputs, options, settings)
        return super().generate(inputs, generation_config, **options)

    def _go_on(
        self, cache: LineartimeCache, inputs: Tensor | None, options: dict[str, Any], settings: tuple[Any, ...]
    ) -> None:
        """Set the mask in ``options``, which says what is read after ``cache``, and the cache of all sequences."""
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        tokens = options.get(f"{prefix}input_ids") if prefix or inputs is None else inputs
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            given = tuple(tokens.shape) if isinstance(tokens, Tensor) else tokens
            raise ValueError(f"{prefix}input_ids is {given}; allowed with a cache: a tensor (batch, tokens)")
        start = _setting("decoder_start_token_id", settings)
        if prefix and bool((tokens[:, 0].cpu() != torch.as_tensor(start)).all()):  # transformers would put it in front
            raise ValueError(f"decoder_input_ids begins with {int(tokens[0, 0])}; allowed with a cache: {start}")
        repeats = max(_setting(name, settings) or 1 for name in ("num_beams", "num_return_sequences"))
        rows, n = tokens.shape
        if cache.batch_size not in (rows, repeats * rows):
            raise ValueError(f"cache has {cache.batch_size} rows; allowed: {rows}, one for each row of the text")
        mask = options.get(f"{prefix}attention_mask")
        shape = (rows, n) if mask is None else tuple(mask.shape)
        if shape == (rows, n):
            mask = self._mask_after(cache, tokens, mask, prefix)
        elif shape != (rows, cache.columns + n) or prefix:
            allowed = "" if prefix else f", or {(rows, cache.columns + n)}, with those of the cache before them"
            raise ValueError(
                f"{prefix}attention_mask has shape {shape}; allowed: {(rows, n)}, that of the tokens{allowed}"
            )
        chunked = _setting("prefill_chunk_size", settings)
        if chunked and mask.shape[1] == n and _first_column(mask) != cache.columns:
            raise ValueError(
                f"prefill_chunk_size is {chunked}; allowed after a cache of rows with other padding than here: None"
            )
        options[f"{prefix}attention_mask"] = mask
        if repeats > 1 and cache.batch_size == rows:
            options[CACHE_FIELD] = cache.copy()
            options[CACHE_FIELD].batch_repeat_interleave(repeats)

    def _mask_after(self, cache: LineartimeCache, tokens: Tensor, mask: Tensor | None, prefix: str) -> Tensor:
        """The mask that is 1 at the real ones of ``tokens`` (B, n) that ``cache`` has not read.

        It has n columns if the tokens are the whole text, and as many more as the cache has if they come after it.
        """
        name, n = f"{prefix}input_ids", tokens.shape[1]
        padding = read_padding(tokens, mask, self.config.pad_token_id)
        real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
        repeats = cache.batch_size // len(tokens)  # the cache may be repeated for several sequences already
        rows = (x.repeat_interleave(repeats, dim=0) for x in (tokens, real))
        begins, starts, further = compare_with_read(*rows, cache.seen)
        if bool(begins.all()):
            ended = ~further.any(dim=1)
            if bool(ended.any()):
                row = int(ended.int().argmax())
                raise ValueError(
                    f"{name} has no token in row {row // repeats} after the {int(cache.seen['read'][row])} that the "
                    "cache has read; allowed: at least one more"
                )
            return further[::repeats].long()
        if not prefix and not bool(starts.any()):
            return torch.cat([real.new_ones(len(tokens), cache.columns), real], dim=1).long()
        row = int((~begins).int().argmax())
        alone = f"; or the next tokens alone, with an attention_mask of {cache.columns + n} columns"
        raise ValueError(
            f"{name} does not begin in row {row // repeats} with the {int(cache.seen['read'][row])} tokens that the "
            f"cache has read; allowed: the whole text, which does{'' if prefix else alone}"
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """transformers' hook: the arguments of a step, without positions, which the model counts itself."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        mask = kwargs.get("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask")
        whole = kwargs.get("is_first_iteration") and next_sequence_length is not None
        if whole and mask is not None and cache is not None and cache.columns:
            next_sequence_length = input_ids.shape[1] - _first_column(mask)  # what ``generate`` has marked
        arguments = super().prepare_inputs_for_generation(input_ids, next_sequence_length, **kwargs)
        arguments.pop("position_ids", None)
        return arguments

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise ValueError: continuous batching keeps keys and values of each token in pages."""
        raise self._no_continuous_batching("init_continuous_batching")

    def continuous_batching_context_manager(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise ValueError: see ``init_continuous_batching``."""
        raise self._no_continuous_batching("continuous_batching_context_manager")

    def generate_batch(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise ValueError: see ``init_continuous_batching``."""
        raise self._no_continuous_batching("generate_batch")

    def _no_continuous_batching(self, name: str) -> ValueError:
        return ValueError(
            f"{name} is called; allowed for {type(self).__name__}: generate, with a padded batch, as continuous "
            "batching keeps keys and values of each token, which the states of these models do not have"
        )


def _setting(name: str, settings: tuple[dict[str, Any], ...]) -> Any:
    """The first value of ``name`` in ``settings`` that is not None."""
    return next((x[name] for x in settings if x.get(name) is not None), None)


def _first_column(mask: Tensor) -> int:
    """The first column of ``mask`` (B, n) with a 1."""
    return int(mask.any(dim=0).int().argmax())
