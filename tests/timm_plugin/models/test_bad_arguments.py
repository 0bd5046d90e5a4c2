"""Invalid values of model arguments: a ValueError states the argument, the value and what is allowed."""

import re

import pytest
import torch
from torch import nn

from tests.timm_plugin.helpers.models import build, images

_PARTS = dict(attn_layer=["flow"], block_fn=[nn.Identity], embed_layer=[nn.Identity])
#: Case -> argument -> values that are not allowed.
BAD = {
    "hier": dict(
        img_size=[2, 63, "64", (64, 64, 3)],
        patch_size=[0, "a"],
        in_chans=[0],
        num_classes=[-1, "a"],
        embed_dims=["abcd"],
        depths=[3, (1, 1), (1, 1, 1, 10**9)],
        num_heads=[0, 7, "a", (4, 4)],
        mlp_ratio=["a"],
        norm_layer=["a"],
        act_layer=["a"],
        global_pool=["a", "token"],
        drop_rate=[3.0],
        pos_drop_rate=["a"],
        proj_drop_rate=[-1],
        attn_drop_rate=["a"],
        drop_path_rate=["a"],
        form=["papr"],
        clamp=[-1.0, "much"],
        phi=["tanh"],
        competition=["max"],
        allocation=[3],
    ),
    "daft_conv": dict(
        _PARTS,
        img_size=[8, 50, "64"],
        depth=[10**9],
        num_heads=[5],
        window=[0, 4, (3, 4), (3, 5, 7), "11"],
        class_token=[True],
        reg_tokens=[4],
        pos_embed=["learn"],
        no_embed_class=[True],
        pool_include_prefix=[True],
        patch_drop_rate=[0.1],
        pos_drop_rate=[0.1],
        dynamic_img_size=[False],
        global_pool=["token"],
        entropy_weight=[-0.001, float("nan"), "much"],
        gumbel_temperature=[0.0, -0.5],
        qk_norm=[True],
    ),
    "daft_full": dict(
        _PARTS,
        img_size=[50, (8, 64)],
        depth=[10**9],
        num_heads=[5],
        bias_dim=[-1],
        dynamic_img_size=[True],
        dynamic_img_pad=[True],
        patch_drop_rate=[0.1],
        qk_norm=[True],
    ),
    "flash": dict(
        _PARTS,
        img_size=[65],
        depth=[10**9],
        class_token=[True],
        qk_norm=[True],
        patch_drop_rate=[0.5],
        global_pool=["token"],
        chunk_rows=[0],
        dynamic_img_size=[True],
        query_dim=[15],
        kernel=["gelu"],
    ),
}
ROWS = [(case, name, value) for case, values in BAD.items() for name in values for value in values[name]]


@pytest.mark.parametrize(("case", "name", "value"), ROWS)
def test_a_value_that_is_not_allowed(case, name, value):
    shown = re.escape(str(value).strip("()"))
    with pytest.raises(ValueError, match=f"{name}.*{shown}.*; allowed") as raised:
        build(case, **{name: value})
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    ("case", "args", "message"),
    [
        ("hier", dict(attn_layer="softmax", form="paper"), "attention 'softmax' has no option 'form'"),
        ("hier", dict(attn_layer="attn", form="paper"), "attn_layer is 'attn', .*form; allowed"),
        ("hier", dict(init_values=1e-5, mlp_init_values=1e-5), "init_values is 1e-05 and mlp_init_values 1e-05"),
        ("hier", dict(depths=(1, 0, 1, 1)), "depths is 0; allowed"),
        ("hier_soft", dict(ratio=(4, 2)), r"ratio is \(4, 2\)"),
        ("hier_cosformer", dict(dynamic_img_size=True), "dynamic_img_size is True; allowed .*'cosformer'.*False"),
        ("daft_conv", dict(gumbel_temperature=0.5, local_only=True), "local_only=True is given; allowed"),
        ("daft_full", dict(class_token=False), "global_pool is 'token'; allowed"),
    ],
)
def test_values_that_do_not_go_together(case, args, message):
    with pytest.raises(ValueError, match=message):
        build(case, **args)


@pytest.mark.parametrize("case", ["hier", "daft_full", "daft_conv", "flash"])
def test_bad_sizes_and_heads_afterwards(case):
    model = build(case)
    with pytest.raises(ValueError, match=r"img_size is \(2, 64\); allowed: at least"):
        model.set_input_size((2, 64))
    if case == "hier":
        for message, arguments in {"global_pool is 'token'": (3, "token"), "num_classes is -3": (-3,)}.items():
            with pytest.raises(ValueError, match=message):
                model.reset_classifier(*arguments)
    assert model(images(model)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("case", "size", "allowed"),
    [
        ("hier", (32, 64), "64 x 64"),
        ("hier_dynamic", (2, 64), ""),
        ("hier_dynamic", (62, 64), ".*4 x 4"),
        ("daft_full", (64, 96), "64 x 64"),
        ("daft_full", (32, 32), "64 x 64"),
        ("daft_conv", (64, 50), ".*16 x 16"),
        ("daft_conv", (8, 64), ""),
        ("flash", (80, 64), "64 x 64"),
    ],
)
def test_images_of_a_wrong_size(case, size, allowed):
    model = build(case)
    with pytest.raises(ValueError, match=f"x has image size {size[0]} x {size[1]}; allowed: {allowed}"):
        model(images(model, size=size))


@pytest.mark.parametrize("case", ["hier", "daft_full", "daft_conv"])
def test_images_of_a_wrong_shape(case):
    with pytest.raises(ValueError, match=r"x has shape \[2, 1, 64, 64\]; allowed: \(batch, 3, height, width\)"):
        build(case)(torch.randn(2, 1, 64, 64))
    with pytest.raises(ValueError, match=r"x has shape \[3, 64, 64\]; allowed"):
        build(case)(torch.randn(3, 64, 64))
