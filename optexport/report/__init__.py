"""Reports of a run: on the terminal, in HTML, and for continuous integration."""
