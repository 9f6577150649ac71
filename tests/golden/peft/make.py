"""First logits and tensors of adapters as Hugging Face's peft has them; prints adapter.json. Needs peft, transformers.

    python -m tests.golden.peft.make > tests/golden/peft/adapter.json

The model, its adapters and the tokens are those of tests/trainer/convert/test_adapters.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers

from tests.trainer.convert.test_adapters import adapted, base_run
from tests.trainer.engines import microbatches
from trainer.convert.convert import ConvertOptions, convert


def main() -> None:
    """Save the adapters as peft has them, and read them with peft."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        convert(base_run(root / "base"), root / "hf", options=ConvertOptions(to="hf"))
        engine = adapted(root / "hf")
        engine.save(str(root / "run/checkpoints"), step=1, consumed_samples=1)
        convert(root / "run", root / "adapter", options=ConvertOptions(to="peft"))
        base = transformers.AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, root / "adapter")
    tokens = microbatches(engine, 0)[0].tokens_BS
    with torch.no_grad():
        logits = model(tokens).logits[0, -1, :8].tolist()
    tensors = peft.get_peft_model_state_dict(model)
    result = {
        "versions": {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "logits": logits,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
