"""Searches for the rules and format passes that make each exported file fastest.

The words of a search:

- candidate: a set of rules and format passes, and the file that they make;
- start: the candidate that the config describes, or as much of it as passes the checks;
- plain export: the candidate without optional rules and without format passes;
- rung: one stage of the search, in which some candidates are measured and the slower half drops out;
- round: one turn of every candidate of a rung at every shape;
- turn: consecutive calls of one file;
- launch: a new process for every file, which runs a few rounds;
- finalist: a candidate of the last rung, which alone decides;
- trial, outcome: what was seen of a candidate, and the result of a search.
"""
