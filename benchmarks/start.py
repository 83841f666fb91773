"""P10: the seconds before a command begins its work, in fresh processes with bytecode, and with files in the page cache.

- ``scripts/train.py`` to the end of its first step, when ``metrics.csv`` has its first row, over a bare Lightning script with the same
  network, random windows of the same token file and the same AdamW.
- ``generate.py``, ``evaluate.py`` and ``view_attention.py`` on small checkpoints, over a process that imports torch and loads the file.
- Seconds of ``import minitx.nn`` in a process that has torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import ROOT, Row, compared, median_interval, parser, row, turns, write

from minitx.data import kjv

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
RUN = ("trainer.max_steps=2", "trainer.accelerator=cpu", "trainer.val_every=0", "trainer.val_batches=1")
RUN += ("callbacks.progress=false",)
IMPORTS = "import time, torch; t = time.perf_counter(); import minitx.nn; print(time.perf_counter() - t)"
BARE = """
import sys, lightning.pytorch as L, numpy as np, torch, torch.nn.functional as F
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

class Windows(torch.utils.data.Dataset):
    def __init__(self, path): self.tokens = np.memmap(path, dtype="<u2", mode="r")
    def __len__(self): return len(self.tokens) - 64
    def __getitem__(self, start): return torch.from_numpy(self.tokens[start : start + 65].astype(np.int64))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = DecoderLM(TransformerConfig(vocab_size=128))
    def training_step(self, rows, index):
        return F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    def on_train_batch_end(self, *_): print("step", flush=True)

loader = torch.utils.data.DataLoader(Windows(sys.argv[1]), batch_size=12, shuffle=True)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(max_steps=1, accelerator="cpu", **quiet).fit(Module(), loader)
"""


def run(*words: str) -> float:
    """Wall seconds of a whole Python process."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)}: {done.stderr}")
    return time.perf_counter() - began


def until(seen: Callable[[subprocess.Popen[str]], bool], *words: str) -> float:
    """Wall seconds from the start of a Python process until ``seen`` is true; later seconds are not counted."""
    began, command = time.perf_counter(), [sys.executable, *words]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        done = seen(process)
        seconds = time.perf_counter() - began
        process.kill()
    if not done:
        raise SystemExit(f"error: {' '.join(words)} made no step")
    return seconds


def until_first_step() -> float:
    """Of ``scripts/train.py``, to the first row of its ``metrics.csv``."""
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "run" / "metrics.csv"

        def seen(process: subprocess.Popen[str]) -> bool:
            ended = process.poll() is not None
            while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 1) and not ended:
                time.sleep(0.001)
                ended = process.poll() is not None
            return metrics.exists()

        return until(seen, str(ROOT / "scripts/train.py"), *RUN, "trainer.ckpt_every=0", f"output_dir={metrics.parent}")


def until_said(tokens: Path) -> float:
    """Of the bare script, to the line that it prints after its first step."""
    return until(lambda process: any(line.strip() == "step" for line in process.stdout or ()), "-c", BARE, str(tokens))


def by_turns(a: Callable[[], float], b: Callable[[], float], pairs: int) -> Row:
    """``compared``, after a start of each for bytecode and the page cache."""
    a(), b()
    return compared([(side, (a, b)[side]()) for side in turns(pairs)])


def commands(pairs: int) -> Iterator[Row]:
    """The scripts that read a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        last = "checkpoints/last.ckpt"
        recall = ("experiment=kv_lookup", "data.val_size=32", "schedule.warmup_steps=0")
        run("scripts/train.py", *RUN, f"output_dir={name}/text")
        run("scripts/train.py", *recall, *RUN, f"output_dir={name}/recall")
        for words in (
            ["generate.py", f"ckpt_path={name}/text/{last}", "prompt=And", "max_new_tokens=1"],
            ["evaluate.py", f"ckpt_path={name}/recall/{last}"],
            ["view_attention.py", f"ckpt_path={name}/recall/{last}", "row=0", f"output={name}/page.html"],
        ):
            path = words[1].removeprefix("ckpt_path=")
            load = ["-c", f"import torch; torch.load({path!r}, weights_only=True)"]
            found = by_turns(lambda load=load: run(*load), lambda words=words: run(f"scripts/{words[0]}", *words[1:]), pairs)  # type: ignore[misc]
            yield row("P10", f"{words[0]} over importing torch and loading the file", "a small checkpoint", found, "<= 1.5")


def main() -> None:
    given = parser(__doc__, ("P10",), pairs=8).parse_args()
    tokens = kjv().train.tokens.path  # type: ignore[union-attr]
    found = by_turns(lambda: until_said(tokens), until_first_step, given.pairs)
    rows = [row("P10", "train.py to its first step over a bare Lightning script", "E 128, 12 x 64", found, "<= 1.1")]
    rows += commands(given.pairs)
    run("-c", IMPORTS)
    command = [sys.executable, "-c", IMPORTS]
    times = [float(subprocess.check_output(command, cwd=ROOT, env=ENVIRONMENT, text=True)) for _ in range(2 * given.pairs)]
    rows.append(row("P10", "seconds of import minitx.nn", "after import torch", median_interval(times), "<= 0.1"))
    write("start", rows)


if __name__ == "__main__":
    main()
