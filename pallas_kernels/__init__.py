"""Operations whose reduction order is fixed, one folder each: reference, XLA twin, kernels.

`pallas_kernels/<op>/` holds `op.py` (checks, dispatch, gradient; its docstring is the numerics
contract), `reference.py` (f64, slow and obvious), `xla.py` (the fixed-order twin), `pallas_tpu.py`
and `pallas_gpu.py` (kernels), `shapes.py` (what tests, checks and benchmarks run), `bench.py` and
`tuned.json` (tiles of the kernels; validated on load).
"""
