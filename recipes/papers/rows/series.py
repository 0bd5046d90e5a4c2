"""The UEA archive's time series: Tables 6 and 9 of the Flowformer paper."""

from ..tables import PublishedTable, short
from ..trainings import Block, Entry, NotTrained, Training, each, loop, words

#: The data sets as the archive spells them.
SERIES = (
    "EthanolConcentration",
    "FaceDetection",
    "Handwriting",
    "Heartbeat",
    "JapaneseVowels",
    "PEMS-SF",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
)
#: A column -> an architecture without _time_series, or a method of recipes.time_series.classify.
_MODELS = {
    "LSTM": "lstm",
    "UNSUPER": "tcn",
    "TRANS": "softmax",
    "LINEAR": "linear",
    "RE": "reformer",
    "LONG": "longformer",
    "PER": "favor",
    "YOSO-E": "yoso",
    "COS": "cosformer",
    "FLOW": "flowformer",
}
_CLASSICAL = {"DTW": "dtw", "XGBOOST": "hist_gradient_boosting", "ROCKET": "rocket"}
_NOTES = {
    "UNSUPER": "the paper's encoder is trained without labels, ours with them",
    "XGBOOST": "scikit-learn's gradient boosting, other code for the same method",
}


def _series_blocks(column: str, names: tuple[str, ...]) -> tuple[Block, ...]:
    data = loop("dataset", names)
    prepare = "python -m recipes.time_series.prepare --dataset $dataset --out work/time_series/$dataset"
    blocks = [Block("data", (prepare,), (data,))]
    if column in _CLASSICAL:
        fit = f"python -m recipes.time_series.classify work/time_series/$dataset --model {_CLASSICAL[column]} --seed 1"
        return (*blocks, Block("fitting, and accuracy on the test series", (fit,), (data,)))
    for optimizer in ("radam", "adam"):
        chosen = [name for name in names if (name == "SpokenArabicDigits") == (optimizer == "adam")]
        train = words(
            "fairseq-train work/time_series/$dataset --user-dir fairseq_plugin --task time_series_classification",
            f"--criterion sentence_prediction --arch {_MODELS[column]}_time_series --optimizer {optimizer}",
            "--lr 0.001 --lr-scheduler fixed --clip-norm 4.0 --batch-size 16 --required-batch-size-multiple 1",
            "--max-epoch 100 --valid-subset test --validate-interval 2 --best-checkpoint-metric accuracy",
            "--maximize-best-checkpoint-metric --save-interval 10 --no-epoch-checkpoints --data-buffer-size 0",
            f"--num-workers 0 --save-dir checkpoints/time_series/{_MODELS[column]}.$dataset",
        )
        if chosen:
            title = "training, which reads the test series after every second epoch"
            blocks.append(Block(title, (train,), (loop("dataset", chosen),)))
    return tuple(blocks)


def _series(column: str, names: tuple[str, ...] = SERIES) -> Entry:
    name = short(column)
    if name == "SOFT":
        return NotTrained("SOFT pools keys on the grid of an image, which a series has not")
    settings = {
        "task": "time_series_classification, bidirectional, 29 to 1,751 steps",
        "data": "ten sets of the UEA archive",
        "schedule": "100 epochs at 0.001, the authors' RAdam (SpokenArabicDigits Adam)",
        "batch": "16",
    }
    if name in _CLASSICAL:
        settings = {"task": "classification, no network", "data": settings["data"]}
    host, model = (
        ("", f"recipes.time_series.classify --model {_CLASSICAL[name]}")
        if name in _CLASSICAL
        else (
            "fairseq",
            f"{_MODELS[name]}_time_series",
        )
    )
    note = _NOTES.get(name, "")
    return Training(host, model, settings, "one TITAN RTX 24 GB", _series_blocks(name, names), note=note)


def trained(table: PublishedTable) -> dict[str, Entry]:
    """The columns of Table 6, which are methods, and its rows, which are data sets."""
    entries = each(table.header[1:], _series)
    for row, name in zip(table.rows, SERIES):
        one = [_series(column, (name,)) for column in table.header[1:]]
        entries[row.name] = tuple(training for training in one if isinstance(training, Training))
    average = "python -m recipes.time_series.averages"
    return {**entries, "AVERAGE ACCURACY": NotTrained(f"the mean of the ten rows: `{average}`")}


def data_set(row: str) -> NotTrained:
    """A row of Table 9."""
    printed = row.lower().replace("selr", "selfr")
    name = next(name for name in SERIES if name.lower() == printed)
    return NotTrained(f"a data set: `python -m recipes.time_series.prepare --dataset {name}`")
