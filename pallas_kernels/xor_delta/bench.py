"""`python -m pallas_kernels.xor_delta.bench`: time of the operation."""

from pallas_kernels.bench import main
from pallas_kernels.xor_delta.shapes import OP

if __name__ == "__main__":
    main(OP)
