"""Write ``tests/golden/hub_logits.json``: what transformers computes for the tiny folders of ``tests/support/hub_folders.py``.

python -m scripts.hub_golden    # in an environment with torch and transformers; safetensors, ml_dtypes and numpy too
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.hub_folders import KINDS, TOKENS, write_folder

TO = Path("tests/golden/hub_logits.json")


def main() -> None:
    golden = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0], "logits": {}}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            model, info = AutoModelForCausalLM.from_pretrained(
                write_folder(Path(folder) / kind, kind),
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
        assert not any(info.values()), (kind, info)
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(TOKENS).long(), use_cache=False).logits.numpy()
        shown = [[float(f"{x:.9g}") for x in logits[row, t, ::9]] for row, t in ((0, 0), (0, 11), (1, 23))]
        wide = torch.from_numpy(logits[:, :-1]).double().log_softmax(-1)
        loss = -wide.gather(-1, torch.from_numpy(TOKENS[:, 1:, None]).long()).mean()
        golden["logits"][kind] = {"largest": float(abs(logits).max()), "shown": shown, "loss": float(loss)}
        print(kind, golden["logits"][kind]["largest"])
    TO.write_text(json.dumps(golden, indent=1) + "\n")


main()
