"""P10: the CPU seconds (user and system) before a command begins its work, in fresh processes of one thread, with bytecode.

- ``scripts/train.py`` to the end of its first step, when ``metrics.csv`` has its first row, over a bare Lightning script with the same
  network, random windows of the same token file and the same AdamW.
- ``generate.py``, ``evaluate.py`` and ``view_attention.py`` on small checkpoints to their first output, over importing torch and loading the
  file; ``check.py`` over importing torch and the file.
- ``from minitx.nn import MultiHeadAttention`` in a process that has torch.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from harness import ROOT, Row, compared, median_interval, parser, row, turns, write

from minitx.data import kjv

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"  # a thread that waits for another uses its CPU, too
RUN = ("trainer.max_steps=2", "trainer.accelerator=cpu", "trainer.val_every=0", "trainer.val_batches=1")
RUN += ("callbacks.progress=false",)
IMPORTS = (
    "import time, torch; t = time.process_time(); from minitx.nn import MultiHeadAttention; print(time.process_time() - t)"
)
ATTENTION = """
import torch

def attention(query, key, value, mask=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value
"""
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


def of_processes() -> float:
    """CPU seconds of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*words: str) -> None:
    """A Python process that must succeed."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)}: {done.stderr}")


def until(seen: Callable[[subprocess.Popen[str]], bool], *words: str) -> float:
    """CPU seconds of a Python process that is killed as soon as ``seen`` is true."""
    before, command = of_processes(), [sys.executable, *words]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        done = seen(process)
        process.kill()
    if not done:
        raise SystemExit(f"error: {' '.join(words)} ended before its work")
    return of_processes() - before


def until_output(*words: str) -> float:
    """Of any process, to the first character on stdout."""
    return until(lambda process: process.stdout is not None and process.stdout.read(1) != "", *words)


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


def by_turns(a: Callable[[], float], b: Callable[[], float], pairs: int) -> Row:
    """``compared``, after a start of each for bytecode and the page cache."""
    a(), b()
    return compared([(side, (a, b)[side]()) for side in turns(pairs)])


def commands(pairs: int) -> Iterator[Row]:
    """The scripts that read a checkpoint or a file of Python."""
    with tempfile.TemporaryDirectory() as name:
        recall = ("experiment=kv_lookup", "data.val_size=32", "schedule.warmup_steps=0")
        run("scripts/train.py", *RUN, f"output_dir={name}/text")
        run("scripts/train.py", *recall, *RUN, f"output_dir={name}/recall")
        Path(name, "mine.py").write_text(ATTENTION, encoding="utf-8")
        text, recalled = (f"{name}/{folder}/checkpoints/last.ckpt" for folder in ("text", "recall"))
        load = "import torch; torch.load({!r}, weights_only=True); print(1, flush=True)"
        load_file = f"import sys, torch; sys.path.insert(0, {name!r}); import mine; print(1, flush=True)"
        page = f"output={name}/page.html"
        for label, wanted, code, program, *words in (
            ("a small checkpoint", "<= 1.3", load.format(text), "generate.py", f"ckpt_path={text}", "prompt=And"),
            ("a small checkpoint", "<= 1.5", load.format(recalled), "evaluate.py", f"ckpt_path={recalled}"),
            (
                "a small checkpoint",
                "<= 1.3",
                load.format(recalled),
                "view_attention.py",
                f"ckpt_path={recalled}",
                "row=0",
                page,
            ),
            ("a function of attention", "<= 1.3", load_file, "check.py", f"{name}/mine.py:attention"),
        ):
            a = partial(until_output, "-c", code)
            b = partial(until_output, str(ROOT / "scripts" / program), *words)
            what = f"CPU seconds of {program} to its first output over importing torch and loading the file"
            yield row("P10", what, label, by_turns(a, b, pairs), wanted)


def import_of_attention(pairs: int) -> Row:
    run("-c", IMPORTS)
    command = [sys.executable, "-c", IMPORTS]
    times = [float(subprocess.check_output(command, cwd=ROOT, env=ENVIRONMENT, text=True)) for _ in range(2 * pairs)]
    what = "CPU seconds of from minitx.nn import MultiHeadAttention"
    return row("P10", what, "after import torch", median_interval(times), "<= 0.1")


def main() -> None:
    given = parser(__doc__, ("P10",), pairs=8).parse_args()
    torch.set_num_threads(1)  # recorded
    tokens = kjv().train.tokens.path  # type: ignore[union-attr]
    found = by_turns(partial(until_output, "-c", BARE, str(tokens)), until_first_step, given.pairs)
    what = "CPU seconds of train.py to its first step over a bare Lightning script"
    rows = [row("P10", what, "E 128, 12 x 64", found, "<= 1.1")]
    rows += commands(given.pairs)
    write("start", [*rows, import_of_attention(given.pairs)])


if __name__ == "__main__":
    main()
