"""Make linear-time encoders of a pretrained one like BERT, in every form: ``python -m recipes.from_softmax.encoder``.

--folder has config.json, model.safetensors and tokenizer.json or vocab.txt, --file any text. The encoder's attention is
exchanged, and learns in two stages to do what softmax attention did. Run it again, and it goes on with the next form.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib import pyplot as plt
from torch import nn

from ..runs import begin, report, table
from . import stages
from .bert import Bert, read_bert
from .encoder_models import LINEAR_ALONE, draw_batches, embed, train_distillation, train_transfer
from .forms import PLAIN, Form, forms
from .forms import add_options as add_form_options
from .sentences import read_texts
from .stages import DISTILLED, EXCHANGED, TEACHER, TRANSFERRED, cell

STAGES = (EXCHANGED, TRANSFERRED, DISTILLED)
#: What is measured, by the name of its columns: the cosine with the teacher's embeddings, and how often the other text
#: of a pair is the nearest, in per cent.
MEASURES = {"cosine": 3, "pairs": 1}


class Conversions:
    """The encoder, its texts, and how it is converted to a form and measured."""

    def __init__(self, options: argparse.Namespace, bert: Bert) -> None:
        torch.set_num_threads(1)
        self.options, self.bert = options, bert
        train, pairs = read_texts(options.file, options.pairs)
        self.padding = bert.model.dictionary.pad()
        self.texts = [bert.encode(text, options.longest) for text in train]
        self.pairs = [bert.encode(text, options.longest) for side in zip(*pairs) for text in side]
        self.teacher = bert.build("softmax_mlm")
        self.wanted = embed(self.teacher, self.pairs, self.padding)

    def measure(self, model: nn.Module, stage: str) -> dict[str, float]:
        """``MEASURES`` of a model, by name and stage."""
        embeddings = embed(model, self.pairs, self.padding)
        first, second = embeddings.chunk(2)
        nearest = (first @ second.T).argmax(1) == torch.arange(len(first))
        cosine = float((embeddings * self.wanted).sum(1).mean())
        return {f"cosine, {stage}": cosine, f"pairs, {stage}": 100.0 * float(nearest.double().mean())}

    def convert(self, form: Form, seed: int, path: Path) -> dict[str, Any]:
        """Convert the encoder, and write the model."""
        options, learning = self.options, ("--lineartime-trained-parameters", form.learning)
        first, second = (
            draw_batches(self.texts, options.batch, options.updates, self.padding, x) for x in (seed, seed + 1_000)
        )
        student = self.bert.build("hybrid_mlm", [*form.arguments(), *learning], seed)
        learned = sum(x.numel() for x in student.parameters() if x.requires_grad)
        made = {"learned": learned, **self.measure(student, EXCHANGED)}
        train_transfer(student, self.teacher, first, self.padding, options.transfer_lr, form.windowed)
        made |= self.measure(student, TRANSFERRED)
        train_distillation(student, self.teacher, second, self.padding, options.distillation_lr)
        made |= self.measure(student, DISTILLED)
        self.bert.write(path, student, "hybrid_mlm", form.arguments())
        return made


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Bert]:
    """The options, checked, with the forms; and the encoder."""
    parser = stages.parser(__doc__.splitlines()[0], "work/from_softmax/encoder", seeds=1)
    parser.add_argument("--folder", type=Path, required=True, help="of the encoder")
    parser.add_argument("--file", type=Path, required=True, help="any text, to learn from")
    parser.add_argument("--pairs", type=Path, help="two texts that belong together in each line, with a tab between")
    parser.add_argument("--updates", type=int, default=100, help="of each stage")
    parser.add_argument("--batch", type=int, default=32, help="texts of an update")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a text, at most, <s> and </s> included")
    parser.add_argument("--transfer-lr", type=float, default=1e-3, help="highest, of stage 1")
    parser.add_argument("--distillation-lr", type=float, default=3e-4, help="highest, of stage 2")
    add_form_options(parser, PLAIN)
    options = parser.parse_args(arguments)
    if options.quick:
        options.updates, options.batch = min(2, options.updates), min(4, options.batch)
    bert = read_bert(options.folder)
    if not 3 <= options.longest <= bert.model.max_positions:
        parser.error(
            f"--longest is {options.longest}; allowed: 3 to {bert.model.max_positions}, the encoder's positions"
        )
    options.forms = forms(parser, options, bert.model.num_layers)
    return options, bert


def draw(found: pd.DataFrame, path: Path) -> None:
    """Both measures by stage, means over seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    labels = {"cosine": "cosine with the teacher's embeddings", "pairs": "pairs found, %"}
    for axes, (measure, label) in zip(panels, labels.items()):
        columns = [f"{measure}, {stage}" for stage in STAGES]
        means = found.groupby("model", sort=False)[columns].mean()
        axes.axhline(means.loc[TEACHER].iloc[-1], color="0.5", linestyle="--", label=TEACHER)
        for name, values in means.drop(index=TEACHER).iterrows():
            axes.plot(STAGES, values, marker="o", label=name)
        axes.set(ylabel=label, ylim=(0, None))
    panels[1].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert, print and draw."""
    options, bert = parsed(arguments)
    made = Conversions(options, bert)
    added = ("forms", "models", "out", "seeds")  # may be others in the same folder
    given = [f"{name}={value}" for name, value in vars(options).items() if name not in added]
    read = [options.file, *options.folder.glob("*.safetensors"), *([options.pairs] if options.pairs else [])]
    begin(options.out, [*given, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in read)])
    runs = options.out / "runs"
    runs.mkdir(exist_ok=True)
    if not (runs / f"{TEACHER}.pt").exists():
        bert.model.dictionary.save(str(runs / "dict.txt"))
        bert.write(runs / f"{TEACHER}.pt", made.teacher, "softmax_mlm")
    rows = [{"model": TEACHER, "seed": 1, "learned": 0, **made.measure(made.teacher, DISTILLED)}]
    for name, form in options.forms.items():
        for seed in range(1, options.seeds + 1):
            path = runs / f"{stages.file_name(name)}.{seed}.pt"
            results = stages.stored(path.with_suffix(".json"), made.convert, form, seed, path)
            rows.append({"model": name, "seed": seed, **results})
    found = pd.DataFrame(rows)
    columns = {f"{measure}, {stage}": digits for measure, digits in MEASURES.items() for stage in STAGES}
    shown = {"learn in stage 1": ("learned", lambda values: f"{values.iloc[0]:,}")}
    shown |= {name: (name, cell(digits)) for name, digits in columns.items()} | {"seeds": ("seed", "count")}
    sizes = f"{bert.model.num_layers} layers of width {bert.model.embed_dim}"
    below = [
        f"an encoder of {sizes}; texts of at most {options.longest} tokens; {len(made.texts):,} to learn from, "
        f"{len(made.pairs) // 2:,} pairs to measure: {options.pairs or 'halves of paragraphs, not learned from'}",
        "cosine: of the embeddings of these texts, means over all tokens of the last layer, with the teacher's; pairs: "
        "per cent of pairs whose other text is the nearest to the first one among all second ones",
        "exchanged: the encoder's weights under another attention; stage 1: attention transfer, "
        f"{options.updates:,} updates of {options.batch} texts, learning rate {options.transfer_lr:g}; stage 2: "
        "distillation of the outputs of all layers and of the embeddings, as many updates, learning rate "
        f"{options.distillation_lr:g}",
        f"{stages.window_note(options)}; in stage 1 its linear part learns alone in {LINEAR_ALONE:g} of the updates",
    ]
    report(options.out, {"A pretrained encoder in linear time": table(found, shown)}, below, found)
    draw(found, options.out / "results.png")


if __name__ == "__main__":
    main()
