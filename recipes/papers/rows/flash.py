"""Masked models of C4, causal ones of Wiki-40B and PG-19: the tables of the FLASH paper but for TriviaQA's."""

from ..tables import PublishedTable
from ..trainings import HEADING, Block, Entry, NotTrained, Training, folder_name, loop, words

#: As the paper prints them -> architectures of 110 M parameters, with _KIND for _lm or _mlm.
MODELS = {
    "FLASH-Quad": "flash_quad_KIND_base",
    "FLASH": "flash_KIND_base",
    "Transformer+": "transformer_plus_KIND_base",
    "Transformer++": "transformer_pp_KIND_base",
    "TFM++": "transformer_pp_KIND_base",
    "MC-TFM++": "mc_transformer_pp_KIND_base",
    "Combiner": "combiner_KIND_base",
    "Performer": "performer_KIND_base",
}
#: The Transformer of Gehring's positions and fairseq's own layers, which no architecture of ours is.
_VANILLA = {
    "lm": words(
        "transformer_lm --decoder-normalize-before --share-decoder-input-output-embed --decoder-learned-pos",
        "--no-scale-embedding --activation-fn gelu --dropout 0 --decoder-layers 12 --decoder-embed-dim 768",
        "--decoder-input-dim 768 --decoder-output-dim 768 --decoder-ffn-embed-dim 3072 --decoder-attention-heads 12",
    ),
    "mlm": "softmax_mlm --encoder-learned-pos --dropout 0 --attention-dropout 0",
}
#: Of Tables 1 and 2; heads and widths are the decoder's or the encoder's, SIDE.
_MODIFICATIONS = {
    "original GAU": "flash_quad_KIND_w768",
    "relu² → softmax": "flash_quad_KIND_w768 --flash-kernel softmax",
    "single-head → multi-head": "flash_quad_KIND_w768 --SIDE-attention-heads 12",
    "no gating": "flash_quad_KIND_w768 --flash-no-gate --flash-separate-ffn",
    "original MHSA": "transformer_plus_KIND_w768",
    "softmax → relu²": "transformer_plus_KIND_w768 --flash-kernel relu2",
    "multi-head → single-head": "transformer_plus_KIND_w768 --SIDE-attention-heads 1",
    "add gating": "transformer_plus_KIND_w768 --flash-attention-gate --SIDE-ffn-embed-dim 2496",
}
_MODIFICATION_NOTES = {
    "single-head → multi-head": "the paper's number of heads is not stated",
    "no gating": "a feed-forward block of its own after each unit gives the published number of parameters",
    "add gating": "feed-forward blocks of 13/4 of the width give the published number of parameters, which is less "
    "than without the gate",
}
_LAYERS = {"MHSA+MLP": "transformer_plus", "MHSA+GLU": "transformer_pp", "GAU": "flash_quad"}
_DATA = {"wiki40b": "Wiki-40B, English", "pg19": "PG-19", "c4": "C4, 256 of 1,024 training files"}
_LENGTHS = (512, 1024, 2048, 4096, 8192)
OPTIMIZER = "--optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 --weight-decay 0.01 --clip-norm {}"
_TPU = "64 TPU-v4 cores"
_ONE_GPU = (("512", "4"), ("1024", "2"), ("2048", "1"), ("4096", "1"))
#: A hyper-parameter of Tables 6 and 7 -> what sets it here.
_SETTINGS = {
    "Data": "`python -m recipes.flash.prepare c4`, `wiki40b` or `pg19`",
    "Sequence length": "`--tokens-per-sample`",
    "Tokens per batch": "2^18 here: 8 GPUs x `--max-tokens 8192 --update-freq 4`",
    "Batch size": "2^18 / length here",
    "Number of steps": "`--max-update 125000 --total-num-update 125000`",
    "Warmup steps": "`--warmup-updates 10000`",
    "Peak learning rate": "`--lr 0.0007`",
    "Learning rate decay": "`--lr-scheduler polynomial_decay --end-learning-rate 0`",
    "Optimizer": "`--optimizer adam`, which decouples weight decay",
    "Weight decay": "`--weight-decay 0.01`",
    "Local gradient clipping*": "`--clip-norm 0.1`, of the average of all workers; `0` for the Transformer",
    "Chunk size": "`--flash-chunk-size`, set by the architecture; Combiner `--flash-row-length`",
    "Hidden dropout": "`--dropout 0`, the default",
    "GELU dropout": "`--activation-dropout 0`, the default",
    "Attention dropout (if applicable)": "`--attention-dropout 0`, the default",
}


def training(
    model: str,
    corpus: str,
    lengths: tuple[int, ...] = _LENGTHS,
    published: str = "",
    hardware: str = _TPU,
    note: str = "",
) -> Training:
    """The paper's training of ``model``, an architecture with options, at each of ``lengths``."""
    masked = corpus == "c4"
    name = model.split()[0]
    vanilla = name in ("transformer_lm", "softmax_mlm")
    task = "masked_lm --criterion masked_lm" if masked else "language_modeling"
    data = f"work/flash/{corpus}/data-bin --user-dir fairseq_plugin --task {task}"
    save = f"checkpoints/{corpus}/{name if vanilla else folder_name(model)}.$n"
    train = words(
        f"fairseq-train {data} --arch {model} --tokens-per-sample $n --sample-break-mode none",
        "--max-tokens 8192 --update-freq 4 --max-update 125000",
        OPTIMIZER.format("0" if vanilla else "0.1"),
        "--lr 0.0007 --lr-scheduler polynomial_decay --warmup-updates 10000 --total-num-update 125000",
        f"--end-learning-rate 0 --save-dir {save}",
    )
    if masked:
        evaluate = f"fairseq-validate {data} --path {save}/checkpoint_best.pt --max-tokens 8192"
    else:
        evaluate = words(
            f"fairseq-eval-lm {data.partition(' --task')[0]} --path {save}/checkpoint_best.pt",
            "--tokens-per-sample $n --sample-break-mode none --max-tokens 8192",
        )
    settings = {
        "task": f"{task.split()[0]}, {min(lengths):,} to {max(lengths):,} tokens",
        "data": _DATA[corpus],
        "schedule": "125,000 updates, 10,000 of them warm-up to 0.0007, then linearly to 0",
        "batch": "2^18 tokens: 8 GPUs x 8192 x 4; the paper's is not legible",
    }
    blocks = (
        Block("data", (f"python -m recipes.flash.prepare {corpus}",)),
        Block("training on 8 GPUs, and evaluation", (train, evaluate), (loop("n", lengths),)),
    )
    millions = float(published) if published else None
    return Training("fairseq", model, settings, hardware, blocks, millions, symbols=32000, note=note)


def architecture(printed: str, kind: str, size: str = "base") -> str:
    """The architecture of a model as the paper calls it; ``kind`` is "lm" or "mlm"."""
    if printed == "Transformer":
        return _VANILLA[kind]
    return MODELS[printed].replace("KIND", kind).replace("base", size)


def modified(row: str, published: str) -> tuple[Training, ...]:
    """A row of Tables 1 and 2: the causal model and the masked one, at 512 tokens."""
    note = _MODIFICATION_NOTES.get(row, "")

    def one(kind: str, side: str, corpus: str) -> Training:
        model = _MODIFICATIONS[row].replace("KIND", kind).replace("SIDE", side)
        return training(model, corpus, (512,), published, note=note)

    return one("lm", "decoder", "wiki40b"), one("mlm", "encoder", "c4")


def books(row: str) -> Training:
    """A row of Table 3."""
    return training(architecture(row, "lm", "large"), "pg19", _LENGTHS[1:])


def approximated(row: str) -> Entry:
    """A row of Table 5: both models of the difference."""
    names, _, task = row.partition(", ")
    if not task:
        return HEADING
    kind, corpus = ("mlm", "c4") if task.startswith("MLM") else ("lm", "wiki40b")
    return tuple(training(architecture(name, kind), corpus) for name in names.split(" → "))


def specified(table: PublishedTable, kind: str, corpus: str, size: str = "base") -> dict[str, Entry]:
    """The columns of Tables 8, 9 and 10, with the parameters of their last row."""
    lengths = _LENGTHS[1:] if corpus == "pg19" else _LENGTHS
    millions = dict(zip(table.header, table.row("Params (M)").cells))
    names = table.header[1:]
    return {name: training(architecture(name, kind, size), corpus, lengths, millions[name]) for name in names}


def setting(row: str) -> NotTrained:
    """A row of Tables 6 and 7."""
    adam = {"epsilon": "--adam-eps 1e-06", "betas": "--adam-betas '(0.9, 0.999)'"}
    for name, option in adam.items():
        if name in row:
            return NotTrained(f"`{option}`")
    return NotTrained(_SETTINGS[row])


def timed(row: str) -> Training:
    """A row of Table 11: a hundred updates on one GPU, whose log says how many tokens a second are trained on."""
    model = {
        "Transformer++": "transformer_pp_lm_base",
        "Performer": "performer_lm_base --flash-cumulative-sum scan",
        "Performer-Matmul": "performer_lm_base --flash-cumulative-sum matmul",
        "FLASH": "flash_lm_base",
    }[row]
    train = words(
        f"fairseq-train work/flash/wiki40b/data-bin --user-dir fairseq_plugin --task language_modeling --arch {model}",
        "--tokens-per-sample {} --sample-break-mode none --batch-size {} --max-update 100 --no-save",
        "--disable-validation",
        OPTIMIZER.format("0.1"),
        "--lr 0.0007 --log-format json --log-interval 10",
    )
    commands = tuple(train.format(length, batch) for length, batch in _ONE_GPU)
    settings = {"task": "causal training, 512 to 4,096 tokens", "data": _DATA["wiki40b"], "batch": "4, 2, 1, 1"}
    blocks = (
        Block("data", ("python -m recipes.flash.prepare wiki40b",)),
        Block("on one GPU: tokens of a step, over wps of the log, are its seconds", commands),
    )
    return Training("fairseq", model, settings, "one NVIDIA V100", blocks, symbols=32000)


def sped_up(row: str) -> tuple[Training, ...]:
    """A row of the table beside Figure 1: what is compared at that length."""
    names = ("Transformer", "Transformer++", "FLASH")
    return tuple(training(architecture(name, "lm"), "wiki40b", (int(row),)) for name in names)


def sized(row: str, table: PublishedTable) -> Training:
    """A row of the table beside Figure 3."""
    layer, *_, width = table.row(row).cells
    return training(f"{_LAYERS[layer]}_lm_w{width}", "wiki40b", (512,))


def masked(row: str) -> Training:
    """A row of Table 12."""
    return training(architecture(row, "mlm"), "c4")


def causal(row: str) -> Training:
    """A row of Table 13."""
    return training(architecture(row, "lm"), "wiki40b")
