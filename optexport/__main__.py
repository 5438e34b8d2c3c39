"""``python -m optexport``."""

from optexport.cli import main

main()
