"""Faults that the parity checks must catch, and correct runs that they must accept.

Each fault is a small, realistic mistake:

- `merging`, `layers` and `attention`: mistakes of a rule. The transformed graph must fail first, and the error must
  name the faulty rule, not the correct rules before and after it.
- `onnx_files` and `torch_files`: mistakes of an exporter or a runtime. The file must fail first, and the error must
  name the exporter or the runtime.
- `bundles`: changes of a finished bundle with updated digests. ``optexport verify`` must fail.
- `unseen`: changes that the checks cannot see, because they have no effect or are lost in rounding.

`test_faults` tests each fault, and `test_honest` looks for false alarms. ``python -m tests.faults.measure`` counts both
at each multiple of the noise floor.
"""
