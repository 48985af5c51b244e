"""An SGLang server that eyas starts on this machine and stops again."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from eyas.errors import EyasError

_START_S, _STOP_S, _PAUSE_S = 1800.0, 20.0, 0.5
_SHOWN_LINES = 12


class SglangServer:
    """``words`` are its command line; it answers at ``address`` once this has been made.

    Raises: EyasError with the end of its log where it does not start.
    """

    def __init__(self, words: Sequence[str], address: str) -> None:
        self.address = address
        log, name = tempfile.mkstemp(prefix="eyas-sglang-")
        self._log = Path(name)
        # A group of its own: SGLang starts further processes, and a kill has to reach all of them.
        self._process = subprocess.Popen(
            [sys.executable, *words[1:]], stdout=log, stderr=log, start_new_session=True
        )
        os.close(log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            os.killpg(self._process.pid, signal_number)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue
        self._log.unlink(missing_ok=True)

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise EyasError(f"SGLang did not start (exit code {code})\n{self._last_lines()}")
            try:
                if httpx.get(f"{self.address}/health", timeout=10).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_PAUSE_S)
        raise EyasError(f"SGLang did not answer within {_START_S:.0f} s\n{self._last_lines()}")

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])
