"""`python -m pallas_kernels.ordered_sum.bench`: time of the operation."""

from pallas_kernels.bench import main
from pallas_kernels.ordered_sum.shapes import OP

if __name__ == "__main__":
    main(OP)
