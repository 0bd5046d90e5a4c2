"""The attention of public packages, each called with the mask that its own models pass.

Output projections are removed. ``package`` is the module that ``Peer.module`` names, the only one that is imported.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .measure import CHANNELS, HEADS, TOKENS, WIDTH, Attend, merged, projected


class Missing(Exception):
    """A package cannot be measured; the message says why."""


class Peer(NamedTuple):
    """A public version of ``mechanism``: its package on PyPI, and the ``module`` with the attention."""

    mechanism: str
    package: str
    module: str
    attend: Callable[[ModuleType, Tensor, Tensor | None, bool], Tensor]
    forms: tuple[bool, ...] = (False,)  # the values of ``causal`` to measure
    note: str = ""

    @property
    def title(self) -> str:
        """The package's name, with its version if it is installed."""
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return self.package

    def load(self) -> Attend:
        """Import the package and return its attention.

        Raises:
            Missing: the package is not installed, or its import fails.
        """
        try:
            return partial(self.attend, import_module(self.module))
        except ModuleNotFoundError as error:
            if error.name == self.module.split(".")[0]:
                raise Missing("not installed") from error
            raise Missing(f"import fails: {error}") from error
        except (ImportError, OSError, RuntimeError) as error:
            raise Missing(f"import fails: {str(error).splitlines()[0]}") from error


def performer(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``SelfAttention`` of performer-pytorch, with 256 random features as in this project."""
    layer = package.SelfAttention(WIDTH, heads=HEADS, dim_head=CHANNELS, causal=causal, nb_features=256).eval()
    layer.to_out = nn.Identity()
    return layer(x, mask=_real(padding))


def local(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool, exact: bool = False) -> Tensor:
    """``LocalAttention`` of local-attention, with windows of 48."""
    layer = package.LocalAttention(48, causal=causal, exact_windowsize=exact, autopad=True)
    heads = projected(x, "qkv")
    return merged(layer(**heads, mask=_real(padding)))


def longformer(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``LongformerSelfAttention`` of transformers, with a window of 32 and the first real token global."""
    config = package.LongformerConfig(attention_window=[32], hidden_size=WIDTH, num_attention_heads=HEADS)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool) if padding is None else padding
    first = ((~padding).cumsum(1) == 1) & ~padding
    mask = torch.zeros(x.shape[:2]).masked_fill(padding, torch.finfo(x.dtype).min).masked_fill(first, 1e4)
    masks = {"is_index_masked": padding, "is_index_global_attn": first, "is_global_attn": True}
    return package.LongformerSelfAttention(config, 0).eval()(x, attention_mask=mask, **masks)[0]


def bigbird(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``BigBirdBlockSparseAttention`` of transformers, with blocks of 16 and three random ones."""
    config = package.BigBirdConfig(hidden_size=WIDTH, num_attention_heads=HEADS, block_size=16, num_random_blocks=3)
    real = torch.ones(x.shape[:2]) if padding is None else (~padding).float()
    blocked, band, rows, columns = package.BigBirdModel.create_masks_for_block_sparse_attn(real, 16)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    layer = package.BigBirdBlockSparseAttention(config).eval()
    return layer(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)[0]


def nystromformer(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``NystromformerSelfAttention`` of transformers, with 16 landmarks, built for the length of ``x``."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_landmarks": 16, "conv_kernel_size": 35}
    layer = package.NystromformerSelfAttention(
        package.NystromformerConfig(**sizes, segment_means_seq_len=x.shape[1])
    ).eval()
    mask = None if padding is None else torch.where(padding, torch.finfo(x.dtype).min, 0.0)[:, None, None]
    return layer(x, mask)[0]


def nystrom_attention(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``NystromAttention`` of nystrom-attention, with 16 landmarks."""
    sizes = {"dim_head": CHANNELS, "heads": HEADS, "num_landmarks": 16, "residual_conv_kernel": 35}
    layer = package.NystromAttention(WIDTH, **sizes).eval()
    layer.to_out = nn.Identity()
    return layer(x, mask=_real(padding))


def linformer(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``LinformerSelfAttention`` of linformer, with a projected length of 32; it accepts no mask."""
    layer = package.LinformerSelfAttention(WIDTH, seq_len=TOKENS, k=32, heads=HEADS).eval()
    layer.to_out = nn.Identity()
    return layer(x)


def reformer(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``LSHSelfAttention`` of transformers, with 16 buckets, chunks of 16 and four rounds."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_head_size": CHANNELS}
    hashing = {"num_buckets": 16, "num_hashes": 4, "lsh_attn_chunk_length": 16, "hash_seed": 0}
    config = package.ReformerConfig(**sizes, **hashing, is_decoder=causal, lsh_num_chunks_after=int(not causal))
    mask = None if padding is None else ~padding
    return package.LSHSelfAttention(config, 0).eval()(x, attention_mask=mask).hidden_states


def reformer_pytorch(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``LSHSelfAttention`` of reformer-pytorch, with buckets of 16 tokens and four rounds."""
    layer = package.LSHSelfAttention(WIDTH, heads=HEADS, bucket_size=16, n_hashes=4, causal=causal).eval()
    layer.to_out = nn.Identity()
    return layer(x, input_mask=_real(padding))


def yoso(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``YosoSelfAttention`` of transformers in expectation, with a mask of ones and zeros, as ``YosoModel`` has."""
    config = package.YosoConfig(hidden_size=WIDTH, num_attention_heads=HEADS, use_expectation=True)
    mask = torch.ones(x.shape[:2]) if padding is None else (~padding).float()
    return package.YosoSelfAttention(config).eval()(x, mask)[0]


def sinkhorn(package: ModuleType, x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    """``SinkhornSelfAttention`` of sinkhorn-transformer, with buckets of 16 tokens."""
    layer = package.SinkhornSelfAttention(WIDTH, 16, TOKENS, heads=HEADS, causal=causal).eval()
    layer.to_out = nn.Identity()
    return layer(x, input_mask=_real(padding))


def _real(padding: Tensor | None) -> Tensor | None:
    """The mask of most packages: True for real tokens."""
    return None if padding is None else ~padding


_BOTH = (False, True)
_MODELS = "transformers.models"
#: Grouped by mechanism; a note explains the numbers.
PEERS = (
    Peer(
        "favor",
        "performer-pytorch",
        "performer_pytorch",
        performer,
        _BOTH,
        "it masks values alone; all keys share one maximum",
    ),
    Peer("local", "local-attention", "local_attention", local, _BOTH, "windows are buckets of the padded sequence"),
    Peer("local", "local-attention", "local_attention", partial(local, exact=True), _BOTH, "`exact_windowsize=True`"),
    Peer("longformer", "transformers", f"{_MODELS}.longformer.modeling_longformer", longformer),
    Peer(
        "bigbird",
        "transformers",
        f"{_MODELS}.big_bird.modeling_big_bird",
        bigbird,
        note="first and last block are those of the padded sequence",
    ),
    Peer(
        "nystrom",
        "transformers",
        f"{_MODELS}.nystromformer.modeling_nystromformer",
        nystromformer,
        note="padding is part of landmarks and of the convolution",
    ),
    Peer(
        "nystrom",
        "nystrom-attention",
        "nystrom_attention",
        nystrom_attention,
        note="landmarks are those of the padded sequence",
    ),
    Peer("linformer", "linformer", "linformer", linformer, note="it takes no mask"),
    Peer(
        "reformer",
        "transformers",
        f"{_MODELS}.reformer.modeling_reformer",
        reformer,
        _BOTH,
        "padding and later tokens move the chunks",
    ),
    Peer(
        "reformer",
        "reformer-pytorch",
        "reformer_pytorch.reformer_pytorch",
        reformer_pytorch,
        _BOTH,
        "the same, and another length draws other rotations",
    ),
    Peer("yoso", "transformers", f"{_MODELS}.yoso.modeling_yoso", yoso, note="its model's mask has no effect"),
    Peer(
        "sinkhorn",
        "sinkhorn-transformer",
        "sinkhorn_transformer.sinkhorn_transformer",
        sinkhorn,
        _BOTH,
        "padding is part of what chunks are sorted by",
    ),
)
