"""`python -m pallas_kernels.pinned_matmul.bench`: time of the products of GLM-5.2."""

from pallas_kernels.bench import main
from pallas_kernels.pinned_matmul.shapes import OP

if __name__ == "__main__":
    main(OP)
