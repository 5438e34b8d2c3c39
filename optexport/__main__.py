"""``python -m optexport``, and the console script."""

from __future__ import annotations

from optexport import interrupts


def main() -> None:
    """Runs the command line; what it is made of is imported once a signal can no longer leave a traceback there."""
    interrupts.end_at_once()
    from optexport.cli.main import main as program

    program()


if __name__ == "__main__":  # and not where multiprocessing imports it to start a process
    main()
