"""Pixels of CIFAR-10 and characters of Enwik8: Tables 4 and 5 of the DAFT paper."""

from ..trainings import Block, Entry, NotTrained, Training, words

_HARDWARE = "8 NVIDIA V100"
_WARMUP = "--lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07"
_SCHEDULE = "100 epochs; warm-up of 4,000 updates to 0.001, then 1/sqrt(update), as Vaswani et al.; dropout 0.1"
_PIXELS = {
    "Sparse Transformer strided": "sparse_lm_cifar10",
    "Image Transformer local2d": "local_lm_cifar10",
    "Transformer": "softmax_lm_cifar10",
    "Synthesizer": "synthesizer_lm_cifar10",
    "Reformer": "reformer_lm_cifar10",
    "DAFT-full": "daft_full_lm_cifar10",
    "DAFT-conv-256": "daft_conv_lm_cifar10",
}
_PIXEL_NOTES = {
    "Sparse Transformer strided": "cited; its queries and keys have half the width, 59 M parameters, ours the whole",
    "Image Transformer local2d": "the paper's has windows in two dimensions, ours has one-dimensional ones",
}
_CITED = {
    "PixelCNN": "cited; a convolutional network, which neither host has",
    "PixelSNAIL": "cited; convolutions with attention, which neither host has",
}
_CHARACTERS = {
    "Transformer": "softmax_lm_enwik8",
    "Reformer": "reformer_lm_enwik8",
    "Synthesizer": "synthesizer_lm_enwik8",
    "Linear Transformer": "linear_lm_enwik8",
    "Performer": "favor_lm_enwik8",
    "DAFT-full": "daft_full_lm_enwik8",
    "DAFT-conv-64": "daft_conv_lm_enwik8",
}


def pixels(row: str) -> Entry:
    """A row of Table 4."""
    if row in _CITED:
        return NotTrained(_CITED[row])
    model = _PIXELS[row]
    data = "work/cifar10_pixels/data-bin --user-dir fairseq_plugin --task pixel_modeling --tokens-per-sample 3072"
    train = words(
        f"fairseq-train {data} --arch {model} --save-dir checkpoints/{model}",
        "--optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.1 --lineartime-decay-linear-only",
        f"--clip-norm 0.0 {_WARMUP} --batch-size 4 --required-batch-size-multiple 1 --max-epoch 100",
    )
    evaluate = f"fairseq-eval-lm {data} --path checkpoints/{model}/checkpoint_best.pt --batch-size 8"
    settings = {
        "task": "pixel_modeling, causal, 3,072 subpixels",
        "data": "CIFAR-10, flipped and shifted",
        "schedule": f"{_SCHEDULE}; weight decay 0.1 on linear weights",
        "batch": "32 images: 8 GPUs x 4",
    }
    blocks = (
        Block("data", ("python -m recipes.cifar10_pixels.prepare",)),
        Block("training on 8 GPUs, and evaluation", (train, evaluate)),
    )
    note = _PIXEL_NOTES.get(row, "")
    return Training("fairseq", model, settings, _HARDWARE, blocks, symbols=4 + 256, note=note)


def characters(row: str) -> Training:
    """A row of Table 5."""
    model = _CHARACTERS[row]
    lengths = "--tokens-per-sample 1024 --sample-break-mode none --max-tokens 16384"
    train = words(
        "fairseq-train work/enwik8/data-bin --user-dir fairseq_plugin --task language_modeling",
        f"--arch {model} --save-dir checkpoints/{model}",
        "--optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.5 --lineartime-decay-linear-only",
        f"--clip-norm 0.0 {_WARMUP} {lengths} --max-epoch 100",
    )
    evaluate = words(
        "fairseq-eval-lm work/enwik8/data-bin --user-dir fairseq_plugin",
        f"--path checkpoints/{model}/checkpoint_best.pt {lengths}",
    )
    settings = {
        "task": "language_modeling, causal, 1,024 bytes",
        "data": "Enwik8",
        "schedule": f"{_SCHEDULE}; weight decay 0.5 on linear weights",
        "batch": "128 sequences: 8 GPUs x 16",
    }
    blocks = (
        Block("data", ("python -m recipes.enwik8.prepare",)),
        Block("training on 8 GPUs, and evaluation", (train, evaluate)),
    )
    return Training("fairseq", model, settings, _HARDWARE, blocks, symbols=4 + 255)
