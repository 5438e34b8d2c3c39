"""The proof, proven: a catalogue of mistakes that the proof must catch, and of honest work that it must let pass.

Each fault is a small, believable break, put where such breaks happen:

- `merging`, `layers` and `attention` hold mistakes of a rule: the transformed graph must fail first, and that rule be
  blamed, not the honest rules that run before and after it;
- `onnx_files` and `torch_files` hold mistakes of an exporter or a runtime: the file must fail first, and the exporter
  or the runtime be blamed;
- `bundles` holds what is done to a finished bundle by someone who seals it again: ``optexport verify`` must fail;
- `unseen` holds what the proof does not see: changes that cannot show, and changes that are lost in rounding.

`test_faults` puts them in one by one, `test_honest` looks for false alarms, and ``python -m tests.faults.measure``
counts both at each multiple of the noise floor.
"""
