"""Seeded faults that only several processes show: what the lattice of runs notices, what the tests of several processes notice.

    python tests/tools/seeded_in_processes.py --list               # the faults, with the places that they change
    python tests/tools/seeded_in_processes.py lattice tests        # every fault that has no result yet, against both judges
    python tests/tools/seeded_in_processes.py lattice --only clip  # some faults, again
    python tests/tools/seeded_in_processes.py                      # the table of the results

As in ``seeded_faults.py``, a process forks for each fault and exchanges a function; so do the processes that it starts. The judge
``lattice`` has the points of several processes in ``tests/lattice/test_run_lattice.py``, those of the quick tests first, and stops at
the first oracle that fails. The judge ``tests`` has ``tests/training/test_several_processes.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from seeded_faults import Fault, ask_points, forked, log_of, note, plant, results

from tests.lattice import runs
from tests.lattice.test_run_lattice import QUICK_OF_SEVERAL, SLOW_OF_SEVERAL

PROCESSES, MODULE, CALLBACKS, STEP_LOG = (
    f"minitx/training/{name}.py" for name in ("processes", "module", "checkpoint_callbacks", "metrics_rows")
)
FAULTS = (
    Fault(
        "ddp_no_average",
        "DDP: the gradients are not averaged",
        f"{MODULE}:TrainingModule.training_step",
        "        sums = self.sums(batch)\n",
        "        self.trainer.strategy.model.require_backward_grad_sync = False\n        sums = self.sums(batch)\n",
    ),
    Fault(
        "world_forgotten",
        "the gradient is divided by the number of processes once too often",
        f"{MODULE}:TrainingModule.training_step",
        "return share * world * accumulate",
        "return share * accumulate",
    ),
    Fault(
        "summed_twice",
        "a sum over processes is summed over them again",
        f"{PROCESSES}:sum_over_processes",
        "    torch.distributed.all_reduce(total)\n",
        "    torch.distributed.all_reduce(total)\n    torch.distributed.all_reduce(total)\n",
    ),
    Fault(
        "rank_off",
        "each process reads the rows of the next one",
        "minitx/data/datamodule.py:DataModule._rank_and_world",
        "self.trainer.global_rank, self.trainer.world_size)",
        "(self.trainer.global_rank + 1) % self.trainer.world_size, self.trainer.world_size)",
    ),
    Fault(
        "barrier_forgotten",
        "a process does not wait until the first has written the rows from which the result is read",
        "minitx/training/fit.py:Run.fit",
        "            trainer.strategy.barrier()  # the result is read from files that the first process writes\n",
        "",
    ),
    Fault(
        "seed_without_rank",
        "all processes draw the same numbers",
        f"{MODULE}:TrainingModule.training_step",
        "hash_seed(self.seed, self.global_step, micro, rank)",
        "hash_seed(self.seed, self.global_step, micro)",
    ),
    Fault(
        "validation_of_one_rank",
        "the sums of a validation are those of each process",
        f"{MODULE}:TrainingModule._log_means",
        "{name: sum_over_processes(self.trainer, value) for name, value in self._validation.items()}",
        "dict(self._validation)",
    ),
    Fault(
        "targets_of_one_rank",
        "a micro-batch divides by its own number of targets",
        f"{MODULE}:TrainingModule.training_step",
        'targets = batch["num_targets"]  #',
        'targets = (batch["labels"] != -100).sum() * world * accumulate  #',
    ),
    Fault(
        "filler_counted",
        "the row of a process without rows counts in sums of the user's",
        f"{MODULE}:TrainingModule.validation_step",
        'torch.where(sums["count"] > 0, value, 0)',
        "value",
    ),
    Fault(
        "filler_has_labels",
        "the row of a process without rows has labels",
        "minitx/data/batches.py:ValSource.batch",
        'batch["labels"].fill_(math.nan if batch["labels"].is_floating_point() else IGNORED)',
        "pass",
    ),
    Fault(
        "best_by_one_rank",
        "best.ckpt is chosen by a loss of each process",
        f"{CALLBACKS}:BestCheckpoint.on_validation_end",
        "            super().on_validation_end(trainer, pl_module)\n",
        "            whole, own = self._monitor_candidates, {self.monitor: torch.as_tensor(float(pl_module.step_loss))}\n"
        "            self._monitor_candidates = lambda trainer: {**whole(trainer), **own}\n"
        "            super().on_validation_end(trainer, pl_module)\n"
        "            del self._monitor_candidates\n",
    ),
    Fault(
        "stop_by_one_rank",
        "the metric that ends a run is that of each process",
        "minitx/training/stop_at_value.py:StopAt.on_step",
        "rule.add(step_means(trainer, module))",
        'rule.add({**step_means(trainer, module), "train_loss": float(module.step_loss) * trainer.world_size})',
    ),
    Fault(
        "signal_not_shared",
        "a signal stops the process that gets it, and no other",
        f"{CALLBACKS}:LastCheckpoint._save_or_stop",
        "largest_of_all(trainer, time_is_over, self._received or 0)",
        "time_is_over, self._received or 0",
    ),
    Fault(
        "every_rank_writes",
        "every process writes the checkpoint",
        f"{CALLBACKS}:LastCheckpoint._save",
        "        trainer.save_checkpoint(path)\n",
        "        trainer.save_checkpoint(path)\n"
        "        trainer.strategy.checkpoint_io.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), path)\n",
    ),
    Fault(
        "resume_of_one_rank",
        "DDP: the first process alone loads the state of its optimizer",
        f"{MODULE}:TrainingModule.on_train_start",
        "        for optimizer in self.trainer.optimizers:  # a checkpoint from",
        "        for optimizer in self.trainer.optimizers if self.trainer.global_rank else ():\n"
        "            optimizer.state.clear()\n"
        "        for optimizer in self.trainer.optimizers:  # a checkpoint from",
    ),
    Fault(
        "average_of_one_rank",
        "the other processes validate weights without the average",
        f"{CALLBACKS}:Averages.on_validation_start",
        "        self._kept = [\n",
        "        for model in models if trainer.global_rank else ():\n"
        "            model.load_state_dict(module.state_dict())\n"
        "        self._kept = [\n",
    ),
    Fault(
        "clip_by_local_norm",
        "FSDP2: each process clips by the norm of its part",
        f"{PROCESSES}:total_norm",
        "_whole_tensor(torch.nn.utils.get_total_norm(gradients))",
        "torch.nn.utils.get_total_norm(local_parts(gradients))",
    ),
    Fault(
        "latch_of_one_rank",
        "FSDP2: the process whose part is not finite ends alone",
        f"{MODULE}:TrainingModule.on_before_optimizer_step",
        "self.latch.check(optimizer, self.grad_norm + self.step_loss if alone else self.grad_norm, self.global_step)",
        "self.latch.check(optimizer, torch.nn.utils.get_total_norm(local_parts(gradients)), self.global_step)",
    ),
    Fault(
        "sync_off_by_one",
        "FSDP2: gradients are reduced after the first micro-batch instead of the last",
        f"{MODULE}:TrainingModule.training_step",
        "(batch_idx + 1) % accumulate == 0",
        "batch_idx % accumulate == 0",
    ),
    Fault(
        "buffers_of_one_rank",
        "each process trains with its own buffers",
        f"{MODULE}:TrainingModule.training_step",
        "            self._share_buffers()\n",
        "            pass\n",
    ),
    Fault(
        "validated_buffers_of_one_rank",
        "each process validates with its own buffers",
        f"{MODULE}:TrainingModule._share_buffers",
        "        if self.trainer.world_size > 1:",
        "        if self._micro:",
    ),
    Fault(
        "moments_by_name",
        "FSDP2: moments are numbered by the names of parameters",
        "minitx/training/sharding.py:by_number",
        'enumerate(_parameters_of(state["param_groups"]))',
        'enumerate(sorted(_parameters_of(state["param_groups"])))',
    ),
    Fault(
        "every_rank_validates_all",
        "every process validates all rows",
        "minitx/data/datamodule.py:DataModule._validation",
        "rank, world = self._rank_and_world()",
        "rank, world = 0, 1",
    ),
    Fault(
        "draws_without_rank",
        "rows of two processes are drawn with the same numbers",
        "minitx/data/batches.py:TrainSource.batch",
        "self._draw(step, rows.start))",
        "self._draw(step, 0))",
    ),
    Fault(
        "documents_without_rank",
        "all processes read the same documents of a stream",
        "minitx/data/documents.py:StreamSource.batch",
        "rank * self.parts + part, num_parts)",
        "part, num_parts)",
    ),
    Fault(
        "losses_of_one_rank",
        "metrics.csv has the loss of the first process",
        f"{STEP_LOG}:summed",
        "return sum_over_processes(trainer, torch.stack([torch.as_tensor(value, device=device).to(wide) for value in local]))",
        "return torch.stack([torch.as_tensor(value, device=device).to(wide) for value in local])",
    ),
    Fault(
        "targets_counted_by_each",
        "means of other sums are divided by the targets of every process",
        f"{STEP_LOG}:means_of",
        "targets = targets / trainer.world_size",
        "targets = targets / 1",
    ),
    Fault(
        "positions_of_one_rank",
        "a checkpoint has the place in a stream of the first process alone",
        "minitx/data/documents.py:StreamSource.state_dict",
        "torch.distributed.all_gather_object(of_all, of_rank)",
        "of_all = [of_rank] * len(of_all)",
    ),
    Fault(
        "monitored_by_one_rank",
        "between rows of metrics.csv, a training metric that is monitored is of each process",
        f"{STEP_LOG}:StepLog.on_validation_start",
        "summed(trainer, module).unbind()",
        "torch.stack([torch.as_tensor(each).double() for each in (module.step_loss, module.step_targets * trainer.world_size, "
        "*module.step_sums.values())]).unbind()",
    ),
    Fault(
        "reached_by_one_rank",
        "FSDP2: each process looks at its own gradients alone",
        "minitx/training/unused_parameters.py:check_reached",
        "largest_of_all(trainer, *has_gradient, *(-number for number in has_gradient))",
        "[*has_gradient, *(-number for number in has_gradient)]",
    ),
    Fault(
        "precision_of_one_rank",
        "two machines may train in two precisions, and processes may monitor two values",
        "minitx/training/sharding.py:check_same",
        "trainer.strategy.broadcast(text) != text",
        "False",
    ),
    Fault(
        "buckets_of_the_first_step",
        "four processes of DDP add up the gradients of their first step in another order than later ones",
        "minitx/training/sharding.py:fix_buckets",
        "    weights = [weight",
        "    return\n    weights = [weight",
    ),
)

LIMIT = 60
"""Seconds of the processor that a judge may take for a fault, without those of the processes that it starts."""


def ask_lattice(fault: Fault) -> dict[str, Any]:
    """The first point and oracle that notice the fault."""
    words = sorted((*QUICK_OF_SEVERAL, *SLOW_OF_SEVERAL), key=lambda each: "FSDP2" in fault.line and "fsdp" not in each)
    points = [runs.RUNS.point_of(each) for each in words]
    return forked(partial(ask_points, runs, runs.RUNS, points, fault), log_of("lattice", fault), LIMIT)


def ask_tests(fault: Fault) -> dict[str, Any]:
    """The first test that notices the fault."""
    return forked(partial(_failing_test, fault), log_of("tests", fault), LIMIT)


def _failing_test(fault: Fault) -> list[str]:
    plant(fault)
    reports = Reports()
    pytest.main(
        [
            "tests/training/test_several_processes.py",
            "-x",
            "-q",
            "-n0",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ],
        [reports],
    )
    return reports.failed


class Reports:
    """A plugin of pytest that keeps the names of the tests that fail."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])


JUDGES = {"lattice": ask_lattice, "tests": ask_tests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judges", nargs="*", choices=[[], *JUDGES], help="the judges to run: lattice, tests")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", nargs="*", help="words in the names of faults, which are asked again")
    options = parser.parse_args()
    log_of("lattice", FAULTS[0]).parent.mkdir(parents=True, exist_ok=True)
    for fault in FAULTS:
        fault.code()  # raises where the place has changed
        if options.list:
            print(f"{fault.name}\n    {fault.line}\n    {fault.place}")
    if options.list:
        return
    for judge in options.judges:
        for fault in FAULTS:
            is_known = judge in results().get(_key(fault), {})
            if not is_known if options.only is None else any(word in fault.name for word in options.only):
                note(judge, _noted(fault), JUDGES[judge](fault))
    table(FAULTS, results())


def _key(fault: Fault) -> str:
    return f"several: {fault.name}"


def _noted(fault: Fault) -> Fault:
    return Fault(_key(fault), fault.line, fault.place, fault.before, fault.after)


def table(faults: Sequence[Fault], known: dict[str, Any]) -> None:
    """Print who notices each fault."""
    counts = dict.fromkeys(JUDGES, 0)
    for fault in faults:
        found = {judge: known.get(_key(fault), {}).get(judge, {}).get("found", []) for judge in JUDGES}
        counts = {judge: count + bool(found[judge]) for judge, count in counts.items()}
        print(f"{fault.name:26} {' '.join(found['lattice'][1:2]) or '-':48} {' '.join(found['tests'][:1]) or '-'}")
    print(f"of {len(faults)}: " + ", ".join(f"{judge} {count}" for judge, count in counts.items()))


if __name__ == "__main__":
    main()
