"""`python -m pallas_kernels.rms_norm.bench`: time of the norms of GLM-5.2."""

from pallas_kernels.bench import main
from pallas_kernels.rms_norm.shapes import OP

if __name__ == "__main__":
    main(OP)
