"""Runs the code blocks of a Markdown file, so that the text cannot drift from the code.

    python scripts/check_readme.py [FILE ...]          run every bash and python block
    python scripts/check_readme.py --test-command      print the README's test command

A comment on the line before a block changes what happens to it:
    <!-- no-run: reason -->    the block is shown only
    <!-- test-command -->      the block is the test command; CI runs it as a step of its own
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMENT = re.compile(r"<!--\s*(?P<name>no-run|test-command)(?::\s*(?P<reason>\S.*?))?\s*-->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, text, first line number, and the comment before it."""

    language: str
    text: str
    line: int
    comment: str


def code_blocks(markdown: str) -> Iterator[Block]:
    """Yields the fenced blocks of a Markdown text.

    Raises:
        ValueError: a block is not closed, or a `no-run` comment gives no reason.
    """
    lines = iter(enumerate(markdown.splitlines(), 1))
    comment = ""
    for number, line in lines:
        if line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                body.append(inner)
            else:
                raise ValueError(f"line {number}: the block is not closed; end it with ```")
            yield Block(
                language=line[3:].strip(), text="\n".join(body), line=number, comment=comment
            )
            comment = ""
        elif line.strip():
            found = COMMENT.fullmatch(line.strip())
            comment = found["name"] if found else ""
            if found and comment == "no-run" and not found["reason"]:
                raise ValueError(f"line {number}: write the reason, <!-- no-run: reason -->")


def test_command(markdown: str) -> str:
    """Returns the one block marked `<!-- test-command -->`.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [x.text.strip() for x in code_blocks(markdown) if x.comment == "test-command"]
    if len(found) != 1:
        raise ValueError(f"{len(found)} blocks are marked <!-- test-command -->; mark exactly one")
    return found[0]


def run_blocks(path: Path) -> bool:
    """Runs the blocks of one file in its order, from the repository root; stops at a failure."""
    programs = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    for block in code_blocks(path.read_text()):
        if block.language not in programs or block.comment:
            continue
        where = f"{path.name}:{block.line}"
        print(f"--- {where}\n{block.text}", flush=True)
        start = time.monotonic()
        command = [*programs[block.language], block.text]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        print(f"--- {where}: status {status}, {time.monotonic() - start:.1f} s", flush=True)
        if status:
            return False
    return True


def main() -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:]
    if arguments == ["--test-command"]:
        print(test_command(README.read_text()))
        return 0
    return 0 if all(run_blocks(path) for path in map(Path, arguments or [README])) else 1


if __name__ == "__main__":
    sys.exit(main())
