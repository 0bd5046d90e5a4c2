"""TriviaQA: Table 4 of the FLASH paper."""

from ..trainings import Block, Training, folder_name, loop, words
from .flash import OPTIMIZER

_LINEAR = "flash_mlm_base --flash-query-dim 512 --flash-chunk-size 128 --flash-first-softmax"
_MODELS = {
    "Transformer+": "transformer_plus_mlm_base",
    "Combiner": "combiner_mlm_base",
    "FLASH-Quad, head size = 128": "flash_quad_mlm_base",
    "FLASH-Quad, head size = 512": "flash_quad_mlm_base --flash-query-dim 512",
    "FLASH, head size = 512": _LINEAR,
    "FLASH, head size = 512 + first-to-all": f"{_LINEAR} --flash-first-to-all",
}
_PREPARE = "python -m recipes.triviaqa.prepare wikipedia --file triviaqa-rc --subwords work/flash/wiki40b"


def trained(row: str) -> Training:
    """A row: pretraining at 4,096 tokens, fine-tuning with three rates, and the answers of the best."""
    model = _MODELS[row]
    folder = f"checkpoints/triviaqa/{folder_name(model)}"
    decay = "--lr-scheduler polynomial_decay --warmup-updates {} --total-num-update {} --end-learning-rate 0"
    pretrain = words(
        "fairseq-train work/flash/wiki40b/data-bin --user-dir fairseq_plugin --task masked_lm --criterion masked_lm",
        f"--arch {model} --tokens-per-sample 4096 --sample-break-mode none --max-tokens 8192 --update-freq 4",
        f"--max-update 125000 {OPTIMIZER.format('0.1')} --lr 0.0007 {decay.format(10000, 125000)}",
        f"--save-dir {folder}/pretrained",
    )
    clip = "0.0" if model.startswith("flash_mlm") else "0.1"
    tune = words(
        "fairseq-train work/triviaqa/wikipedia/data-bin --user-dir fairseq_plugin --task span_extraction",
        f"--criterion span_extraction --arch {model} --restore-file {folder}/pretrained/checkpoint_best.pt",
        "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler --max-positions 4096",
        "--batch-size 2 --update-freq 2 --required-batch-size-multiple 1 --max-update 20000",
        f"{OPTIMIZER.format(clip)} --lr $lr {decay.format(2000, 20000)} --validate-interval-updates 2000",
        "--find-unused-parameters --no-epoch-checkpoints --best-checkpoint-metric f1",
        f"--maximize-best-checkpoint-metric --save-dir {folder}/$lr",
    )
    answer = words(
        f"python -m recipes.triviaqa.answer {folder}/1e-05/checkpoint_best.pt {folder}/3e-05/checkpoint_best.pt",
        f"{folder}/5e-05/checkpoint_best.pt --data work/triviaqa/wikipedia/data-bin --output {folder}/answers.json",
    )
    score = f"python -m recipes.triviaqa.evaluate {folder}/answers.json --file triviaqa-rc/qa/wikipedia-dev.json"
    settings = {
        "task": "masked_lm, then span_extraction, 4,096 tokens",
        "data": "English Wikipedia (Wiki-40B), and TriviaQA's triviaqa-rc.tar.gz, extracted",
        "schedule": "125,000 updates as in Table 6; fine-tuning 20,000 with three rates, which are ours",
        "batch": "64 sequences; fine-tuning 32 windows on 8 GPUs, which is ours",
    }
    blocks = (
        Block("data", ("python -m recipes.flash.prepare wiki40b", _PREPARE)),
        Block("pretraining on 8 GPUs", (pretrain,)),
        Block("fine-tuning on 8 GPUs", (tune,), (loop("lr", ("1e-05", "3e-05", "5e-05")),)),
        Block("answers of the checkpoint with the best F1, and their scores", (answer, score)),
    )
    return Training("fairseq", model, settings, "not stated", blocks, symbols=32000)
