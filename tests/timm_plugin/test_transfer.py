"""Attention transfer as a task: what learns, from which targets, and what stays the teacher's."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.naflexvit import create_attention_mask
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F

from tests.common.parallel.processes import in_processes
from tests.compare import assert_all_close, assert_close
from tests.timm_plugin.helpers import PATCHES_ONLY, VIT, one_line, vit
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.transfer import LOSSES, AttentionImitation, AttentionTransferTask

SMALL = dict(img_size=32, patch_size=8, depth=3, embed_dim=24, num_heads=2, num_classes=3)
#: Mechanisms with parameters that learn, and options with which they differ from softmax.
LEARNING = {"hedgehog": {}, "t2r": {}, "lolcats": {"window": 2}}


@pytest.fixture
def teacher() -> nn.Module:
    """A vision transformer whose attention is far from uniform, in training mode, with dropout."""
    model = vit(proj_drop_rate=0.5, drop_path_rate=0.5, **SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(12)
    return model.train()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def learning(task: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


def learn(task: AttentionTransferTask, x: Tensor, updates: int) -> list[float]:
    optimizer = create_optimizer_v2(task.get_trainable_module(), "adamw", lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = task(x)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def layers_of(kind: str) -> tuple[nn.Module, nn.Module]:
    """A softmax layer, and another one with the same projections."""
    softmax, student = (attention_layer(name)(24, num_heads=2, qkv_bias=True) for name in ("softmax", kind))
    student.qkv, student.proj = softmax.qkv, softmax.proj
    nn.init.normal_(softmax.qkv.weight)
    return softmax, student


# ---- losses


def test_softmax_is_its_own_imitation(teacher, x):
    tokens = torch.randn(2, 9, 24)
    imitation = AttentionImitation(*layers_of("softmax"))
    assert torch.equal(imitation(tokens), imitation.teacher(tokens))
    loss, gradients = imitation.collect()
    assert loss == 0 and all((gradient == 0).all() for gradient in gradients)
    assert AttentionTransferTask(teacher, "lolcats", window=33)(x)["loss"] < 1e-6  # a window of all tokens
    assert AttentionTransferTask(teacher, "lolcats", window=2)(x)["loss"] > 1.0


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_does_not_count_and_two_calls_have_their_mean(loss):
    """The loss of a batch is the mean over the real tokens of its images, in NaFlexViT's padding and masks."""
    imitation = AttentionImitation(*layers_of("hedgehog"), loss)
    tokens, real = torch.randn(2, 9, 24), torch.arange(9) < torch.tensor([[9], [4]])
    imitation(tokens, create_attention_mask(real))
    batch = imitation.collect()[0]
    alone = []
    for image, count in zip(tokens, (9, 4)):
        imitation(image[None, :count])
        alone.append(imitation.collect())
    assert_close("loss", batch, (9 * alone[0][0] + 4 * alone[1][0]) / 13)
    for image, count in zip(tokens, (9, 4)):
        imitation(image[None, :count])
    together, gradients = imitation.collect()
    assert_close("loss of two calls", together, (alone[0][0] + alone[1][0]) / 2)
    for gradient, *each in zip(gradients, alone[0][1], alone[1][1]):
        assert_close("gradient", gradient, sum(each) / 2)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["hedgehog", "linear"])
def test_the_losses_and_their_gradients_are_those_of_the_formulas(teacher, x, kind, loss):
    """1000 times the mean squared error of the heads' outputs, and the KL divergence of weights, over all layers.

    The student's weights are its reference's output for identity values. Gradients scale with the loss.
    """
    x, task = x[:1], AttentionTransferTask(teacher, kind, loss=loss, learn_projections=kind == "linear")
    value = task(x)["loss"]
    (3 * value).backward()
    inputs = []
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in teacher.blocks]
    with torch.no_grad():
        teacher.eval()(x)
    for hook in hooks:
        hook.remove()
    expected, ones = 0.0, torch.eye(17).expand(1, 2, 17, 17)
    for block, student, tokens in zip(teacher.blocks, task.get_eval_model().blocks, inputs):
        q, k, v = (y.view(1, 17, 2, 12).transpose(1, 2) for y in block.attn.qkv(tokens).detach().chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 12**0.5, -1)
        own_q, own_k, own_v = (y.view(1, 17, 2, 12).transpose(1, 2) for y in student.attn.qkv(tokens).chunk(3, -1))
        own = student.attn.attention.reference(own_q, own_k, ones)
        assert_close("sums of weights", own.sum(-1), torch.ones(1, 2, 17))
        if loss == "outputs":
            expected = expected + 1000 * F.mse_loss(own @ own_v, weights @ v) / 3
        else:
            divergence = (torch.xlogy(weights, weights) - weights * own.clamp(min=1e-6).log()).sum(-1).mean()
            expected = expected + divergence / 3
    torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5)
    wanted = torch.autograd.grad(3 * expected, learning(task), allow_unused=True)
    for parameter, gradient in zip(learning(task), wanted):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


def test_a_layer_learns_from_the_teachers_input_alone(teacher, x):
    """A layer's loss does not depend on the students below it, and the output is the teacher's."""
    task = AttentionTransferTask(teacher, "hedgehog")
    before = task(x)["layer_losses"]
    with torch.no_grad():
        task.get_eval_model().blocks[0].attn.attention.query_weight.normal_()
    after = task(x)
    assert after["layer_losses"][0] != before[0]
    assert torch.equal(after["layer_losses"][1:], before[1:])
    alone = AttentionTransferTask(teacher, {"blocks.2": "hedgehog"})
    assert alone.layer_names == ("blocks.2.attn",)
    assert_close("the loss of one layer", alone(x)["layer_losses"][0], before[2])
    assert_close("output", after["output"], teacher.eval()(x))
    task.train()  # training loops do so before each epoch; there is no dropout and no stochastic depth
    task.get_trainable_module().train()
    assert torch.equal(task(x)["layer_losses"], after["layer_losses"])


# ---- what learns


@pytest.mark.parametrize(
    ("kind", "loss"),
    [(kind, loss) for kind in LEARNING for loss in LOSSES] + [(kind, "outputs") for kind in ("flow", "cosformer")],
)
def test_what_is_asked_learns_and_the_loss_falls(teacher, x, kind, loss):
    """New parameters learn, or the projections if a mechanism has none; the teacher and all else are unchanged."""
    options, before = LEARNING.get(kind, {"learn_projections": True}), copied(teacher)
    task = AttentionTransferTask(teacher, kind, loss=loss, **options)
    at_first = copied(task.get_eval_model())
    losses = learn(task, x, 15)
    assert losses[-1] < (1.0 if kind not in LEARNING else 0.8 if loss == "outputs" else 0.995) * losses[0]
    after = task.converted().state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, at_first[name])}
    part = ".attn.attention." if kind in LEARNING else ".attn.qkv."
    assert changed and all(part in name for name in changed)
    assert {name for name in after if ".attn.attention." not in name} == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name not in changed)
    assert all(torch.equal(teacher.state_dict()[name], tensor) for name, tensor in before.items())


def test_the_student_has_the_teachers_memory_and_no_layer_keeps_its_pass(teacher, x):
    task = AttentionTransferTask(teacher, "hedgehog")
    own = {parameter.data_ptr() for parameter in teacher.parameters()}
    new = [parameter for parameter in task.parameters() if parameter.data_ptr() not in own]
    assert len(new) == 4 * 3 and all(parameter.requires_grad for parameter in new)
    converted = task.converted()
    assert not own & {parameter.data_ptr() for parameter in converted.parameters()}
    assert all(parameter.requires_grad for model in (converted, teacher) for parameter in model.parameters())
    assert all(type(block.attn) is Attention for block in teacher.blocks) and teacher.training
    loss = task(x)["loss"]  # torch 2.6 frees tensors that a loss saves if nothing else refers to them
    saved = loss.grad_fn.saved_tensors
    assert [tensor.shape for tensor in saved] == [parameter.shape for parameter in learning(task)]
    assert all(tensor.grad_fn is None for tensor in saved)
    with torch.no_grad():
        without = task(x)["loss"]
    assert not without.requires_grad
    assert_close("loss", without, loss.detach())


@pytest.mark.parametrize(("kind", "options"), [("hedgehog,softmax", {}), ("favor", dict(learn_projections=True))])
def test_states_and_averages_of_the_student(teacher, x, kind, options):
    """What is stored of one student makes another the same, with random features as they were drawn."""
    task = AttentionTransferTask(teacher, kind, **options)
    assert task.layer_names == ("blocks.0.attn", "blocks.2.attn") if "softmax" in kind else len(task.layer_names) == 3
    task.setup_ema(decay=0.75)  # of the student, not of the teacher with both attentions in it
    before = copied(task.get_eval_model())
    learn(task, x, 1)
    task.update_ema()
    averaged, learned = task.get_checkpoint_state(ema=True)["state_dict_ema"], task.get_eval_model().state_dict()
    assert averaged.keys() == learned.keys()
    for name, parameter in task.get_eval_model().named_parameters():
        assert_close(name, averaged[name], 0.75 * before[name] + 0.25 * parameter.detach())
    torch.manual_seed(9)
    other = AttentionTransferTask(teacher, kind, **options)
    other.load_own_state(task.own_state())
    assert torch.equal(other.converted()(x), task.converted()(x))
    built = create_model(VIT, attn_layer=kind, **SMALL).eval()
    built.load_state_dict(task.converted().state_dict(), strict=True)
    assert_close("logits", built(x), task.converted()(x))


def test_attention_of_maps_and_of_stages(x):
    model = timm.create_model("flowformer_hier_test", attn_layer="softmax", img_size=32, num_classes=3)
    task = AttentionTransferTask(model, {"stages.0-1": "hedgehog"})
    assert task.layer_names == ("stages.0.blocks.0.attn", "stages.1.blocks.0.attn")
    losses = learn(task, x, 5)
    assert losses[-1] < losses[0]


# ---- two processes


def gradients(number: int, loss: str, distributed: bool = False) -> dict[str, Tensor]:
    """Gradients of one pass of a batch of NaFlexViT; of four of the nine patches of an image in the second batch."""
    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, num_heads=2, depth=2, num_classes=3)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight)
    task = AttentionTransferTask(model, "hedgehog", loss, verbose=False)
    named = {name: x for name, x in task.trainable_module.named_parameters() if x.requires_grad}
    if distributed:
        task.prepare_distributed()
    valid = torch.arange(9) < torch.tensor(((9, 9), (9, 4))[number])[:, None]
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"), -1).flatten(0, 1)
    patches = torch.randn(2, 9, 768, generator=torch.Generator().manual_seed(number))
    coordinates = grid.expand(2, 9, 2).masked_fill(~valid[..., None], 0)
    task({"patches": patches, "patch_coord": coordinates, "patch_valid": valid})["loss"].backward()
    return {name: x.grad.clone() for name, x in named.items()}


def save_gradients(rank: int, folder: str) -> None:
    """In one of two processes, write the gradients of this process's batch for each loss."""
    for loss in LOSSES:
        torch.save(gradients(rank, loss, distributed=True), Path(folder, f"{loss}.{rank}.pt"))


def test_two_processes_one_of_which_has_padding(tmp_path):
    """Each process gets the mean gradient of both batches; starting them takes seconds."""
    in_processes(2, tmp_path, save_gradients, str(tmp_path))
    for loss in LOSSES:
        alone = [gradients(number, loss) for number in range(2)]
        expected = [sum(each[name] for each in alone) / 2 for name in alone[0]]
        for rank in range(2):
            together = torch.load(tmp_path / f"{loss}.{rank}.pt")
            assert_all_close(alone[0], [together[name] for name in alone[0]], expected)


# ---- refusals


@pytest.mark.parametrize(
    ("attention", "arguments", "said"),
    [
        ("softmax", {}, "attention is 'softmax', which the teacher has"),
        ({"blocks.1": "softmax"}, {}, "at least one other than softmax"),
        ("flow", {}, "'flow' has no parameters of its own.*--learn-projections"),
        ("hedgehog*2,flow", {}, "'flow' has no parameters of its own"),
        ("hedgehog*9", {}, "a pattern of 9 layers"),
        ({"blocks.7": "hedgehog"}, {}, "blocks.7 is not there"),
        ("hedgehog", {"rows": 0.5}, "rows is 0.5"),
        ("hedgehog", {"loss": "logits"}, "loss is 'logits'"),
        ("flow", {"loss": "weights", "learn_projections": True}, "loss is weights and .* flow attention.*: outputs"),
        ("daft_conv", {}, "'daft_conv' has projections of other widths"),
    ],
)
def test_a_student_that_is_refused(attention, arguments, said):
    model = vit(**SMALL, **PATCHES_ONLY)
    one_line(said, lambda: AttentionTransferTask(model, attention, **arguments))


def test_a_teacher_that_is_refused(teacher):
    flow = replace_attention(copy.deepcopy(teacher), "flow")
    one_line("blocks.0.attn has attention 'flow'", lambda: AttentionTransferTask(flow, "hedgehog"))
    one_line("ResNet whose attention", lambda: AttentionTransferTask(timm.create_model("resnet18"), "hedgehog"))
    one_line("teacher is 'vit_tiny", lambda: AttentionTransferTask(VIT, "hedgehog"))
    softmax, student = layers_of("hedgehog")
    one_line("the teacher's attention is 'hedgehog'", lambda: AttentionImitation(student, softmax))
    other = attention_layer("hedgehog")(24, num_heads=3)
    one_line("has 3 heads of 8 channels; allowed: 2 of 12", lambda: AttentionImitation(softmax, other))
    one_line("did not call an attention", lambda: AttentionImitation(softmax, student).collect())
