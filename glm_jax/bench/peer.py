"""Another implementation in another environment: a child that takes one timing per request."""

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_jax.bench.timing import Sample, Task
from glm_jax.errors import GlmError

PATIENCE_S = 900.0
"""Seconds that any one answer may take; beyond them the child is stopped."""


class Peer:
    """A program that reads requests from stdin and answers each with one line of JSON on stdout.

    It is given one argument, a JSON object with the work to measure. Its first line is a greeting,
    an object that names its versions; then each request, a dtype and perhaps a number of sequences
    on a line, is answered by `{"wall_s": ..., "cpu_s": ...}`, or by `{"error": ...}`.

    Use it as a context manager: the child ends with the block.

    Args:
        python: interpreter of the environment that has what the program imports.
        program: the program.
        work: the argument.

    Raises:
        GlmError: the interpreter or program is missing, or the child ended or erred.
    """

    def __init__(self, python: Path, program: Path, work: Mapping[str, Any]):
        if not program.is_file():
            raise GlmError(f"{program}: missing; run the comparison from a checkout of the project")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self._name = f"{python} {program}"
        try:
            self._child = subprocess.Popen(
                [str(python), str(program), json.dumps(work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise GlmError(
                f"--peer-python {python}: cannot be run ({error.strerror}); give the path of a "
                "Python interpreter"
            ) from None
        try:
            self.versions: dict[str, str] = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()
        self._log.close()

    def task(self, dtype: str, *numbers: int) -> Task:
        """A task that asks the child for one timing."""
        request = " ".join([dtype, *map(str, numbers)])

        def run() -> Sample:
            assert self._child.stdin is not None
            try:
                self._child.stdin.write(f"{request}\n")
                self._child.stdin.flush()
            except BrokenPipeError:
                pass  # _answer reports the end of the child
            answer = self._answer()
            return Sample(wall_s=float(answer["wall_s"]), cpu_s=float(answer["cpu_s"]))

        return run

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        alarm = threading.Timer(PATIENCE_S, self._child.kill)
        alarm.start()
        try:
            line = self._child.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            status = self._child.wait()
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:] or ["it printed nothing"]
            raise GlmError(
                f"{self._name}: ended with status {status} ({last[0]}); mend that environment, or "
                "leave out --peer-python"
            )
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            raise GlmError(f"{self._name}: answered {line!r}; need one line of JSON") from None
        if "error" in answer:
            raise GlmError(f"{self._name}: {answer['error']}")
        return answer
