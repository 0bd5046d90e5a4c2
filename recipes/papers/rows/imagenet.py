"""ImageNet-1K by timm's own scripts: the vision models of the papers, and Table 5 of the Flowformer paper."""

import re

from ..tables import short
from ..trainings import Block, Entry, NotTrained, Training, words

_MODELS = {
    "FULL ATTN": "softmax_hier_s",
    "LINEAR TRANS": "linear_hier_s",
    "REFORMER": "reformer_hier_s",
    "LONGFORMER": "longformer_hier_s",
    "PERFORMER": "favor_hier_s",
    "NYSTRÖMFORMER": "nystrom_hier_s",
    "YOSO-E": "yoso_hier_s",
    "SOFT": "soft_hier_s",
    "COSFORMER": "cosformer_hier_s",
    "FLOWFORMER": "flowformer_hier_s",
}
#: timm's names of what the paper only cites.
_CITED = {"ViT-BASE": "vit_base_patch16_384", "ViT-LARGE": "vit_large_patch16_384"}
#: Why parameters are not the published ones.
_MEBI = 'the paper prints 41 "MB"; a model in the shape of its Table 8 has 43.3 M, 41.3 times 2^20'
_OTHERS = 'the paper prints {} "MB" and does not say what this model has less than the others, which have 41'
_TOKEN = "with the distillation token, its position and its classifier, which the printed 22 may leave out"
_STOCK = "deit_small_distilled_patch16_224"
#: DeiT's hard distillation, "DeiT-S (token distillation)" in the text.
_TEACHER = (
    "--kd-model-name regnety_160.deit_in1k --kd-distill-type token --kd-token-distill-type hard --task-loss-weight 0.5"
)
_SCRIPTS = Block("timm's scripts", ("python -m recipes.imagenet.get_timm_scripts",))


def training(
    model: str,
    config: str,
    hardware: str,
    published: str = "",
    difference: str = "",
    note: str = "",
    further: str = "",
) -> Training:
    """timm's train.py on 8 GPUs with a file of settings, the model's options, and ``further`` ones of training."""
    name, _, options = model.partition(" ")
    experiment = re.sub(r"[^\w.]+", "-", model.replace(" --model-kwargs", ""))
    experiment += ".200" if "--epochs 200" in further else ".ft" if "--initial-checkpoint" in further else ""
    train = words(
        "PYTHONPATH=. torchrun --nproc_per_node 8 work/timm-scripts/train.py --device-modules timm_plugin",
        f"--config recipes/imagenet/{config} --data-dir /data/imagenet --model {name}",
        options,
        further,
        f"--output output/train --experiment {experiment}",
    )
    settings = {
        "task": "ImageNet-1K, 224 x 224",
        "data": "/data/imagenet with train/ and val/, a folder for each class",
        "schedule": words(f"recipes/imagenet/{config}", further),
        "batch": "as in that file, for each GPU",
    }
    evaluate = _evaluation(model, f"--checkpoint output/train/{experiment}/model_best.pth.tar")
    blocks = (_SCRIPTS, Block("training on 8 GPUs, and evaluation", (train, evaluate)))
    millions = float(published) if published else None
    return Training("timm", model, settings, hardware, blocks, millions, difference, note=note)


def evaluated(model: str, published: str, hardware: str) -> Training:
    """Released weights, which timm downloads, evaluated at the model's own size."""
    settings = {"task": "ImageNet-1K", "data": "/data/imagenet with val/", "schedule": "released weights"}
    blocks = (_SCRIPTS, Block("evaluation", (_evaluation(model, "--pretrained"),)))
    return Training("timm", model, settings, hardware, blocks, float(published))


def trained(row: str, printed: str) -> Entry:
    """A row of Flowformer's Table 5, with the parameters that are ``printed`` there."""
    hardware = "8 TITAN RTX 24 GB"
    if short(row) in _CITED:
        return NotTrained(f"cited from its own paper; timm's `{_CITED[short(row)]}`")
    if row == "DEiT-S (2021)":
        return training(_STOCK, "flowformer_deit_s.yaml", "not stated", printed, _TOKEN, further=_TEACHER)
    if row == "DEiT+FLOWFORMER":
        model = "flowformer_deit_s_distilled"
        return training(model, "flowformer_deit_s.yaml", hardware, printed, _TOKEN, further=_TEACHER)
    difference = _MEBI if printed == "41" else _OTHERS.format(printed)
    return training(_MODELS[short(row)], "flowformer_hier_s.yaml", hardware, printed, difference)


def _evaluation(model: str, weights: str) -> str:
    name, _, options = model.partition(" ")
    return words(
        f"python -m timm_plugin work/timm-scripts/validate.py --data-dir /data/imagenet --split val --model {name}",
        options,
        f"{weights} --crop-pct {1.0 if name.endswith('384') else 0.875} --interpolation bicubic",
    )
