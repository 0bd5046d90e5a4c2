"""Attention transfer as a task and as a command: what learns, from which targets, and what stays the teacher's."""

import copy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.layers import Attention
from timm.models import load_checkpoint
from timm.models.naflexvit import create_attention_mask
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from common.checkpoints import read_checkpoint
from tests.common.parallel.processes import in_processes
from tests.compare import assert_all_close, assert_close
from tests.timm_plugin.helpers import PATCHES_ONLY, VIT, assert_same, one_line, vit
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.transfer import LOSSES, AttentionImitation, AttentionTransferTask
from timm_plugin.transfer.__main__ import main

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
def test_gradients_are_those_of_the_mean_loss_of_the_layers(teacher, x, kind, loss):
    """And scale with it. fairseq has the formulas, and another test compares both hosts."""
    task, x = (
        AttentionTransferTask(teacher.double(), kind, loss=loss, learn_projections=kind == "linear"),
        x[:1].double(),
    )
    result = task(x)
    assert_close("mean", result["loss"], result["layer_losses"].mean())
    (3 * result["loss"]).backward()
    for parameter in learning(task):
        direction, values = torch.randn_like(parameter), []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                parameter.add_(direction, alpha=step)
                values.append(task(x)["loss"])
            parameter.add_(direction, alpha=1e-6)
        expected = 3 * (values[0] - values[1]) / 2e-6
        assert_close("derivative", (parameter.grad * direction).sum(), expected, 1e-4, floor=1e-3)


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
    ("kind", "loss"), [(kind, loss) for kind in LEARNING for loss in LOSSES] + [("flow", LOSSES[0])]
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


def test_the_student_has_the_teachers_memory_until_it_is_converted(teacher, x):
    task = AttentionTransferTask(teacher, "hedgehog")
    own = {parameter.data_ptr() for parameter in teacher.parameters()}
    new = [parameter for parameter in task.parameters() if parameter.data_ptr() not in own]
    assert len(new) == 4 * 3 and all(parameter.requires_grad for parameter in new)
    converted = task.converted()
    assert not own & {parameter.data_ptr() for parameter in converted.parameters()}
    assert all(parameter.requires_grad for model in (converted, teacher) for parameter in model.parameters())
    assert all(type(block.attn) is Attention for block in teacher.blocks) and teacher.training
    loss = task(x)["loss"]
    assert all(tensor.grad_fn is None for tensor in loss.grad_fn.saved_tensors)  # no layer keeps its pass
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
        nn.init.normal_(block.attn.qkv.weight)
    task = AttentionTransferTask(model, "hedgehog", loss, verbose=False)
    named = {name: x for name, x in task.trainable_module.named_parameters() if x.requires_grad}
    if distributed:
        task.prepare_distributed()
    valid = torch.arange(9) < torch.tensor(((9, 9), (9, 4))[number])[:, None]
    patches = torch.randn(2, 9, 768, generator=torch.Generator().manual_seed(number))
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(3))
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


# ---- refusals of the task


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


# ---- the command: from a checkpoint to a checkpoint

TYPED = dict(img_size=32, depth=2, embed_dim=24, num_heads=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with images of two classes, and a teacher's checkpoint as train.py writes it."""
    folder = tmp_path_factory.mktemp("transfer")
    random = np.random.default_rng(0)
    for i in range(8):
        path = folder / "images" / "train" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    model = vit(**TYPED)
    nn.init.normal_(model.head.weight)
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.3)
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, folder / "teacher.pth")
    return folder


def run(made: Path, output: Path, *options: str, attn: tuple[str, ...] = ("hedgehog",)) -> None:
    kwargs = ["--model-kwargs", *(f"{name}={value}" for name, value in TYPED.items())]
    common = ["--teacher", VIT, "--teacher-checkpoint", str(made / "teacher.pth"), *kwargs]
    images = ["--data-dir", str(made / "images"), "-b", "4", "-j", "0", "--img-size", "32", "--device", "cpu"]
    main([*common, *images, "--epochs", "3", "--attn", *attn, "--output", str(output), *options])


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> dict:
    """The student of an uninterrupted run with default settings, and of one with SGD."""
    folder = tmp_path_factory.mktemp("whole")
    run(made, folder / "adamw.safetensors")
    run(made, folder / "sgd.safetensors", "--opt", "sgd", "--lr", "1e-3")
    return {name: read_checkpoint(folder / f"{name}.safetensors") for name in ("adamw", "sgd")}


@pytest.mark.parametrize("projections", [False, True])
def test_from_a_checkpoint_to_a_checkpoint(made, tmp_path, capsys, projections):
    """By a pattern, or by places with options; the teacher stays what it is but for projections that are to learn."""
    teacher_dir, output = tmp_path / "teacher", tmp_path / "new" / "student.pth"
    arguments = dict(TYPED, num_classes=3)
    if projections:
        options = ("--learn-projections", "--attn-kwargs", "window=3", "form=paper", "--no-aug")
        run(made, output, "--teacher-dir", str(teacher_dir), *options, attn=("blocks.0=flow", "blocks.1=lolcats"))
        places = {"blocks.0": ("flow", {"form": "paper"}), "blocks.1": ("lolcats", {"window": 3})}
        student = replace_attention(vit(**arguments), places)
        load_checkpoint(student, str(output))
    else:
        run(made, output, "--teacher-dir", str(teacher_dir), attn=("hedgehog,softmax",))
        student = create_model(VIT, attn_layer="hedgehog,softmax", checkpoint_path=str(output), **arguments)
        assert not torch.equal(student.blocks[0].attn.attention.query_weight, torch.eye(12).expand(2, 12, 12))
    assert {path.name for path in output.parent.iterdir()} == {"student.pth"}
    assert "blocks.0.attn: loss" in capsys.readouterr().out
    teacher = timm.create_model(VIT, checkpoint_path=str(made / "teacher.pth"), **arguments).state_dict()
    assert_same(timm.create_model(f"local-dir:{teacher_dir}", pretrained=True).state_dict(), teacher)
    changed = {name for name, x in teacher.items() if not torch.equal(student.state_dict()[name], x)}
    qkv = {name for name in teacher if ".qkv.weight" in name}
    assert changed >= qkv and all(".qkv." in name for name in changed) if projections else not changed


WEIGHT = "blocks.0.attn.attention.query_weight"


@pytest.mark.parametrize(
    "setting",
    ["--lr 1e-2", "--clip-grad 1e-3", "--weight-decay 10", "--seed 1", "--warmup-epochs 1", "--epochs 2", "--no-aug"]
    + ["--loss weights", "--amp"],
)
def test_a_setting_has_an_effect(made, whole, tmp_path, setting):
    run(made, tmp_path / "other.safetensors", "--opt", "sgd", "--lr", "1e-3", *setting.split())
    other = read_checkpoint(tmp_path / "other.safetensors")[WEIGHT]
    assert not torch.equal(other, whole["sgd"][WEIGHT])
    if setting == "--amp":
        assert_close(WEIGHT, other, whole["sgd"][WEIGHT], tolerance=0.05)


def test_an_interrupted_run_goes_on_to_the_same_result(made, whole, tmp_path, monkeypatch):
    """Each epoch has random numbers of its own, and the learning rate falls to the end.

    Unfinished work is that of one set of options and of one teacher, whose weights decide. A run that only failed to
    write its result has nothing left to learn.
    """
    output, weights, seen = tmp_path / "parts.safetensors", tmp_path / "teacher.pth", []
    checkpoint, forward, step = (
        ("--teacher-checkpoint", str(weights)),
        AttentionTransferTask.forward,
        torch.optim.AdamW.step,
    )
    weights.write_bytes((made / "teacher.pth").read_bytes())

    def killed(self, images, target=None):
        seen.append(images)
        if len(seen) == 6:  # in the third of three epochs of two updates
            raise KeyboardInterrupt
        return forward(self, images, target)

    monkeypatch.setattr(AttentionTransferTask, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        run(made, output, *checkpoint)
    assert not output.exists() and not torch.equal(seen[0], seen[2])
    torch.save(vit(**TYPED).state_dict(), weights)
    for other, said in (
        ((*checkpoint, "--lr", "0.5"), "lr is 0.5, there 0.01"),
        ((), "teacher_checkpoint is"),
        (checkpoint, "its teacher has other weights"),
    ):
        with pytest.raises(SystemExit, match=f"of another transfer.*{said}"):
            run(made, output, *other)
    weights.write_bytes((made / "teacher.pth").read_bytes())
    steps = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *_: (steps.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    with monkeypatch.context() as patched:
        patched.setattr("timm_plugin.transfer.__main__.write", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(made, output, *checkpoint)
    assert len(seen) == 6 + 2 and torch.equal(seen[6], seen[4])
    assert 0 < steps[-1] < steps[0] < 1e-2
    run(made, output, *checkpoint)
    assert len(seen) == 6 + 2
    assert_same(read_checkpoint(output), whole["adamw"])
    assert {path.name for path in tmp_path.iterdir()} == {"parts.safetensors", "teacher.pth"}


#: Options whose values are counts, with a value that is too small and the smallest one.
COUNTS = {"epochs": ("0", 1), "batch-size": ("-3", 1), "log-interval": ("0", 1), "in-chans": ("0", 1)}
COUNTS |= {"img-size": ("-32", 1), "num-classes": ("-1", 0), "warmup-epochs": ("-1", 0), "workers": ("-1", 0)}
#: Options, --attn, and the message. That of the task is tested above.
REFUSED = [
    ("--num-classes 7", "hedgehog", "does not fit VisionTransformer: .*head"),
    ("--teacher-checkpoint {folder}/flow.pth", "hedgehog", "does not fit VisionTransformer: .*not of this model"),
    ("--teacher resnet18", "hedgehog", "unexpected keyword"),
    ("--img-size 48", "hedgehog", "images are 48 x 48, and the teacher takes 32 x 32; allowed: --img-size 32"),
    ("-b 13", "hedgehog", "not one whole batch"),
    ("--output nowhere/student.onnx", "hedgehog", r"--output is nowhere/student\.onnx, .*safetensors"),
    ("--output {folder}/folder", "hedgehog", "--output is .*allowed: a file"),
    ("--output {folder}/flow.pth", "hedgehog", "--output is .*there already"),
    ("--teacher-dir {folder}", "hedgehog", "--teacher-dir is .*there already"),
    ("--use-ema", "hedgehog", "--use-ema is given, and .*teacher.pth has no averaged weights"),
    ("--input-size 3 0 32", "hedgehog", r"--input-size is \[3, 0, 32\]; allowed: 1 or more"),
    ("--opt adamww", "hedgehog", "--opt is 'adamww'; allowed: .*adamw"),
    ("--attn-kwargs rws=3", "hedgehog", "has no option 'rws'"),
    *((f"--{name} {x}", "hedgehog", f"--{name} is {x}; allowed: {n} or more") for name, (x, n) in COUNTS.items()),
    ("", "flow", "--learn-projections"),
    ("", "blocks.0=hedgehog flow", "--attn is blocks.0=hedgehog flow; allowed"),
    ("", "blocks.0=hedgehg", "--attn is 'hedgehg'"),
]


@pytest.mark.parametrize(("options", "attn", "said"), REFUSED)
def test_refusals_of_the_command(made, tmp_path, options, attn, said):
    torch.save(create_model(VIT, attn_layer="flow", num_classes=3, **TYPED).state_dict(), tmp_path / "flow.pth")
    before = (tmp_path / "flow.pth").read_bytes()
    words = options.format(folder=tmp_path).split()
    with pytest.raises(SystemExit, match=said) as exited:
        run(made, tmp_path / "student.pth", *words, attn=tuple(attn.split()))
    assert "\n" not in str(exited.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_several_processes_are_refused(made, tmp_path, monkeypatch):
    """Each process would do all of the work, and write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="torchrun started 2 processes.*; allowed: .*prepare_distributed"):
        run(made, tmp_path / "student.pth")
    assert not list(tmp_path.iterdir())
