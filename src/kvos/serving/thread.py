"""The one thread that owns storage, sequences and sessions; everybody else sends it commands and awaits futures."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvos.errors import EngineContractError, EngineStoppedError
from kvos.serving.core import EngineCore

__all__ = ["EngineThread"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Command:
    future: Future[Any]
    work: Callable[[EngineCore], Any]

    def run(self, core: EngineCore) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work(core)
        except BaseException as error:  # noqa: BLE001 - it is the caller's, who gets it from the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """Runs commands between steps, and steps while there are requests.

    ``submit`` and ``call`` may be used from any thread but the engine thread itself.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._stopping = False
        self._process = os.getpid()
        core.moves.connect(self._notify)
        self._thread = threading.Thread(target=self._run, name="kvos-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[EngineCore], T]) -> Future[T]:
        """Run ``command`` on the engine thread between two steps.

        Raises:
            EngineStoppedError: the runtime is closed, or was opened in another process, from which this one forked.
        """
        if os.getpid() != self._process:
            raise EngineStoppedError(
                f"the runtime was opened in process {self._process}, and its engine thread lives only there; "
                "open another one in this process"
            )
        future: Future[T] = Future()
        with self._gate:
            if self._stopping:
                raise EngineStoppedError("the runtime is closed; open a new one")
            self._commands.put(_Command(future, command))
        return future

    def _notify(self, work: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Have the engine thread run ``work`` and look around; after its end, call ``otherwise``. Any thread."""
        try:
            future = self.submit(lambda _: work())
        except EngineStoppedError:
            otherwise()
        else:
            future.add_done_callback(lambda ended: _unless_run(ended, otherwise))

    def call(self, command: Callable[[EngineCore], T]) -> T:
        """``submit`` and wait. If waiting is interrupted, a command that has not begun is dropped.

        Raises:
            EngineContractError: called on the engine thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise EngineContractError(
                "a runtime was called on its own engine thread; work there uses the core that it is given"
            )
        future = self.submit(command)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Finish the commands that are in the queue, fail what is still running, end the thread. Idempotent."""
        with self._gate:
            if not self._stopping:
                self._stopping = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread and os.getpid() == self._process:
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._obey():
                    self._step()
        finally:
            self._refuse_all(EngineStoppedError("the runtime was closed"))

    def _step(self) -> None:
        try:
            self._core.step()
        except Exception as error:
            # A bug in kvos: whoever waits must hear of it, and the others' sessions must go on.
            _logger.exception("a step of the engine failed")
            self._core.fail_all(error)

    def _work_ahead(self) -> bool:
        """Whether there was something to do that nobody waits for."""
        try:
            return self._core.idle_work()
        except Exception:  # a bug in kvos, and no reason for the thread to end
            _logger.exception("work between requests failed")
            return False

    def _refuse_all(self, error: EngineStoppedError) -> None:
        """However the thread ends, nobody waits for it afterwards."""
        with self._gate:
            self._stopping = True
        self._core.fail_all(error)
        self._core.moves.stop()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command.refuse(error)

    def _obey(self) -> bool:
        """Run the commands that wait now, waiting for one if nothing else is to be done; False at the end.

        Those that come meanwhile wait for the next step, so that nobody who asks often can hold up a reply.
        """
        waiting = max(1, self._commands.qsize())
        while waiting or self._core.patience_s() != 0:
            waiting -= waiting > 0
            patience = self._core.patience_s()
            block = patience != 0 and not self._work_ahead()
            try:
                command = self._commands.get(block, patience)
            except queue.Empty:
                if block or patience == 0:  # a deadline has passed, or there is a step to take
                    return True
                continue
            if command is None:
                return False
            command.run(self._core)
        return True


def _unless_run(ended: Future[None], otherwise: Callable[[], None]) -> None:
    """The engine thread has ended before this command's turn, or has run it."""
    if isinstance(ended.exception(), EngineStoppedError):
        otherwise()
