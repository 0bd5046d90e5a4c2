"""DeiT-S with Flow-Attention and a distillation token: timm's own distilled model with another attention."""

import timm
import torch
from timm.task import TokenDistillationTask
from torch import nn

from tests.compare import assert_close
from tests.timm_plugin.helpers.models import build, images

SMALL = dict(img_size=64, embed_dim=48, num_heads=3, depth=2)
STOCK = "deit_small_distilled_patch16_224"


def test_stock_weights_load_and_compute_the_same_with_softmax():
    torch.manual_seed(0)
    stock = timm.create_model(STOCK, **SMALL).eval()
    overlay = dict(state_dict=stock.state_dict())
    arguments = dict(SMALL, pretrained=True, pretrained_cfg_overlay=overlay)
    model = timm.create_model("flowformer_deit_s_distilled", attn_layer="softmax", **arguments).eval()
    x = images(model)
    assert_close("logits", model(x), stock(x))
    flow = timm.create_model("flowformer_deit_s_distilled", **arguments).eval()
    assert_close("second classifier", flow.head_dist.weight, stock.head_dist.weight)
    assert (flow(x) - stock(x)).abs().max() > 1e-3


def test_both_classifiers_are_new_for_other_classes():
    stock = timm.create_model(STOCK, **SMALL)
    overlay = dict(state_dict=stock.state_dict())
    model = timm.create_model(
        "flowformer_deit_s_distilled", **SMALL, num_classes=7, pretrained=True, pretrained_cfg_overlay=overlay
    )
    assert model.head.weight.shape == model.head_dist.weight.shape == (7, 48)
    assert_close("tokens", model.dist_token, stock.dist_token)


def test_trains_by_timms_token_distillation():
    """The task of train.py's ``--kd-distill-type token``: the second classifier learns only from the teacher."""
    torch.manual_seed(0)
    model = build("deit_distilled", num_classes=5).train()
    teacher = timm.create_model("flowformer_deit_ti", img_size=64, depth=1, num_classes=5)
    task = TokenDistillationTask(
        model, teacher, nn.CrossEntropyLoss(), distill_type="hard", task_loss_weight=0.5, device=torch.device("cpu")
    )
    task.train()
    task(images(model), torch.tensor([1, 2]))["loss"].backward()
    assert model.head_dist.weight.grad.abs().sum() > 0
    assert model.head.weight.grad.abs().sum() > 0
