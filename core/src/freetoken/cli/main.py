"""The program ``freetoken``. Exit codes: 0 done, 1 failed while running, 2 asked for something that cannot be done."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from freetoken.vocab.errors import CheckpointError, FreeTokenError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors made for people are printed in three lines, without a stack trace."""
    try:
        _refuse_monolith()
        return _run(sys.argv[1:] if argv is None else argv)
    except (UsageError, CheckpointError) as error:
        print(f"freetoken: {error}", file=sys.stderr)
        return 2
    except FreeTokenError as error:
        print(f"freetoken: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is its right.
        sys.stderr.close()
        return 0


def _run(argv: Sequence[str]) -> int:
    from freetoken.cli.context import build_context

    context, parser = build_context(argv)
    for warning in context.settings.warnings:
        print(f"freetoken: warning: {warning}", file=sys.stderr)
    command = getattr(context.args, "run_command", None)
    if command is None:
        parser.print_help()
        return 0
    return int(command.run(context))


def _refuse_monolith() -> None:
    """The distribution ``freetoken`` is the older, unrelated code base; it uses the same import name."""
    try:
        version = importlib.metadata.version("freetoken")
    except importlib.metadata.PackageNotFoundError:
        return
    raise UsageError(
        "freetoken-core beside the distribution freetoken",
        f"freetoken {version} is installed in this environment and uses the same import name",
        "pip uninstall freetoken, then pip install --force-reinstall freetoken-core",
    )


if __name__ == "__main__":
    sys.exit(main())
