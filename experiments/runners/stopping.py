"""Stopping in order when a signal asks for it: after the step that is being made, by all processes of a run."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from ..errors import RunError

TERMINATED = 128 + signal.SIGTERM
# USR2 is what SLURM is told to send ahead of a time limit (NCCL may use USR1). Who watches this process may have set it
# to be ignored, and then sends TERM.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopRequest:
    """A note that a signal has come, and the agreement of all processes on it.

    Lightning's own handler talks to the other processes from within the handler, in the middle of whatever collective
    operation is going on.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Takes the signals over, until Lightning puts back the handlers that were there before its training."""
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN and _in_main_thread():
                signal.signal(signum, self._note)

    def agreed(self, trainer: L.Trainer) -> bool:
        """Whether any process has been asked to stop; every process has to ask this after the same steps."""
        requested = self.requested or trainer.received_sigterm
        if trainer.world_size == 1:
            return requested
        flag = torch.tensor(float(requested), device=trainer.strategy.root_device)
        return bool(trainer.strategy.reduce(flag, reduce_op="sum") > 0)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """The signals outside of the training loop: they end the process in order too, with `TERMINATED`."""

    def stop(signum: int, frame: FrameType | None) -> None:
        # Lightning calls the handler that was there before from its own.
        if signal.getsignal(signum) is stop:
            raise SystemExit(TERMINATED)

    if not _in_main_thread():
        yield
        return
    before = {
        signum: signal.signal(signum, stop) for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def left_to_the_main_process(worker: int) -> None:
    """Called in each data-loading process: SLURM signals all processes of a job, and these are to go on loading.

    They end when the main process no longer asks for batches, or is gone.
    """
    for signum in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)


def processes(devices: int, num_nodes: int) -> ClusterEnvironment:
    """Who starts the processes of a run: srun has, or Lightning is to.

    Args:
        devices: processes on each node.
        num_nodes: nodes.

    Raises:
        RunError: where srun has started another number than that: some would wait for others for ever.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    wanted = devices * num_nodes
    # Set by srun alone; SLURM_NTASKS stands in batch scripts and in interactive shells too.
    started = os.environ.get("SLURM_STEP_NUM_TASKS")
    if started is None or "SLURM_PTY_PORT" in os.environ or (wanted == 1 and int(started) == 1):
        if num_nodes > 1 and "NODE_RANK" not in os.environ:  # which is how Lightning is told by hand
            raise RunError(
                f"trainer.num_nodes={num_nodes} needs srun to start a process for each device: "
                f"sbatch --nodes={num_nodes} --ntasks-per-node={devices}, and in the script "
                "`srun python -m experiments.train …` (or submit by python -m slurm.submit)"
            )
        return LightningEnvironment()
    if int(started) != wanted or int(os.environ.get("SLURM_STEP_NUM_NODES", num_nodes)) != num_nodes:
        nodes = os.environ.get("SLURM_STEP_NUM_NODES", "?")
        raise RunError(
            f"srun has started {started} processes on {nodes} nodes, and the run has trainer.num_nodes={num_nodes} × "
            f"trainer.devices={devices}: give SLURM --nodes={num_nodes} --ntasks-per-node={devices}, or the run "
            "trainer.num_nodes and trainer.devices as SLURM has them"
        )
    # Who submitted the job requeues it; Lightning would do so once more.
    return SLURMEnvironment(auto_requeue=False)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
