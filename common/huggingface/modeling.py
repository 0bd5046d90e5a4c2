"""The models that transformers loads: language models, masked models, classifiers, encoder-decoders, and features.

Legend: B rows, n tokens, m tokens of a source, C width, V tokens of the vocabulary. Masks of transformers are 1 at real
tokens. Parameters have the names of the same model in fairseq, whose state dict fits as it is.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import ModelOutput

from ..attention import ATTENTIONS
from ..checkpoints import listed
from ..files.output_files import give_usual_modes
from ..modules.stored_options import StoredOptions, StoresOptions, is_extra_state
from ..ops.shared.checks import check_choice
from ..ops.shared.segments import documents_by_eos
from .cache import LineartimeCache, check_cache
from .configuration import LineartimeConfig
from .generation import CACHE_FIELD, StateGenerationMixin
from .layers import Source, Stack, activation_called, part, projection
from .tokens import (
    Tokens,
    check_positions,
    documents_by_position,
    fingerprint,
    hidden_or_none,
    is_padding,
    read_padding,
    read_tokens,
)

#: The file that transformers runs with ``trust_remote_code=True``.
_REMOTE_CODE = "modeling_lineartime.py"
#: What transformers' collators of packed documents may add to ``position_ids``, which say the same.
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
#: The beginning of the names of a classifier's head: those that PEFT looks for, and a pattern of those of fairseq.
HEAD, FAIRSEQ_HEAD = "classifier.", r"^classification_heads\.[^.]+\."
#: The beginning of the names of every head, which folders of other classes have or lack.
_HEADS = re.compile(
    rf"decoder\.(output_projection|project_out_dim)\.|encoder\.lm_head\.|{re.escape(HEAD)}|{FAIRSEQ_HEAD}"
)
#: Arguments that transformers passes to every model, and that mean nothing to these.
_UNUSED = frozenset({"cache_position"})


class LineartimePreTrainedModel(PreTrainedModel):
    """The base of all models: loading, initialisation, and what transformers asks a model."""

    config_class = LineartimeConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    #: The path of the token embeddings in the model.
    token_embeddings: ClassVar[str]
    _no_split_modules = ["TransformerLayer", "GatedAttentionUnitLayer"]
    _is_stateful = True  # no assisted generation, which removes tokens from a cache
    #: Within ``initialize_weights``, the part that was built last, by its path.
    _built: dict[str, nn.Module] | None = None
    _supported_generation_modes = [
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    ]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As transformers', but weights that are missing or do not belong to the model are an error.

        From a folder of another class, a head may be left out, or missing and new; transformers reports both.

        Raises:
            ValueError: a weight is missing, or one is not of this model.
        """
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *arguments, output_loading_info=True, **options
        )
        missing = sorted(name for name in info["missing_keys"] if not is_extra_state(name))
        further = sorted(info["unexpected_keys"])
        if cls.__name__ not in (model.config.architectures or [cls.__name__]):
            further = [name for name in further if not _HEADS.match(name)]
            head = {name for name, _ in model.named_parameters() if _HEADS.match(name)}
            if head.issubset(missing):
                missing = [name for name in missing if name not in head]
        if missing or further:
            faults = [("missing", missing), ("not of this model", further)]
            text = "; ".join(f"{len(names)} {fault}{listed(names)}" for fault, names in faults if names)
            raise ValueError(
                f"the weights in {str(pretrained_model_name_or_path)!r} do not fit {cls.__name__}: {text}; allowed: "
                "all weights of the model of its config.json, and no others"
            )
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        """transformers' hook: the token embeddings, of the encoder if there are two sides."""
        return self.get_submodule(self.token_embeddings)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """transformers' hook: replace the token embeddings."""
        self.set_submodule(self.token_embeddings, value)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """transformers' hook: False, since ``generate`` must not pass a cache of keys and values."""
        return False

    def loss_of(
        self, logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None, **options: Any
    ) -> Tensor | None:
        """transformers' loss of this kind of model for logits (B, n, V) and labels (B, n); None without labels."""
        if labels is None:
            return None
        return self.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch, **options)

    def has_one_table(self) -> bool:
        """Whether transformers' ``resize_token_embeddings`` reaches every tensor with a row for each token."""
        return True

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *arguments: Any, **options: Any) -> nn.Module:
        """As transformers'; ValueError for a model in which other tables would keep their size."""
        if new_num_tokens is not None and not self.has_one_table():
            raise ValueError(
                f"new_num_tokens is {new_num_tokens}; allowed for {type(self).__name__} with several tables of tokens: "
                "None, since only one of them would be resized"
            )
        return super().resize_token_embeddings(new_num_tokens, *arguments, **options)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """As transformers', with the file that a folder of export_hf has for ``trust_remote_code=True``."""
        options.setdefault("save_original_format", False)  # names of this model, not those that were loaded
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        if getattr(self.config, "auto_map", None) and is_main_process:
            copyfile(Path(__file__).with_name(_REMOTE_CODE), Path(save_directory, _REMOTE_CODE))
        if is_main_process:
            give_usual_modes(Path(save_directory).glob("model*.safetensors"), Path(save_directory))

    def post_init(self) -> None:
        """transformers' hook at the end of a constructor, which has initialised all that is not on "meta"."""
        for module in self.modules():
            module._is_hf_initialized = not any(x.is_meta for _, x in _own_tensors(module))
        super().post_init()

    def initialize_weights(self) -> None:
        """transformers' hook: initialise each tensor that neither the constructor nor a file has given a value."""
        self._built = {}
        try:
            super().initialize_weights()
        finally:
            self._built = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers' hook: give the own tensors of ``module`` that no file has what the constructor gives them."""
        missing = [name for name, x in _own_tensors(module) if not getattr(x, "_is_hf_initialized", False)]
        counts = module.counts if isinstance(module, StoresOptions) else ()
        if counts and module._non_persistent_buffers_set.issuperset(missing):  # they follow from what was loaded
            module.restore_counts({name: getattr(module, name) for name in counts})
        elif missing:
            path = next((name for name, x in self.named_modules() if x is module), None)
            new = None if path is None else self._built_anew(path, getattr(module, missing[0]).device)
            if new is not None:
                for name in missing:
                    getattr(module, name).copy_(getattr(new, name))
                if counts:
                    module.restore_counts({name: getattr(new, name) for name in counts})
            elif path is None and isinstance(module, (nn.Embedding, nn.Linear)):  # of resize_token_embeddings
                in_units = self.config.family == "gau" and isinstance(module, nn.Embedding)
                nn.init.normal_(module.weight, std=0.02 if in_units else module.weight.shape[1] ** -0.5)
            else:  # of a subclass
                super()._init_weights(module)

    def _built_anew(self, path: str, device: torch.device) -> nn.Module | None:
        """The module at ``path`` of the part around it, which is built anew on ``device``; None if it is in none."""
        names = path.split(".")
        places = (".".join(names[:length]) for length in range(len(names), 0, -1))
        place = next((x for x in places if hasattr(self.get_submodule(x), "build_anew")), None)
        if place is None:
            return None
        built = {} if self._built is None else self._built
        if place not in built:  # modules come part by part, so that one is enough
            built.clear()
            with device:
                built[place] = self.get_submodule(place).build_anew()
        return built[place].get_submodule(path[len(place) + 1 :])


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of ``module`` itself, by name."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def read_inputs(
    config: LineartimeConfig,
    stack: Stack,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    cache: LineartimeCache | None = None,
) -> Tokens:
    """The tokens of a call of ``stack``, from what transformers passes to models.

    Raises:
        ValueError: an input is missing, has a wrong shape, or contradicts another one.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        given = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else input_ids
        raise ValueError(f"input_ids is {given}; allowed: a tensor (batch, tokens) of at least one token")
    seen = {}
    if cache is not None:
        cache.check_fits(len(stack.layers), len(input_ids))
        seen = cache.seen
    padding_mask = read_padding(input_ids, attention_mask, config.pad_token_id)
    if position_ids is not None:
        rows, n = input_ids.shape
        if tuple(position_ids.shape) not in ((rows, n), (1, n)):
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; allowed: {(rows, n)} or {(1, n)}")
        position_ids = position_ids.expand_as(input_ids)
    if config.reset_at_eos:
        if position_ids is not None:
            raise ValueError("position_ids is given; allowed for a model with reset_at_eos: None")
        segment_ids = documents_by_eos(input_ids, config.eos_token_id, stack.causal, seen.get("document"))
    elif position_ids is not None:
        segment_ids = documents_by_position(position_ids, padding_mask, seen)
    else:  # the last document goes on
        segment_ids = seen["document"][:, None].expand_as(input_ids) if "document" in seen else None
    tokens = read_tokens(input_ids, padding_mask, segment_ids, seen)
    if position_ids is not None:
        check_positions(position_ids, tokens)
    if cache is not None:
        real = torch.ones_like(input_ids, dtype=torch.bool) if padding_mask is None else ~padding_mask
        tokens.seen.update(fingerprint(input_ids, real, seen))
    return tokens


class _DecoderModel(LineartimePreTrainedModel, StateGenerationMixin):
    """The base of models that generate, whose ``decoder`` has a projection to scores."""

    def get_output_embeddings(self) -> nn.Module:
        """transformers' hook: the projection of features to scores."""
        return self.decoder.output_projection

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """transformers' hook: replace the projection."""
        self.decoder.output_projection = new_embeddings


class LineartimeForCausalLM(_DecoderModel):
    """A language model: ``NAME_lm`` of fairseq.

    ``generate`` reads a prompt in one pass, and its cache has a constant size if the attentions have one. Batches may
    be padded on the left. Assisted and contrastive generation are refused.
    """

    token_embeddings = "decoder.embed_tokens"
    _tied_weights_keys = {"decoder.output_projection.weight": "decoder.embed_tokens.weight"}

    def __init__(self, config: LineartimeConfig) -> None:
        config.is_decoder = True
        super().__init__(config)
        self.decoder = Decoder(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LineartimeCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: LineartimeCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **further: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """input_ids (B, n) -> ``logits`` (B, n, V), and ``loss`` if ``labels`` are given.

        Args:
            input_ids: the tokens, or those after the tokens of ``cache``.
            attention_mask: (B, n), 1 at real tokens, which may have padding on any side; with a cache also (B, tokens
                so far + n). The padding token is never real.
            position_ids: (B, n), None or positions that begin at 0 in each document of a row, of which none sees
                another: packed documents, as transformers' collators make them.
            cache: what an earlier call returned; it is updated. ``past_key_values`` is its name in earlier versions.
            labels: (B, n), the same tokens, which are shifted here; -100 has no loss.
            use_cache: whether to return a cache; None: only if one is given.
            logits_to_keep, output_hidden_states, return_dict, num_items_in_batch: as in transformers' own models.

        Raises:
            ValueError: an input of a wrong shape or too long, positions that are not those of the tokens, a cache of
                another model, or an argument that no model here reads.
        """
        _refuse(further, packed=position_ids is not None)
        cache = _cache_of(cache, past_key_values, use_cache)
        tokens = read_inputs(self.config, self.decoder, input_ids, attention_mask, position_ids, cache)
        x, features = self.decoder(input_ids, tokens, cache)
        logits = self.decoder.scores(_kept(x, logits_to_keep))
        output = CausalLMOutputWithPast(
            self.loss_of(logits, labels, num_items_in_batch),
            logits,
            hidden_states=features if _wants(output_hidden_states, self.config) else None,
            **{CACHE_FIELD: cache},
        )
        return output if return_dict is not False else output.to_tuple()


class Decoder(Stack):
    """A causal stack with the projection of its features to scores of the vocabulary."""

    def __init__(self, config: LineartimeConfig, crossed: bool = False) -> None:
        super().__init__(config, causal=True, crossed=crossed)
        width, output_dim = config.hidden_size, config.output_dim
        self.project_out_dim = None if output_dim is None else part(projection, width, output_dim, False, 1.0)
        self.output_projection = part(output_projection, config)

    def scores(self, x: Tensor) -> Tensor:
        """Features (..., C) -> scores of the vocabulary (..., V)."""
        return self.output_projection(x if self.project_out_dim is None else self.project_out_dim(x))


def output_projection(config: LineartimeConfig) -> nn.Linear:
    """A decoder's projection of features to scores."""
    width = config.output_dim or config.hidden_size
    projection = nn.Linear(width, config.vocab_size, bias=False)
    nn.init.normal_(projection.weight, std=width**-0.5)
    return projection


class Encoder(Stack):
    """A stack that sees whole sequences; called as transformers calls encoders."""

    main_input_name = "input_ids"

    def __init__(self, config: LineartimeConfig, encoder: bool = False) -> None:
        super().__init__(config, encoder=encoder)
        self.config = config

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> "EncoderOutput":
        """input_ids (B, n) and attention_mask (B, n), 1 at real tokens -> features (B, n, C) with their mask."""
        _refuse({"output_attentions": output_attentions})
        tokens = read_inputs(self.config, self, input_ids, attention_mask)
        x, features = super().forward(input_ids, tokens)
        return EncoderOutput.of(x, features if output_hidden_states else None, tokens)


@dataclass
class EncoderOutput(BaseModelOutput):
    """transformers' ``BaseModelOutput`` with ``attention_mask`` (B, n), 1 at real tokens; None if all are real."""

    attention_mask: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, hidden_states: tuple[Tensor, ...] | None, tokens: Tokens) -> "EncoderOutput":
        """Features ``x`` (B, n, C) of ``tokens``, and those of each layer."""
        mask = None if tokens.padding_mask is None else (~tokens.padding_mask).long()
        return cls(x, hidden_states=hidden_states, attention_mask=mask)


class MaskedHead(nn.Module):
    """RoBERTa's head of a masked model: features (..., C) -> scores (..., V)."""

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation_called("hidden_act", config.hidden_act)
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return F.linear(self.layer_norm(self.activation(self.dense(x))), self.weight) + self.bias


class RobertaEncoder(nn.Module):
    """An encoder and, in masked models, its head, under the names of fairseq's RoBERTa."""

    def __init__(self, config: LineartimeConfig, head: bool) -> None:
        super().__init__()
        for name in ("embedding_dim", "output_dim"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is {getattr(config, name)}; allowed for a model without a decoder: None")
        self.sentence_encoder = Encoder(config)
        self.lm_head = part(MaskedHead, config) if head else None
        for module in self.modules() if config.layer_norm_eps != 1e-5 else ():
            if isinstance(module, nn.LayerNorm):
                module.eps = config.layer_norm_eps


class _FeatureModel(LineartimePreTrainedModel):
    """The base of models that read features: of a language model if ``config.is_decoder``, else of an encoder."""

    def __init__(self, config: LineartimeConfig) -> None:
        if config.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder is True; allowed for {type(self).__name__}: False. get_encoder() of "
                "LineartimeForSeq2SeqLM returns a model of the features of its source"
            )
        super().__init__(config)
        if config.is_decoder:
            self.decoder = Stack(config, causal=True)
        else:
            self.encoder = RobertaEncoder(config, head=False)

    @property
    def token_embeddings(self) -> str:
        """See ``LineartimePreTrainedModel``."""
        return f"{'decoder' if self.config.is_decoder else 'encoder.sentence_encoder'}.embed_tokens"

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        hidden: bool,
        position_ids: Tensor | None = None,
        cache: LineartimeCache | None = None,
    ) -> EncoderOutput:
        """The features of the tokens with their mask, and those of each layer if ``hidden``."""
        if not self.config.is_decoder:
            _refuse({"position_ids": position_ids, CACHE_FIELD: cache})
            return self.encoder.sentence_encoder(input_ids, attention_mask, hidden)
        tokens = read_inputs(self.config, self.decoder, input_ids, attention_mask, position_ids, cache)
        x, features = self.decoder(input_ids, tokens, cache)
        return EncoderOutput.of(x, features if hidden else None, tokens)


class LineartimeModel(_FeatureModel):
    """A language model, masked model or classifier without its head."""

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LineartimeCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: LineartimeCache | None = None,
        **further: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """input_ids (B, n) -> ``last_hidden_state`` (B, n, C), the features that the head of the model reads.

        Arguments are those of ``LineartimeForCausalLM``; without ``config.is_decoder`` there are no positions and no
        cache.

        Raises:
            ValueError: as ``LineartimeForCausalLM``.
        """
        _refuse(further, packed=position_ids is not None)
        cache = _cache_of(cache, past_key_values, use_cache)
        hidden = _wants(output_hidden_states, self.config)
        read = self.read(input_ids, attention_mask, hidden, position_ids, cache)
        output = BaseModelOutputWithPast(
            read.last_hidden_state, hidden_states=read.hidden_states, **{CACHE_FIELD: cache}
        )
        return output if return_dict is not False else output.to_tuple()


class LineartimeForMaskedLM(LineartimePreTrainedModel):
    """A masked model: ``NAME_mlm`` of fairseq, whose head is RoBERTa's."""

    def has_one_table(self) -> bool:
        """See ``LineartimePreTrainedModel``: the head may have weights of its own."""
        return self.config.tie_word_embeddings

    token_embeddings = "encoder.sentence_encoder.embed_tokens"
    _tied_weights_keys = {"encoder.lm_head.weight": "encoder.sentence_encoder.embed_tokens.weight"}

    def __init__(self, config: LineartimeConfig) -> None:
        config.is_decoder = False
        super().__init__(config)
        self.encoder = RobertaEncoder(config, head=True)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **further: Any,
    ) -> MaskedLMOutput | tuple:
        """input_ids (B, n) -> ``logits`` (B, n, V), and ``loss`` for ``labels`` (B, n), of which -100 have none.

        ``attention_mask`` (B, n) is 1 at real tokens, which the padding token never is.

        Raises:
            ValueError: an input of a wrong shape, too long, or an argument that no model here reads.
        """
        _refuse(further)
        hidden = _wants(output_hidden_states, self.config)
        encoded = self.encoder.sentence_encoder(input_ids, attention_mask, hidden)
        logits = self.encoder.lm_head(encoded.last_hidden_state)
        loss = self.loss_of(logits, labels, num_items_in_batch)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if return_dict is not False else output.to_tuple()


class ClassifierHead(nn.Module):
    """RoBERTa's head, or with ``classifier_style`` arena that of the Long Range Arena: pooled features -> scores."""

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__()
        self.arena = config.classifier_style == "arena"
        inner_dim = config.classifier_dim or (config.intermediate_size if self.arena else config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, inner_dim)
        self.out_proj = nn.Linear(inner_dim, config.num_labels)
        self.activation = F.relu if self.arena else activation_called("classifier_act", config.classifier_act)
        self.dropout = nn.Dropout(0.0 if self.arena else config.classifier_dropout)
        labels = list((config.id2label or {}).values())
        named = {} if labels == [f"LABEL_{i}" for i in range(len(labels))] else {"labels": labels}
        self.remembered = StoredOptions(pooling=config.pooling, classifier_style=config.classifier_style, **named)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, C) -> (B, labels)."""
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(pooled)))))


class LineartimeForSequenceClassification(_FeatureModel):
    """A classifier of sequences: ``NAME_classifier`` of fairseq, with one head.

    With ``config.is_decoder`` the features are those of a language model, which fairseq does not have.
    """

    accepts_loss_kwargs = False  # transformers' Trainer would pass the number of labels of several batches

    def __init__(self, config: LineartimeConfig) -> None:
        whole = "last" if config.is_decoder else "first"  # which has seen all others
        config.pooling = whole if config.pooling is None else config.pooling
        check_choice("pooling", config.pooling, (whole, "mean"))
        super().__init__(config)
        self.classifier = part(ClassifierHead, config)
        self.register_load_state_dict_pre_hook(_rename_head)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, key_mapping: dict[str, str] | None = None, **options: Any) -> Any:
        """As transformers'; the head may have its name in fairseq, as in folders of earlier versions."""
        return super().from_pretrained(*arguments, key_mapping={FAIRSEQ_HEAD: HEAD, **(key_mapping or {})}, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **further: Any,
    ) -> SequenceClassifierOutput | tuple:
        """input_ids (B, n) -> ``logits`` (B, labels), and ``loss`` for ``labels`` (B,).

        ``attention_mask`` (B, n) is 1 at real tokens, which the padding token never is.

        Raises:
            ValueError: an input of a wrong shape, too long, or an argument that no model here reads.
        """
        _refuse(further)
        encoded = self.read(input_ids, attention_mask, _wants(output_hidden_states, self.config))
        pooled = self.pool(encoded.last_hidden_state, encoded.attention_mask)
        logits = self.classifier(pooled)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if return_dict is not False else output.to_tuple()

    def pool(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Features (B, n, C) of the first or last real token of each row, or their mean over real tokens: (B, C)."""
        real = torch.ones_like(features[..., 0], dtype=torch.bool) if attention_mask is None else attention_mask == 1
        if self.config.pooling == "mean":
            weights = real / real.sum(1, keepdim=True).clamp(min=1)
        else:
            counts = real.cumsum(1)
            place = counts[:, -1:] if self.config.pooling == "last" else 1
            weights = (real & (counts == place)).float()
        # Summed in float32: half precision would lose most of a mean over thousands of tokens.
        pooled = (weights[..., None] * features.float()).masked_fill(~real[..., None], 0.0).sum(1)
        return pooled.to(features.dtype)


class LineartimeForSeq2SeqLM(_DecoderModel):
    """An encoder-decoder: ``NAME`` of fairseq, such as ``flowformer``; targets begin with eos, as there."""

    token_embeddings = "encoder.embed_tokens"

    def __init__(self, config: LineartimeConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self._tied_weights_keys = {"decoder.output_projection.weight": "decoder.embed_tokens.weight"}
        if config.tie_encoder_embeddings:
            self._tied_weights_keys["encoder.embed_tokens.weight"] = "decoder.embed_tokens.weight"
        self.encoder = Encoder(config, encoder=True)
        if any("max_tokens" in ATTENTIONS[cross.kind].needs for cross in config.layers("cross_attention")):
            limits = (self.encoder.max_tokens, config.encoder_max_position_embeddings)
            self.encoder.max_tokens = min(limit for limit in limits if limit is not None)
        self.decoder = Decoder(config, crossed=True)
        self.post_init()

    def has_one_table(self) -> bool:
        """See ``LineartimePreTrainedModel``: each side may have a table of its own."""
        return self.config.tie_encoder_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """transformers' hook: labels (B, n) as the decoder reads them, after a first token that begins a target."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        cache: LineartimeCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: LineartimeCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **further: Any,
    ) -> Seq2SeqLMOutput | tuple:
        """A source (B, m) and a target so far (B, n) -> ``logits`` (B, n, V), and ``loss`` if ``labels`` are given.

        Args:
            input_ids, attention_mask: the source and its mask (B, m), 1 at real tokens.
            decoder_input_ids, decoder_attention_mask: the same of the target; with a cache, its next tokens. None: the
                labels after the token that begins a target.
            encoder_outputs: what the encoder returned for the source, in place of ``input_ids``.
            labels: (B, n), the target; -100 has no loss.
            further: cache, use_cache and the other arguments as in ``LineartimeForCausalLM``.

        Raises:
            ValueError: as ``LineartimeForCausalLM``.
        """
        _refuse(further)
        if decoder_input_ids is None and labels is None:
            raise ValueError(
                "decoder_input_ids and labels are None; allowed: one of them, the target so far, which generate begins"
            )
        hidden = _wants(output_hidden_states, self.config)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, hidden)
        source = self._source(encoder_outputs, attention_mask)
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        cache = _cache_of(cache, past_key_values, use_cache)
        tokens = read_inputs(self.config, self.decoder, decoder_input_ids, decoder_attention_mask, None, cache)
        x, features = self.decoder(decoder_input_ids, tokens, cache, source)
        logits = self.decoder.scores(_kept(x, logits_to_keep))
        targets = {} if labels is None else {"shift_labels": labels.contiguous()}  # they are shifted already
        output = Seq2SeqLMOutput(
            loss=self.loss_of(logits, labels, num_items_in_batch, **targets),
            logits=logits,
            decoder_hidden_states=features if hidden else None,
            encoder_last_hidden_state=source.features,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            **{CACHE_FIELD: cache},
        )
        return output if return_dict is not False else output.to_tuple()

    def _source(self, encoder_outputs: ModelOutput | tuple, attention_mask: Tensor | None) -> Source:
        """The encoder's output as layers read it; its own mask, or else ``attention_mask`` (B, m)."""
        own_mask = getattr(encoder_outputs, "attention_mask", None)
        mask = attention_mask if own_mask is None else own_mask
        return Source(encoder_outputs[0], None if mask is None else hidden_or_none(is_padding(mask)))


def _rename_head(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """torch's hook: give the head in ``state_dict`` its present name."""
    for name in [x for x in state_dict if x.startswith(prefix)]:
        state_dict[prefix + re.sub(FAIRSEQ_HEAD, HEAD, name[len(prefix) :])] = state_dict.pop(name)


def _refuse(arguments: dict[str, Any], packed: bool = False) -> None:
    """Raise ValueError for an argument of transformers' models that these do not read, unless it asks for nothing.

    ``packed`` says that positions are given, beside which a collator's other arguments mean nothing.
    """
    unread = _UNUSED | _PACKED if packed else _UNUSED
    for name, value in arguments.items():
        if name not in unread and value is not None and value is not False:
            raise ValueError(f"{name} is given; allowed for this model of lineartime: None, as it has no such thing")


def _cache_of(
    cache: LineartimeCache | None, past_key_values: LineartimeCache | None, use_cache: bool | None
) -> LineartimeCache | None:
    """The cache of a call, under either of its names; a new one if ``use_cache`` asks for it; None for none."""
    given = cache if past_key_values is None else past_key_values
    if given is None:
        return LineartimeCache() if use_cache else None
    if use_cache is False:
        raise ValueError("use_cache is False and a cache is given; allowed: one of the two")
    return check_cache(given)


def _kept(x: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last ``logits_to_keep`` tokens of x (B, n, C), those with these indices, or all for 0."""
    if isinstance(logits_to_keep, Tensor):
        return x[:, logits_to_keep]
    return x[:, -logits_to_keep:] if logits_to_keep else x


def _wants(output_hidden_states: bool | None, config: LineartimeConfig) -> bool:
    """Whether a call returns features of all layers; None for what the configuration says."""
    return bool(config.output_hidden_states if output_hidden_states is None else output_hidden_states)
