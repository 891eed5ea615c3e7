"""`python -m pallas_kernels.top_k_select.bench`: time of the selection of GLM-5.2."""

from pallas_kernels.bench import main
from pallas_kernels.top_k_select.shapes import OP

if __name__ == "__main__":
    main(OP)
