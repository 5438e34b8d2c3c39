"""``python -m optexport``."""

from optexport.cli.main import main

main()
