"""Language modeling whose generation reads a prompt in one pass: ``--task prompted_language_modeling``."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.utils import safe_getattr

from ..prompt_sequence_generator import BLOCK_SIZE, PromptGenerator


@dataclass
class PromptedLanguageModelingConfig(LanguageModelingConfig):
    """Options of ``language_modeling``, and how a prompt is read."""

    prompt_block_size: int = field(
        default=BLOCK_SIZE,
        metadata={"help": "tokens of a prompt that are read at once; it changes speed and memory, never a result"},
    )


@register_task("prompted_language_modeling", dataclass=PromptedLanguageModelingConfig)
class PromptedLanguageModelingTask(LanguageModelingTask):
    """``language_modeling``, but that generation reads the prompt in one forward pass; see ``PromptGenerator``.

    For language models of this plugin and ``transformer_lm``, whatever task they were trained with.
    """

    @classmethod
    def of(cls, task: LanguageModelingTask) -> "PromptedLanguageModelingTask":
        """The same for the ``task`` of a model that was loaded in Python: its options, dictionaries and targets."""
        return cls(task.args, task.dictionary, task.output_dictionary, task.targets)

    def build_generator(
        self,
        models,
        args,
        seq_gen_cls=None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn=None,
    ):
        """fairseq's, with ``PromptGenerator``; its scorer with ``--score-reference``.

        Raises:
            ValueError: an option that needs each token of a prompt to be a step of its own, or a model that cannot read
                many tokens at once.
        """
        if safe_getattr(args, "score_reference", False):
            return super().build_generator(models, args, seq_gen_cls, extra_gen_cls_kwargs, prefix_allowed_tokens_fn)
        given = {
            "--print-alignment": safe_getattr(args, "print_alignment", None),
            "--match-source-len": safe_getattr(args, "match_source_len", False),
            "--lm-path": (extra_gen_cls_kwargs or {}).get("lm_model"),
        }
        for flag, value in given.items():
            if value:
                raise ValueError(f"{flag} is given; allowed with --task prompted_language_modeling: not given")
        block_size = safe_getattr(self.args, "prompt_block_size", BLOCK_SIZE)
        build = partial(seq_gen_cls or PromptGenerator, block_size=block_size)
        return super().build_generator(models, args, build, extra_gen_cls_kwargs, prefix_allowed_tokens_fn)
