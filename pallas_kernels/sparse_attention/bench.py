"""`python -m pallas_kernels.sparse_attention.bench`: time of the attention over lists."""

from pallas_kernels.bench import main
from pallas_kernels.sparse_attention.shapes import OP

if __name__ == "__main__":
    main(OP)
