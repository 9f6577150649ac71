"""Losses of adapters that Hugging Face's peft trains in a plain loop; prints losses.json. Needs peft and transformers.

    python -m tests.golden.peft.make > tests/golden/peft/losses.json

The model, its first adapters, the data and the rule are those of tests/trainer/convert/test_adapters.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from torch.nn import functional as F

from tests.trainer.convert.test_adapters import RATE, STEPS, adapted, base_run
from tests.trainer.engines import microbatches
from trainer.convert.convert import ConvertOptions, convert


def main() -> None:
    """Save the first adapters as peft has them, and train them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        convert(base_run(root / "base"), root / "hf", options=ConvertOptions(to="hf"))
        engine = adapted(root / "hf")
        engine.save(str(root / "run/checkpoints"), step=1, consumed_samples=1)
        convert(root / "run", root / "adapter", options=ConvertOptions(to="peft"))
        base = transformers.AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True)
    batches = [microbatches(engine, step % 2) for step in range(STEPS)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    with torch.no_grad():
        logits = model(batches[0][0].tokens_BS).logits[0, -1, :8].tolist()
    for rows in batches:
        tokens, labels, mask = (
            torch.cat([getattr(row, name) for row in rows]) for name in ("tokens_BS", "labels_BS", "loss_mask_BS")
        )
        of_token = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (of_token * mask.flatten()).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tensors = peft.get_peft_model_state_dict(model)
    result = {
        "versions": {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "logits": logits,
        "losses": losses,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
