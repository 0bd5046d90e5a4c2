"""WikiText-103: Table 4 of the Flowformer paper."""

from ..tables import short
from ..trainings import Block, Training, folder_name, words

_MODELS = {
    "TRANSFORMER": "softmax_lm_wiki103",
    "LINEAR TRANS": "linear_lm_wiki103",
    "REFORMER": "reformer_lm_wiki103",
    "PERFORMER": "favor_lm_wiki103",
    "TRF-TRANSFORMER": "rfa_lm_wiki103",
    "TRF-TRANSFORMER-GATE": "rfa_gate_lm_wiki103",
    "COSFORMER": "cosformer_lm_wiki103",
    "FLOWFORMER W/O COMPETITION": "flowformer_lm_wiki103 --flow-competition none",
    "FLOWFORMER W/O ALLOCATION": "flowformer_lm_wiki103 --flow-allocation none",
    "FLOWFORMER": "flowformer_lm_wiki103",
}


def trained(row: str) -> Training:
    """A row of Table 4."""
    model = _MODELS[short(row)]
    save = f"checkpoints/wikitext103/{folder_name(model)}"
    train = words(
        "fairseq-train work/wikitext103/data-bin --user-dir fairseq_plugin --task language_modeling",
        f"--arch {model} --save-dir {save} --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01",
        "--clip-norm 0.0 --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 6000 --warmup-init-lr 1e-07",
        "--tokens-per-sample 512 --sample-break-mode none --max-tokens 2048 --update-freq 16 --max-update 150000",
    )
    evaluate = words(
        f"fairseq-eval-lm work/wikitext103/data-bin --user-dir fairseq_plugin --path {save}/checkpoint_best.pt",
        "--batch-size 2 --tokens-per-sample 512 --context-window 400",
    )
    settings = {
        "task": "language_modeling, causal, 512 tokens",
        "data": "WikiText-103, 267,744 words",
        "schedule": "150,000 updates, 6,000 of them warm-up to 0.001, then 1/sqrt(update)",
        "batch": "131,072 tokens: 4 GPUs x 2048 x 16",
    }
    blocks = (
        Block("data", ("python -m recipes.wikitext103.prepare",)),
        Block("training on 4 GPUs, and evaluation", (train, evaluate)),
    )
    return Training("fairseq", model, settings, "4 TITAN RTX 24 GB", blocks, symbols=267744)
