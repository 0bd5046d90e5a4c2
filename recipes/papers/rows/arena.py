"""The Long Range Arena: Tables 2, 3, 10 and 11 of the Flowformer paper."""

from recipes.lra.plan import TASKS

from ..tables import short
from ..trainings import Block, Training, folder_name, words

_PREPARE = {
    "listops": "python -m recipes.lra.listops --out work/lra/listops --seed 1",
    "text": "python -m recipes.lra.text",
    "retrieval": "python -m recipes.lra.retrieval",
    "image": "python -m recipes.lra.image",
    "pathfinder": "python -m recipes.lra.pathfinder",
}
_SQRT = "--weight-decay 0.1 --lr {} --lr-scheduler inverse_sqrt --warmup-updates {}"
_COSINE = "--lr {} --lr-scheduler cosine --warmup-updates {} --lr-period-updates {}"
#: Longest input, batch, updates, schedule, and symbols with fairseq's own.
_TASKS = {
    "listops": (2000, 32, "5000 --save-interval-updates 500", _SQRT.format("1.58e-3", 1000), 4 + 15),
    "text": (1001, 32, "20000", _SQRT.format("5.59e-4", 8000), 4 + 256),
    "retrieval": (4001, 32, "5000 --save-interval-updates 500", _SQRT.format("5.59e-4", 8000), 4 + 256),
    "image": (1025, 256, "35000", _COSINE.format("5e-4", 175, 34825), 4 + 256),
    "pathfinder": (1024, 512, "62400", _COSINE.format("1e-3", 312, 62088), 4 + 256),
}
#: The printed name of a row -> the beginning of the architecture's name.
_MODELS = {
    "LOCAL ATTENTION": "local",
    "LINEAR TRANS": "linear",
    "REFORMER": "reformer",
    "SPARSE TRANS": "sparse",
    "SINKHORN TRANS": "sinkhorn",
    "LINFORMER": "linformer",
    "PERFORMER": "favor",
    "SYNTHESIZER": "synthesizer",
    "LONGFORMER": "longformer",
    "TRANSFORMER": "softmax",
    "BIGBIRD": "bigbird",
    "COSFORMER": "cosformer",
    "FLOWFORMER W/O COMPETITION": "flowformer --flow-competition none",
    "FLOWFORMER W/O ALLOCATION": "flowformer --flow-allocation none",
    "FLOWFORMER": "flowformer",
}
_NOTES = {
    "local": "the published number is of what the Arena's code computes: attention among tokens n/w apart",
    "sinkhorn": "the published number is of what the Arena's code computes: a sum of all chunks, none of them sorted",
    "favor": "the Arena's Performer has relu features but on ListOps; ours has FAVOR+",
}

_CHOICES = {
    "CHOICE 1": "--flow-competition sigmoid --flow-allocation sigmoid",
    "CHOICE 2": "--flow-competition sigmoid --flow-allocation softmax",
    "CHOICE 3": "--flow-competition softmax --flow-allocation softmax",
    "FLOWFORMER": "--flow-competition softmax --flow-allocation sigmoid",
}
_FEATURES = {
    "ELU(·) + 1.0": "--flow-phi elu+1",
    "RELU(·)": "--flow-phi relu",
    "SIGMOID FUNCTION (FINAL VERSION)": "--flow-phi sigmoid",
}


def _five_tasks(model: str) -> Training:
    """Five trainings of ``model``: the beginning of an architecture's name, and options."""
    name, _, options = model.partition(" ")
    blocks = []
    for task, (longest, batch, updates, schedule, _) in _TASKS.items():
        folder, save = f"work/lra/{task}", f"checkpoints/lra/{folder_name(model)}.{task}"
        kind = "sequence_pair_prediction" if task == "retrieval" else "sentence_prediction"
        shared = words(
            f"{folder}/data-bin --user-dir fairseq_plugin --task {kind} --num-classes {TASKS[task].classes}",
            "--init-token 0" if TASKS[task].first_token else "",
            f"--criterion sentence_prediction --max-positions {longest} --batch-size {batch}",
        )
        train = words(
            f"fairseq-train {shared} --arch {name}_lra_{task}",
            options,
            "--optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-9",
            schedule,
            f"--max-update {updates} --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric",
            f"--no-epoch-checkpoints --save-dir {save}",
        )
        read = f"fairseq-validate {shared} --path {save}/checkpoint_best.pt --valid-subset test"
        blocks.append(Block(f"data of {TASKS[task].title}", (_PREPARE[task],)))
        blocks.append(Block(f"{TASKS[task].title}: training, and the test split read once", (train, read)))
    settings = {
        "task": "classification of symbols, bytes or pixels, in the Arena's official configurations",
        "data": "the five tasks of the Long Range Arena, 1,024 to 4,000 tokens",
        "schedule": "the Arena's: 1/sqrt(update) after a warm-up, or a cosine; 5,000 to 62,400 updates",
        "batch": "32 (Image 256, Pathfinder 512)",
    }
    shown = words(f"{name}_lra_TASK", options)
    note = _NOTES.get(name, "")
    return Training("fairseq", shown, settings, "2 NVIDIA 2080 Ti", tuple(blocks), symbols=19, note=note)


def trained(row: str) -> Training:
    """A row of Table 2."""
    return _five_tasks(_MODELS[short(row)])


def with_features(row: str) -> Training:
    """A row of Table 10."""
    return _five_tasks(f"flowformer {_FEATURES[row]}")


def with_functions(row: str) -> Training:
    """A row of Table 11."""
    return _five_tasks(f"flowformer {_CHOICES[row]}")


def timed(row: str) -> Training:
    """A row of Table 3: steps of the Arena's Text model per second, which are measured and not trained."""
    model = {"FLOWFORMER": "flow"}.get(short(row), _MODELS[short(row)])
    command = words(
        f"python -m recipes.lra.speed --models {' '.join(dict.fromkeys(['softmax', model]))}",
        "--lengths 1024 2048 3072 4096 --task text --batch-size 2 --width 256 --layers 4 --heads 4",
    )
    settings = {
        "task": "steps of training and inference",
        "data": "random symbols, 1,024 to 4,096 tokens",
        "batch": "2 sequences; the paper's is not stated",
    }
    shown = f"{_MODELS[short(row)]}_lra_text"
    return Training("fairseq", shown, settings, "2 NVIDIA 2080 Ti, JAX", (Block("steps per second", (command,)),))
