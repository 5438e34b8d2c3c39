"""``python -m optexport``."""

from optexport.cli.main import main

if __name__ == "__main__":  # and not where multiprocessing imports it to start a process
    main()
