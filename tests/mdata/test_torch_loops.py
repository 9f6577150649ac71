"""Loops of Lightning and Accelerate over mdata's datasets; skipped where they are not installed.

They need a separate environment with torch: `pip install lightning accelerate`. Seen with lightning 2.6.6, accelerate
1.15.0 and torch 2.13.0.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.helpers.loops import BATCH, STEPS, Resumed, loader_of, opened, write_corpora  # noqa: E402 - torch

NAMES = ("native", "blend", "megatron")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    write_corpora(folder)
    return folder


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(2048, 8), torch.nn.Linear(8, 2048))


def loss_of(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(
        model(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none"
    )
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def plain(folder, name: str) -> tuple[list[list], list[float]]:
    """What a loop without any library reads, and its losses."""
    model, seen, losses = model_of(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader_of(opened(folder, name)):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(batch["tokens"].tolist())
        losses.append(loss.item())
    assert len(seen) == STEPS
    return seen, losses


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_lightning_trains_on_the_same_batches(folder, tmp_path, name, workers):
    lightning = pytest.importorskip("lightning")
    seen, losses = [], []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch, _number):
            loss = loss_of(self.model, batch)
            seen.append(batch["tokens"].tolist())
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    shared = {
        "accelerator": "cpu",
        "devices": 1,
        "use_distributed_sampler": False,
        "default_root_dir": tmp_path,
        **quiet,
    }
    for consumed in (0, 2 * BATCH):  # the second run begins where a first one of two steps had ended
        seen.clear()
        losses.clear()
        trainer = lightning.Trainer(max_epochs=1, enable_checkpointing=False, **shared)
        trainer.fit(Module(), loader_of(opened(folder, name), Resumed({"consumed": consumed}), workers=workers))
        wanted, wanted_losses = plain(folder, name)
        assert seen == wanted[consumed // BATCH :]
        assert consumed or losses == pytest.approx(wanted_losses, rel=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_accelerate_trains_on_the_same_batches(folder, name, workers):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = model_of()
    loader = loader_of(opened(folder, name), workers=workers)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    seen, losses = [], []
    for batch in loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen.append(batch["tokens"].tolist())
        losses.append(loss.item())
    wanted, wanted_losses = plain(folder, name)
    assert seen == wanted
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    # Its own way to begin in the middle.
    rest = [batch["tokens"].tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    assert rest == wanted[2:]
