"""`python -m pallas_kernels.grouped_matmul.bench`: time of the experts' products."""

from pallas_kernels.bench import main
from pallas_kernels.grouped_matmul.shapes import OP

if __name__ == "__main__":
    main(OP)
