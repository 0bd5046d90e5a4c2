"""Train encoder-decoders with every cross-attention: ``python -m recipes.translation.compare``.

A model is called NAME/CROSS: the attention of encoder and decoder, and that of the decoder to the encoder, such as
flow/linear; flow+forget/linear has sums that forget in the decoder; ``transformer`` is fairseq's own. ``--data copy
--file FILE`` copies marked passages of a text. ``--speed`` only times translations by the length of the source.
"""

import argparse
import itertools
import re
from pathlib import Path

import pandas as pd
import sacrebleu
import sentencepiece
import torch
from fairseq import tasks
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from matplotlib import pyplot as plt

from common.attention import ATTENTIONS
from fairseq_plugin import LinearTimeTransformer

from .. import runs
from ..models import addition_arguments, model_options, notes, option_prefix, with_additions
from ..runs import Run, fairseq, spread
from . import data

STOCK = "transformer"
NAMES = [name for name in ATTENTIONS if issubclass(ARCH_MODEL_REGISTRY.get(name, object), LinearTimeTransformer)]
CROSS = ("softmax", *(name for name, kind in ATTENTIONS.items() if "source" in kind.supports))
MODELS = {
    "messages": [STOCK, *(f"flow/{cross}" for cross in CROSS)],
    "copy": f"{STOCK} flow/softmax flow/linear flow/cosformer flow/flow_source linear/softmax linear/linear "
    "cosformer/cosformer".split(),
}
SIZES = {
    "messages": {"updates": 3_000, "width": 128, "layers": 2},
    "copy": {"updates": 4_000, "width": 64, "layers": 1},
}
#: Subwords of a translation that is timed, </s> included.
STEPS = 32


def model(name: str) -> str:
    """The type of ``--models``."""
    decoder, slash, cross = name.partition("/")
    if name != STOCK and not (slash and cross in CROSS and decoder in itertools.chain(*map(with_additions, NAMES))):
        raise argparse.ArgumentTypeError(
            f"{name}; allowed: {STOCK}, and NAME/CROSS with NAME of {', '.join(NAMES)}, perhaps with +forget or "
            f"+short_conv where it has these, and CROSS of {', '.join(CROSS)}"
        )
    return name


def model_arguments(options: argparse.Namespace, name: str) -> list[object]:
    """The task and the model; an encoder of ``layers`` layers and a decoder of as many."""
    decoder, _, cross = name.partition("/")
    attention = decoder.partition("+")[0]
    source, target = options.languages
    arguments = ["--task", "translation", "--source-lang", source, "--target-lang", target, "--arch", attention]
    if name != STOCK:
        arguments += ["--lineartime-cross-attention", cross, *addition_arguments(decoder, option_prefix(attention))]
    for side in ("encoder", "decoder"):
        arguments += [f"--{side}-layers", options.layers, f"--{side}-attention-heads", options.heads]
        arguments += [f"--{side}-embed-dim", options.width, f"--{side}-ffn-embed-dim", 2 * options.width]
        arguments += [f"--{side}-normalize-before"]
    # A short training repeats little, so it needs no dropout.
    return [*arguments, *longest(options), *"--share-all-embeddings --dropout 0.0".split()]


def longest(options: argparse.Namespace) -> list[object]:
    """The longest source and target with </s>, for training and generation; no message is beyond fairseq's default."""
    if options.data == "messages":
        return []
    target = options.spans * options.span_tokens
    return ["--max-source-positions", options.source_tokens + 1, "--max-target-positions", target + 1]


def plan(options: argparse.Namespace, name: str, seed: int) -> Run:
    """A training, and the generation of the test split by the checkpoint that is best on valid."""
    messages = options.data == "messages"
    evaluations = 4 if messages else 10
    interval = max(1, options.updates // evaluations)
    command = fairseq(
        *("train", options.out / "data" / "data-bin", *model_arguments(options, name), "--seed", seed),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0, "--lr", options.lr),
        *("--lr-scheduler", "cosine", "--warmup-updates", max(1, options.updates // 16)),
        *("--max-update", options.updates, "--criterion", "label_smoothed_cross_entropy", "--report-accuracy"),
        *("--label-smoothing", 0.1 if messages else 0.0),
        *(["--max-tokens", options.batch_tokens] if messages else ["--batch-size", options.batch_size]),
        *(*runs.evaluated_every(interval), "--log-interval", max(1, interval // 4)),
    )
    # Messages in batches of similar lengths; one source to copy at a time, and no target longer than the right one.
    sizes = [64, "--max-len-a", 1.5, "--max-len-b", 10] if messages else [1, "--max-len-a", 0, "--max-len-b"]
    sizes += [] if messages else [options.spans * options.span_tokens]
    then = fairseq(
        *("generate", options.out / "data" / "data-bin", "--path", "{folder}/checkpoints/checkpoint_best.pt"),
        *("--gen-subset", "test", "--beam", options.beam, "--batch-size", *sizes, *longest(options)),
    )
    return Run(name, seed, command, then)


def generated(log: Path) -> tuple[list[tuple[str, str]], float]:
    """The target and the best hypothesis of each source in fairseq-generate's log, and the milliseconds of one."""
    text = log.read_text(encoding="utf-8")
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", text, re.MULTILINE))
    first = dict(reversed(re.findall(r"^H-(\d+)\t\S+\t(.*)$", text, re.MULTILINE)))  # a source's best comes first
    seconds = float(re.findall(r"Translated [\d,]+ sentences .* in ([\d.]+)s", text)[-1])
    return [(targets[i], first[i]) for i in sorted(targets, key=int)], 1000 * seconds / len(targets)


def read(options: argparse.Namespace, folder: Path) -> dict:
    """The results of a complete training."""
    logged = runs.points(folder / "train.log")
    valid = logged[logged.split == "valid"]
    pairs, milliseconds = generated(folder / "then.log")
    return {
        "next": valid.loc[valid.loss.idxmin()].accuracy,
        "curve": dict(zip(valid.num_updates, valid.accuracy)),
        **(bleu if options.data == "messages" else copied)(options, pairs),
        "milliseconds": milliseconds,
        "update": 1000 / logged[logged.split == "train_inner"].ups.median(),
        "parameters": runs.parameters(folder / "train.log"),
    }


def bleu(options: argparse.Namespace, pairs: list[tuple[str, str]]) -> dict:
    """sacrebleu's scores of decoded hypotheses; the references are the messages, which subwords do not always spell."""
    folder = options.out / "data"
    subwords = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    references = data.lines(folder / "text" / f"test.{options.target}")
    hypotheses = [subwords.decode(hypothesis.split()) for _, hypothesis in pairs]
    scores = (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf)
    return dict(zip(("BLEU", "chrF"), (score(hypotheses, [references]).score for score in scores)))


def copied(options: argparse.Namespace, pairs: list[tuple[str, str]]) -> dict:
    """The shares of targets, of passages and of characters in their places that are right, in per cent."""
    split = [(target.split(), hypothesis.split()) for target, hypothesis in pairs]
    right = [[a == b for a, b in itertools.zip_longest(x, y[: len(x)])] for x, y in split]
    passages = [
        all(hits[i : i + options.span_tokens]) for hits in right for i in range(0, len(hits), options.span_tokens)
    ]
    shares = {"exact": [x == y for x, y in split], "passages": passages, "tokens": sum(right, [])}
    return {name: 100 * sum(hits) / len(hits) for name, hits in shares.items()}


def translating(options: argparse.Namespace, name: str, length: int):
    """A function that generates ``STEPS`` subwords from ``length`` random ones, by a model with new weights."""
    positions = max(length, STEPS) + 1
    arguments = [options.out / "data" / "data-bin", *model_arguments(options, name)]
    arguments += ["--max-source-positions", positions, "--max-target-positions", positions]  # the last value counts
    parsed = model_options(arguments)
    task = tasks.setup_task(parsed)
    torch.manual_seed(1)
    network = task.build_model(parsed).eval()
    network.make_generation_fast_(need_attn=False)  # as fairseq-generate does
    words = task.target_dictionary
    # No hypothesis ends before the last step, and all end there.
    ending = {"max_len_a": 0, "max_len_b": STEPS - 1, "min_len": STEPS - 1}
    generator = SequenceGenerator([network], words, beam_size=options.beam, **ending)
    tokens = torch.randint(words.nspecial, len(words), (1, length), generator=torch.Generator().manual_seed(2))
    tokens[0, -1] = words.eos()
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([length])}}
    return lambda: generator.generate([network], sample)


def speeds(options: argparse.Namespace) -> pd.DataFrame:
    """Milliseconds of a translation of every model, by length, all models in turns on one thread."""
    torch.set_num_threads(1)
    rows = []
    for length in options.lengths:
        seconds = runs.in_turns({name: translating(options, name, length) for name in options.models})
        rows += [{"model": name, "length": length, "ms": 1000 * value} for name, value in seconds.items()]
    return pd.DataFrame(rows)


def draw(options: argparse.Namespace, found: pd.DataFrame, path: Path) -> None:
    """The accuracy of the next token by update, the mean of all seeds, and the score of each seed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.3 * len(options.models) + 3), layout="constrained")
    for name, rows in found.groupby("model", sort=False):
        pd.DataFrame(list(rows.curve)).mean().plot(ax=left, label=name)
    left.set(xlabel="update", ylabel="next token right, % of the valid split", title="The right ones before are given")
    left.legend(fontsize=8)
    score = "BLEU" if options.data == "messages" else "tokens"
    runs.dots(right, found, score)
    right.set_xlabel("BLEU on the test split" if score == "BLEU" else "tokens right, % of the test split")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, generate, print and draw; or time."""
    parser = runs.parser(__doc__.splitlines()[0], "work/translation/compare")
    parser.add_argument("--data", choices=MODELS, default="messages", help="messages of programs, or copied passages")
    parser.add_argument("--models", nargs="+", type=model, metavar="NAME/CROSS", help="default: those of the README")
    parser.add_argument("--speed", action="store_true", help="only time translations, by the length of the source")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192], help="of --speed")
    parser.add_argument("--beam", type=int, default=1, help="of fairseq-generate; 1 is greedy")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest, of all models")
    parser.add_argument("--batch-tokens", type=int, default=1_024, help="of messages, the longer side of a batch")
    parser.add_argument("--batch-size", type=int, default=8, help="sources to copy in a batch")
    for name in ("updates", "width", "layers"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the README")
    parser.add_argument("--heads", type=int, default=4)
    data.add_options(parser)
    options = parser.parse_args()
    small = {"updates": 4, "subwords": 500, "train": 40, "valid": 4, "test": 4, "source_tokens": 64, "spans": 2}
    if options.quick:
        vars(options).update(small, span_tokens=3, lengths=[32])
    for name, value in {"models": MODELS[options.data], **SIZES[options.data]}.items():
        setattr(options, name, getattr(options, name) or value)
    options.languages = (options.source, options.target) if options.data == "messages" else data.SIDES
    data.write(options.data, options, options.out / "data")
    if options.speed:
        found = speeds(options)
        timed = found.pivot(index="model", columns="length", values="ms").loc[options.models]
        shown = timed.map("{:,.0f}".format)
        if STOCK in options.models:  # how many translations are made in the time of one of fairseq's model
            shown += (timed.loc[STOCK] / timed).map(" ({:.2f}x)".format)
        note = f"the encoder and {STEPS} steps with a beam of {options.beam}, new weights, one thread, models in turns"
        out = options.out / "speed"
        out.mkdir(exist_ok=True)
        runs.report(out, {"Milliseconds by subwords of the source": shown.reset_index()}, [note], found)
        return
    planned = [plan(options, name, seed) for seed in range(1, options.seeds + 1) for name in options.models]
    found = runs.train_all(planned, options.out, options.jobs, lambda folder: read(options, folder))
    scores = ["BLEU", "chrF"] if options.data == "messages" else ["exact", "passages", "tokens"]
    columns = {"parameters": ("parameters", "first"), "next": ("next", spread(1))}
    columns |= {score: (score, spread(1)) for score in scores} | {"seeds": ("seed", "count")}
    columns |= {"ms/source": ("milliseconds", spread(0)), "ms/update": ("update", spread(0))}
    below = [
        "next: per cent of the valid split's tokens, </s> included, the right ones before given; scores: of what "
        "fairseq-generate wrote for the test split; mean ± deviation over seeds",
        f"{options.updates:,} updates, {options.layers} + {options.layers} layers of width {options.width}, "
        f"{options.heads} heads, highest learning rate {options.lr:g}; the checkpoint best on valid",
    ]
    below += notes(options.models)
    if options.data == "messages":
        texts = [data.lines(options.out / "data" / "text" / f"test.{language}") for language in options.languages]
        below.append(f"copied sources have a BLEU of {sacrebleu.corpus_bleu(texts[0], [texts[1]]).score:.1f}")
    runs.report(options.out, {"Encoder-decoders with one budget": runs.table(found, columns)}, below, found)
    draw(options, found, options.out / "results.png")


if __name__ == "__main__":
    main()
