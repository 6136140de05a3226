"""The image task: its model without batch statistics, its split, its loss, and what does not fit together."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.task.image import (
    PRESETS,
    ImageConfig,
    ResNetConfig,
    accuracy,
    count_groups,
    image,
    label_loss,
    open_images,
    resnet,
    split,
    with_group_norm,
)
from tests.support.journals import read_journal

pytest.importorskip("transformers", reason="the transformers library is not installed")
sklearn_datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")


def some(count, size=32, channels=1, classes=10):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, channels, size, size, generator=generator)
    return images, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_loss_of_an_image_does_not_depend_on_its_batch(preset):
    torch.manual_seed(0)
    model = resnet(ResNetConfig(preset), channels=1, classes=10)
    images, labels = some(4)
    assert model.training
    whole, weight = label_loss(model, (images, labels))
    parts = [label_loss(model, (images[i : i + 1], labels[i : i + 1]))[0].item() for i in range(4)]
    assert whole.item() == pytest.approx(sum(parts), rel=1e-5)
    assert weight == 4
    assert list(model.buffers()) == []  # nothing that is gathered from batches, either


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_can_learn(preset):
    model = resnet(ResNetConfig(preset), channels=3, classes=7)
    label_loss(model, some(2, size=64, channels=3, classes=7))[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_groups_divide_the_channels():
    for channels in [*range(1, 300), 512, 1000, 1024, 2048]:
        possible = [n for n in range(1, 33) if channels % n == 0 and channels // n >= 2]
        assert count_groups(channels) == (possible[-1] if possible else 1)


def test_the_swap_of_norms_changes_nothing_else():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(7, 12, 1), nn.BatchNorm2d(12, eps=0.5, affine=False))
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), inner)
    x = torch.randn(2, 3, 8, 8)
    shape, kinds, parameters = model(x).shape, [type(m) for m in model.modules()], dict(model.named_parameters())
    swapped = with_group_norm(model)
    assert swapped(x).shape == shape
    assert [type(m) for m in swapped.modules()] == [nn.GroupNorm if k is nn.BatchNorm2d else k for k in kinds]
    assert {n: p.shape for n, p in swapped.named_parameters()} == {n: p.shape for n, p in parameters.items()}
    assert all(p is parameters[n] for n, p in swapped.named_parameters() if not n.startswith("1."))
    assert swapped[3][1].eps == 0.5
    assert isinstance(with_group_norm(nn.BatchNorm2d(5)), nn.GroupNorm)


@pytest.mark.parametrize("heldout", [0, 0.001, 0.2, 0.9999])
def test_the_split_is_disjoint_and_whole(heldout):
    train, held = split(1000, heldout)
    assert sorted(train + held) == list(range(1000)) and split(1000, heldout) == (train, held)
    assert len(held) == min(round(1000 * heldout), 999)


def test_the_digits_are_all_there_once():
    train, heldout, _ = open_images(ImageConfig())
    digits = sklearn_datasets.load_digits()
    pairs = [(x, y) for part in (train, heldout) for x, y in part]
    pixels = np.stack([(x[0, ::4, ::4].double().numpy() + 1) * 8 for x, _ in pairs])
    seen = sorted((p.tobytes(), int(y)) for p, (_, y) in zip(pixels, pairs, strict=True))
    assert seen == sorted((p.tobytes(), int(y)) for p, y in zip(digits.images, digits.target, strict=True))
    x, y = train[0]
    assert (x.shape, x.dtype, y.dtype) == ((1, 32, 32), torch.float32, torch.int64)
    assert len(heldout) == 359
    assert open_images(ImageConfig(heldout=0))[1] is None


@pytest.mark.parametrize("source", ["digits", "synthetic"])
def test_the_images_are_the_same_under_every_seed(source):
    def data_id(seed, **options):
        torch.manual_seed(seed)
        np.random.seed(seed)
        return image(data=ImageConfig(source, **options)).data_id

    assert data_id(0, size=32) == data_id(9, size=32) != data_id(9, size=40, heldout=0.3)


def test_synthetic_images_have_the_shape_that_was_asked_for():
    task = image(ResNetConfig("resnet18"), ImageConfig("synthetic", size=48))
    x, y = task.train_data[0]
    assert x.shape == (3, 48, 48) and 0 <= y < 1000 and task.heldout_data is None
    assert task.model(pixel_values=x[None]).logits.shape == (1, 1000)


class Lookup(nn.Module):
    def forward(self, pixel_values):
        return SimpleNamespace(logits=pixel_values.flatten(1)[:, :10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_accuracy_are_those_in_float64(dtype):
    images, labels = some(50)
    images = images.to(dtype)
    logits = images.double().numpy()[:, 0, 0, :10]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss, weight = label_loss(Lookup(), (images, labels))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-log_p[range(50), labels].sum(), rel=1e-5)
    assert weight == 50
    right, count = accuracy(Lookup(), (images, labels))["accuracy"]
    assert (right.item(), count) == ((logits.argmax(-1) == labels.numpy()).sum(), 50)


@pytest.mark.slow
def test_the_defaults_learn_the_digits(tmp_path):
    hvdtrain.train({"run_dir": str(tmp_path / "run"), "train": {"eval_samples": 0}}, image)
    lines = read_journal(tmp_path / "run" / "journal.jsonl")
    shares = [line["metrics"]["accuracy"] for line in lines if line.get("event") == "evaluation"]
    assert shares[0] < 0.3
    assert shares[-1] > 0.95


@pytest.mark.parametrize("options", [{"heldout": 1.0}, {"heldout": -0.1}, {"source": "synthetic", "size": 31}])
def test_options_that_are_wrong(options):
    with pytest.raises(ConfigError, match=r"data\.(heldout|size)"):
        image(data=ImageConfig(**options))
