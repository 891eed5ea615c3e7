"""`python -m pallas_kernels.head_logprob.bench`: time of the head of GLM-5.2."""

from pallas_kernels.bench import main
from pallas_kernels.head_logprob.shapes import OP

if __name__ == "__main__":
    main(OP)
