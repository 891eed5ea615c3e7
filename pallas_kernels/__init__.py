"""Operations whose reduction order is fixed, one folder each: reference, XLA twin, kernels."""
