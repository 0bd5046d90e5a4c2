"""Language modeling with generation that reads a prompt in one pass: ``--task prompted_language_modeling``."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.utils import safe_getattr

from ..generation.prompt_sequence_generator import BLOCK_SIZE, PromptGenerator
from ..generation.prompt_state import PromptState
from ..loading.known_options import option_field


@dataclass
class PromptedLanguageModelingConfig(LanguageModelingConfig):
    """Options of ``language_modeling`` and of reading a prompt."""

    prompt_block_size: int = option_field(
        BLOCK_SIZE, "tokens of a prompt that are read at once; it changes speed and memory, never a result"
    )
    load_state: Optional[str] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None,
        "file that --save-state wrote, of the same models: its text stands before every prompt, and is not read again",
    )
    save_state: Optional[str] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None, "new file for the state after the prompt, of which there must be one"
    )


@register_task("prompted_language_modeling", dataclass=PromptedLanguageModelingConfig)
class PromptedLanguageModelingTask(LanguageModelingTask):
    """``language_modeling`` with generation that reads the prompt in one forward pass; see ``PromptGenerator``.

    For language models of this plugin and ``transformer_lm``, trained with any task.
    """

    #: The state after a text that precedes every prompt; replaces ``--load-state``.
    after: PromptState | None = None

    @classmethod
    def of(cls, task: LanguageModelingTask, after: PromptState | None = None) -> "PromptedLanguageModelingTask":
        """Make this task from the ``task`` of a model loaded in Python, with its options, dictionaries and targets.

        ``after`` is the state after a text that precedes every prompt.
        """
        prompted = cls(task.args, task.dictionary, task.output_dictionary, task.targets)
        prompted.after = after
        return prompted

    def build_generator(
        self,
        models,
        args,
        seq_gen_cls=None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn=None,
    ):
        """As fairseq's, with ``PromptGenerator``; fairseq's scorer with ``--score-reference``.

        Raises:
            ValueError: an option needs a step for each token of a prompt, a model cannot read many tokens at once, the
                file of ``--load-state`` does not fit, or that of ``--save-state`` exists.
        """
        if safe_getattr(args, "score_reference", False):
            return super().build_generator(models, args, seq_gen_cls, extra_gen_cls_kwargs, prefix_allowed_tokens_fn)
        unsupported = {
            "--print-alignment": safe_getattr(args, "print_alignment", None),
            "--match-source-len": safe_getattr(args, "match_source_len", False),
            "--constraints": safe_getattr(args, "constraints", None),
            "--lm-path": (extra_gen_cls_kwargs or {}).get("lm_model"),
        }
        for flag, value in unsupported.items():
            if value:
                raise ValueError(f"{flag} is given; allowed with --task prompted_language_modeling: not given")
        block_size = safe_getattr(self.args, "prompt_block_size", BLOCK_SIZE)
        load_from, save_to = (safe_getattr(self.args, name, None) for name in ("load_state", "save_state"))
        after = self.after
        if after is None and load_from is not None:
            after = PromptState.load(load_from, models, self.target_dictionary, "--load-state")
        build = partial(seq_gen_cls or PromptGenerator, block_size=block_size, after=after, save_to=save_to)
        return super().build_generator(models, args, build, extra_gen_cls_kwargs, prefix_allowed_tokens_fn)
