"""D4RL's episodes: Table 7 of the Flowformer paper."""

from ..tables import PublishedTable, short
from ..trainings import HEADING, Block, Entry, NotTrained, Training, each, loop, words

_ROBOTS = {"HALFCHEETAH": "halfcheetah", "HOPPER": "hopper", "WALKER": "walker2d"}
_KINDS = {"MEDIUM-EXPERT": "medium-expert", "MEDIUM": "medium", "MEDIUM-REPLAY": "medium-replay"}
_MODELS = {
    "BC": "bc",
    "AWAC": "awac",
    "DT": "softmax",
    "LINEAR TRANS": "linear",
    "REFORMER": "reformer",
    "PERFORMER": "favor",
    "COSFORMER": "cosformer",
    "FLOWFORMER": "flowformer",
}
EPISODES = tuple(f"{robot}-{kind}-v2" for kind in _KINDS.values() for robot in _ROBOTS.values())


def _decision(column: str, names: tuple[str, ...] = EPISODES) -> Training:
    name = _MODELS[short(column)]
    budget = {
        "bc": "--criterion action_mse --clip-norm 0.25 --lr 0.001 --warmup-updates 10000 --max-update 1000000",
        "awac": "--criterion awac --lr 0.0003 --clip-norm 0 --max-update 1000000",
    }.get(name, "--criterion action_mse --clip-norm 0.25 --lr 0.001 --warmup-updates 10000 --max-update 100000")
    save = f"checkpoints/d4rl/{name}.$dataset"
    train = words(
        f"fairseq-train work/offline_rl/$dataset --user-dir fairseq_plugin --task offline_rl --arch {name}_decision",
        "--disable-validation --context 20 --batch-size 64 --optimizer adam --weight-decay 0.0001",
        f"--lr-scheduler fixed {budget} --seed $seed --save-dir {save}.$seed",
    )
    data = loop("dataset", names)
    blocks = (
        Block("data", ("python -m recipes.offline_rl.prepare --dataset $dataset",), (data,)),
        Block("training, three seeds", (train,), (data, loop("seed", (1, 2, 3)))),
        Block(
            "acting", (f"python -m recipes.offline_rl.evaluate {save}.*/checkpoint_last.pt --episodes 100",), (data,)
        ),
    )
    settings = {
        "task": "offline_rl, causal, windows of 20 steps: 60 tokens",
        "data": "nine sets of D4RL",
        "schedule": "10 epochs of 10,000 updates, 10,000 of them warm-up to 0.001; bc and awac ten times the updates",
        "batch": "64 windows",
    }
    return Training("fairseq", f"{name}_decision", settings, "one NVIDIA 2080 Ti", blocks)


def trained(table: PublishedTable) -> dict[str, Entry]:
    """The columns of Table 7, which are methods, and its rows, which are data sets."""
    entries: dict[str, Entry] = each(table.header[1:], _decision)
    for row in table.rows:
        robot, _, kind = row.name.partition(", ")
        if kind:
            name = f"{_ROBOTS[robot]}-{_KINDS[kind]}-v2"
            entries[row.name] = tuple(_decision(column, (name,)) for column in table.header[1:])
        else:
            average = NotTrained("the mean of the nine rows: `python -m recipes.offline_rl.averages`")
            entries[row.name] = average if row.name == "AVG REWARD" else HEADING
    return entries
